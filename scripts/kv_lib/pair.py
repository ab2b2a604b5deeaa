"""``scripts/kv pair``: what the target's KV is worth to a draft, with both models running.

Started as a process of its own, because vLLM reads its environment when it is imported.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from deployments.chain.protocol import PROTOCOL_VERSION, Draft, Drafts, Step
from deployments.draft.kv_intake import DTYPES
from deployments.kv import INLINE
from hw.kv.manifest import Manifest
from hw.kv.record import parse
from scripts.bench_lib import settings
from scripts.bench_lib.child import Child
from scripts.bench_lib.engine import DRAFT_TIMEOUT_S, ROOT, draft_command
from scripts.bench_lib.prompts import load_prompts

OWN, PREFIX, REFRESHED = "own", "prefix", "refreshed"
ROUND_TOKENS = 5  # committed in a round, between two refreshes
MODEL_ONLY = {"sources": ["model"]}


class Capture:
    """In a draft's place: keeps the KV it is sent, ``[2 * layers, heads, positions, head_dim]``."""

    def __init__(self, manifest: Manifest) -> None:
        self.kv: npt.NDArray[Any] | None = None
        self._manifest = manifest

    def step(self, step: Step) -> Drafts:
        geometry = self._manifest.geometry
        for commit in step.commits:
            if commit.kv and self.kv is None:
                record = parse(commit.kv)
                rows = np.frombuffer(record.row(0), DTYPES[self._manifest.numerics.k])
                shape = (2 * geometry.layers, geometry.heads, record.header.subject.valid_tokens, geometry.head_dim)
                self.kv = rows.reshape(shape).copy()
        answers = [Draft(c.session, c.epoch, c.length, [], "error") for c in step.commits]
        return Drafts(PROTOCOL_VERSION, "capture", step.number, answers)

    def disconnect(self, target: str) -> None:
        self.kv = None


class Target:
    """A vLLM engine in this process, with the chain's worker."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        from deployments.chain.controller import Unconditional

        cores = settings.Cores.split(_usable())
        bounds = settings.ChainBounds(tokens=4, model_tokens=4)
        arguments = settings.engine_settings("chain", folder, cores, "eager", bounds).arguments
        arguments["additional_config"] |= {"chain_sources": []}
        self.llm = LLM(**arguments)
        driver = self.llm.llm_engine.model_executor.driver_worker
        self.worker = getattr(driver, "worker", driver)
        self.worker._proposer.rounds.controller = Unconditional()
        while (offer := self.worker.kv_offer()) is None:
            time.sleep(0.1)
        if not offer:
            raise SystemExit("scripts/kv pair: this target's KV cannot be moved; its log says why")
        self.offer = offer
        self.manifest = Manifest.decode(offer["manifest"])

    def generate(self, prompt: list[int], tokens: int, chain: dict[str, Any]) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args={"chain": json.dumps(chain)}
        )
        outputs = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    @contextmanager
    def linked(self, channel: Any, link: str) -> Iterator[None]:
        """Drafts come from ``channel``, which gets KV over ``link``; empty: none."""
        self.worker.set_channels({"draft": channel})
        self.worker._kv.connect([{"name": "draft", "kv": link}])
        self.worker._proposer.rounds.send_kv(self.worker._kv.export if link else None)
        try:
            yield
        finally:
            self.worker._proposer.rounds.send_kv(None)
            self.worker.set_channels({})

    def kv_of(self, tokens: list[int]) -> npt.NDArray[Any]:
        """The target's KV of a sequence, ``[2 * layers, heads, len(tokens), head_dim]``."""
        from deployments.channel.inprocess import InProcessChannel

        capture = Capture(self.manifest)
        with self.linked(InProcessChannel(capture, "draft"), INLINE):
            self.generate(tokens, 3, MODEL_ONLY)
        assert capture.kv is not None, "the target sent no KV"
        return capture.kv[:, :, : len(tokens)]


def agreement(onnx: Any, tokens: list[int], prompt: int, kv: npt.NDArray[Any], mode: str) -> float:
    """Share of the target's ``tokens[prompt:]`` that the draft's best guess is, given all before each.

    ``mode``: the draft's own KV throughout, the target's for the prompt, or the target's for all that is committed.
    """
    right = 0
    if mode == OWN:
        onnx.prefill(0, tokens[: prompt - 1], 0)
    else:
        onnx.write_kv(0, 0, kv[:, :, : prompt - 1])
    refreshed = prompt - 1
    for position in range(prompt - 1, len(tokens) - 1):
        guess = int(onnx.decode([0], [tokens[position]], [position])[0].argmax())
        right += guess == tokens[position + 1]
        if mode == REFRESHED and position - refreshed >= ROUND_TOKENS:
            onnx.write_kv(0, refreshed, kv[:, :, refreshed : position + 1])
            refreshed = position + 1
    return right / (len(tokens) - prompt)


