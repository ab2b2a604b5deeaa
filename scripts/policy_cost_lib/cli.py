"""Command line of ``scripts/policy_cost``."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# before vLLM is imported anywhere: the engine runs in this process, where its parts can be timed
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np

from scripts.bench_lib import machine
from scripts.bench_lib.prompts import load_prompts
from scripts.policy_cost_lib.meter import Meter, Step

ROOT = Path(__file__).resolve().parents[2]
TOP_K = 8  # probabilities a draft sends, its default
LAX = {"delta": 0.6, "delta_max": 1.0, "mask": 1.0}
POLICIES: dict[str, dict[str, Any] | None] = {
    "lossless": None,
    "nkl": {"name": "nkl"},
    "nkl, lax": {"name": "nkl", **LAX},
    "probabilistic, lax": {"name": "probabilistic", **LAX},
    "block, lax": {"name": "block", **LAX},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min_p": {"temperature": 0.8},
}
MIN_P = 0.05
PATIENT = {
    "draft_deadline_s": 60.0,
    "draft_deadline_min_s": 60.0,
}  # the draft shares this process: it is always in time


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/policy_cost",
        description="Milliseconds that acceptance policies add to a verifying step, beside the sampler's own time, measured in a "
        "real vLLM engine with a real draft: every function a policy adds is timed where the engine calls it. Only steps of a "
        "full batch count. Writes JSON to stdout or --out; progress to stderr.",
    )
    made.add_argument(
        "--target", type=Path, default=ROOT / "models" / "target", help="model folder (default: %(default)s)"
    )
    made.add_argument(
        "--draft", type=Path, default=ROOT / "models" / "draft-int4", help="ONNX folder (default: %(default)s)"
    )
    made.add_argument("--batch", type=int, default=8, help="sequences a step (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=4, help="drafted tokens a sequence (default: %(default)s)")
    made.add_argument("--length", type=int, default=32, help="tokens of each answer (default: %(default)s)")
    made.add_argument("--set", default="prose", help="prompt set of scripts/prompts (default: %(default)s)")
    made.add_argument("--out", type=Path, help="file for the JSON")
    return made


def main() -> int:
    options = parser().parse_args()
    prompts = load_prompts(options.set)
    if not 1 <= options.batch <= len(prompts):
        print(f"--batch must be in 1..{len(prompts)}, the prompts of {options.set}", file=sys.stderr)
        return 2
    messages = [list(prompt.messages) for prompt in prompts[: options.batch]]
    meter = Meter()
    meter.install()
    rows = measure(options, messages, meter)
    result = {
        "what": "policy_cost",
        "commit": machine.commit(ROOT),
        "machine": machine.machine(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        "batch": options.batch,
        "drafted_tokens_a_sequence": options.tokens,
        "unit": "ms",
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


def measure(options: argparse.Namespace, messages: list[Any], meter: Meter) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    from deployments.chain.faults import FaultPolicy
    from deployments.channel.inprocess import InProcessChannel
    from deployments.draft.engine import DraftEngine
    from hw.onnx.session import OnnxModel

    # Prompts are read before the first answer: in this process, a draft has no time between messages.
    draft = DraftEngine(
        OnnxModel(options.draft.resolve(), slots=options.batch, context=1024),
        top_k=TOP_K,
        faults=FaultPolicy(prefill_budget_s=60.0),
        prefill_wait_s=60.0,
    )
    llm = LLM(
        model=str(options.target.resolve()),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=options.batch,
        seed=0,
        worker_cls="deployments.target.worker.CpuTargetWorker",
        speculative_config={
            "method": "custom_class",
            "model": "deployments.target.proposer.ChainProposer",
            "num_speculative_tokens": options.tokens,
        },
        additional_config={"chain_adaptive": False, "chain_faults": PATIENT},
    )
    llm.collective_rpc("set_channels", args=({"draft": InProcessChannel(draft)},))

    def run(policy: dict[str, Any] | None, sampling: dict[str, Any], min_p: float, length: int) -> list[Step]:
        chain = {"min_p": min_p, **({"policy": policy} if policy else {})}
        params = [
            SamplingParams(
                max_tokens=length, ignore_eos=True, seed=index, extra_args={"chain": json.dumps(chain)}, **sampling
            )
            for index in range(options.batch)
        ]
        meter.take()
        llm.chat(messages, params, use_tqdm=False)
        return [step for step in meter.take() if step.requests == options.batch]

    run({"name": "nkl", **LAX}, {"temperature": 0.8}, 0.0, 8)  # warms up
    rows = []
    for kind, sampling in SAMPLING.items():
        for name, policy in POLICIES.items():
            steps = run(policy, sampling, MIN_P if kind == "min_p" else 0.0, options.length)
            rows.append({"sampling": kind, "policy": name, **figures(steps)})
            print(f"{kind:14}{name:20}{rows[-1]['policy_ms']}", file=sys.stderr)
    llm.llm_engine.engine_core.shutdown()
    return rows


def figures(steps: list[Step]) -> dict[str, Any]:
    """One row. ``ratio``: of the medians, policy to the rest of the sampler."""
    policy, rest = (np.asarray([getattr(step, name) for step in steps]) * 1e3 for name in ("policy_s", "sampler_s"))
    if not len(policy):
        raise RuntimeError("no step verified a full batch; are the answers too short?")

    def spread(values: np.ndarray) -> dict[str, float]:
        return {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (10, 50, 90)}

    def mean(name: str) -> float:
        return round(float(np.mean([getattr(step, name) for step in steps])), 2)

    return {
        "steps": len(steps),
        "policy_ms": spread(policy),
        "sampler_ms": spread(rest),
        "ratio": round(float(np.median(policy) / np.median(rest)), 4),
        "a_step": {name: mean(name) for name in ("drafted", "candidates", "passed")},
    }


if __name__ == "__main__":
    sys.exit(main())