def first_draft_s(target: Target, channel: Any, link: str, prompt: list[int]) -> float:
    """Seconds from the target's first token until the first tokens of the draft model are accepted."""
    rounds = target.worker._proposer.rounds
    times: list[float] = []
    accepted: list[float] = []
    plain = rounds.round

    def watched(running: Any) -> Any:
        result = plain(running)
        times.append(time.perf_counter())
        if rounds.stats().get("accepted_tokens") and not accepted:
            accepted.append(time.perf_counter())
        return result

    rounds.round = watched
    try:
        with target.linked(channel, link):
            target.worker.reset_draft_stats()
            target.llm.reset_prefix_cache()
            limit = 2048 - len(prompt) - 8
            target.generate(prompt, min(limit, 400), MODEL_ONLY)
    finally:
        rounds.round = plain
    return accepted[0] - times[0] if accepted else float("inf")


def _usable() -> set[int]:
    return os.sched_getaffinity(0)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(prog="scripts/kv pair")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafts", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    console = Console()
    target = Target(given.target)
    prompts = [target.chat(list(prompt.messages)) for prompt in load_prompts("prose")[: given.prompts]]
    result: dict[str, Any] = {"prompts": len(prompts), "tokens": given.tokens, "agreement": {}, "first_draft_s": {}}
    with Progress(console=console, transient=True) as progress:
        result["agreement"] = _agreements(target, prompts, given, progress)
        result["first_draft_s"] = _first_drafts(target, given, progress)
    _show(console, result)
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _agreements(target: Target, prompts: list[list[int]], given: Any, progress: Progress) -> dict[str, Any]:
    from hw.onnx.session import OnnxModel

    task = progress.add_task("agreement", total=len(prompts) * (1 + 3 * len(given.drafts)))
    sequences = []
    for prompt in prompts:
        tokens = prompt + target.generate(prompt, given.tokens, {"enabled": False})
        sequences.append((tokens, len(prompt), target.kv_of(tokens)))
        progress.advance(task)
    found: dict[str, Any] = {}
    for folder in given.drafts:
        onnx = OnnxModel(folder, slots=1, context=2048)
        shares: dict[str, list[float]] = {mode: [] for mode in (OWN, PREFIX, REFRESHED)}
        for tokens, prompt_tokens, kv in sequences:
            for mode, values in shares.items():
                values.append(agreement(onnx, tokens, prompt_tokens, kv, mode))
                progress.advance(task)
        found[folder.name] = {
            mode: {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else 0.0}
            for mode, values in shares.items()
        }
    return found


def _first_drafts(target: Target, given: Any, progress: Progress) -> dict[str, Any]:
    from deployments.channel.connect import connect
    from deployments.channel.endpoint import Endpoint

    text = " ".join(message["content"] for prompt in load_prompts("copy") for message in prompt.messages)
    cores = settings.Cores.split(_usable())
    found: dict[str, Any] = {}
    task = progress.add_task("first draft", total=2 * given.repetitions)
    folder = given.drafts[0]
    arguments = settings.EngineSettings("chain", cores.all, {"model": str(given.target)}, "real")
    log = Path("/dev/null")
    child = Child(
        "draft", draft_command(arguments, folder, cores.draft), settings.draft_environment(), (cores.draft,), log, ROOT
    )
    try:
        endpoint = child.answer(DRAFT_TIMEOUT_S)
        child.tell(authorize=target.worker.client_key())
        offer = {**target.offer, "manifest": target.offer["manifest"].hex()}
        link = child.ask(DRAFT_TIMEOUT_S, meet=offer)["kv"]
        times: dict[str, list[float]] = {"with KV": [], "without": []}
        for repetition in range(given.repetitions):
            words = text.split()[37 * repetition :]
            prompt = target.chat([{"role": "user", "content": " ".join(words)}])[: given.long]
            for name, kv in (("with KV", link), ("without", "")):
                channel = connect(
                    Endpoint(
                        **{
                            key: endpoint[key]
                            for key in ("name", "address", "server_key", "vocab_size", "path", "machine")
                        }
                    ),
                    target.worker._keys,
                    target.worker._proposer.faults,
                )
                times[name].append(first_draft_s(target, channel, kv, prompt))
                progress.advance(task)
        found = {name: {"median": statistics.median(values), "all": values} for name, values in times.items()}
    finally:
        child.stop()
    return {"draft": folder.name, "prompt_tokens": given.long, "link": link, **found}


def _show(console: Console, result: dict[str, Any]) -> None:
    console.print(
        f"Agreement of a draft's best guess with the target's greedy token ({result['prompts']} prose prompts)"
    )
    for name, modes in result["agreement"].items():
        row = "   ".join(f"{mode} {figures['mean']:.3f}" for mode, figures in modes.items())
        console.print(f"  {name:<12} {row}")
    first = result["first_draft_s"]
    console.print(f"First accepted draft after the target's first token, prompt of {first['prompt_tokens']} tokens")
    for name in ("with KV", "without"):
        console.print(f"  {name:<8} {first[name]['median'] * 1e3:8.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
