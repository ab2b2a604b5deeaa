"""Child process: a target and its draft in one, so that what is answered depends on nothing but the two models.

Time plays no part. The draft answers inside the target's step, its clock stands still, what its calls cost is a constant, and
whatever it drafts is verified. So every mismatch that can come up does, in the same order, on a busy machine as on an idle one.

Commands, a JSON line each: ``load``, ``answer``, ``score``.
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.chain.faults import FaultPolicy
from deployments.chain.trace import clip
from hw.onnx.costs import StepCosts
from scripts.bench_lib import settings

_PATIENCE_S = 300.0  # a step waits for its draft, however slow the machine is
_KV_CACHE_BYTES = 256 << 20  # vLLM touches all of it; answers here are short
_BATCHED_TOKENS = 1024  # of one step: where prompts are scored, each is a row of logits
# Seconds like those of the shipped draft on one core. They decide in which order sequences are read, never what is drafted.
_COSTS = (0.006, 0.002, 0.004, 0.001)


class FixedCosts(StepCosts):
    """Costs that do not follow the clock."""

    def saw_decode(self, rows: int, seconds: float) -> None:
        """Learn nothing."""

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Learn nothing."""


class Pair:
    """The two models behind the pipe; each public method is one command."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._prompts: dict[str, list[int]] = {}
        self._calls = 0

    def load(
        self,
        target: str,
        draft: str,
        provider: str,
        dtype: str,
        max_model_len: int,
        batch: int,
        tokens: int,
        top_k: int,
        more: dict[str, Any],
    ) -> dict[str, Any]:
        """Load both. ``tokens``: drafted in a round. ``more``: of vLLM's ``additional_config``."""
        started = time.perf_counter()
        from vllm import LLM

        self._llm = LLM(
            model=target,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=batch,
            max_num_batched_tokens=_BATCHED_TOKENS,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
            enforce_eager=True,
            enable_prefix_caching=False,
            seed=0,
            worker_cls=settings.WORKER,
            speculative_config={
                "method": "custom_class",
                "model": settings.PROPOSER,
                "num_speculative_tokens": tokens,
            },
            additional_config={
                "chain_adaptive": False,
                "chain_model_tokens": tokens,
                "chain_faults": {
                    "draft_deadline_s": _PATIENCE_S,
                    "draft_deadline_min_s": _PATIENCE_S,
                    "prefill_budget_s": _PATIENCE_S,
                },
                **more,
            },
        )
        self._connect(Path(draft), provider, max_model_len, batch, top_k)
        return {"seconds": time.perf_counter() - started}

    def _connect(self, folder: Path, provider: str, context: int, batch: int, top_k: int) -> None:
        from deployments.channel.inprocess import InProcessChannel
        from deployments.draft.engine import DraftEngine
        from hw.onnx.session import OnnxModel

        model = OnnxModel(folder, slots=2 * batch, context=context, provider=provider)
        model.costs = FixedCosts(*_COSTS)
        engine = DraftEngine(
            model,
            target_vocab_size=self._llm.llm_engine.model_config.get_vocab_size(),
            top_k=top_k,
            faults=replace(FaultPolicy(), prefill_budget_s=_PATIENCE_S),
            prefill_wait_s=_PATIENCE_S,
            ahead=0,
            paced=False,
            clock=lambda: 0.0,
        )
        self._llm.collective_rpc("set_channels", args=({"draft": InProcessChannel(engine, "draft")},))

    def answer(
        self,
        prompts: list[str],
        max_tokens: list[int],
        seeds: list[int],
        temperature: float,
        batch: int,
        enabled: bool,
        policy: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Answer in groups of ``batch``, each submitted at once. Not ``enabled``: without drafts."""
        from vllm import SamplingParams

        self._calls += 1  # the trace of the last request to end stays until the engine's next step: no name comes twice
        answers = []
        for start in range(0, len(prompts), batch):
            group = range(start, min(start + batch, len(prompts)))
            params = []
            for index in group:
                chain = {"id": f"{self._calls}-{index}", "enabled": enabled, "trace": True, "sources": ["model"]}
                if policy is not None:
                    chain["policy"] = policy
                params.append(
                    SamplingParams(
                        temperature=temperature,
                        max_tokens=max_tokens[index],
                        seed=seeds[index],
                        extra_args={"chain": json.dumps(chain)},
                    )
                )
            inputs = [{"prompt_token_ids": self._render(prompts[index])} for index in group]
            outputs = self._llm.generate(inputs, params, use_tqdm=False)
            answers += [
                self._answered(f"{self._calls}-{index}", output) for index, output in zip(group, outputs, strict=True)
            ]
        return {"answers": answers}

    def _answered(self, chain_id: str, output: Any) -> dict[str, Any]:
        tokens = list(output.outputs[0].token_ids)
        trace = self._llm.collective_rpc("take_trace", args=(chain_id,))[0]
        rounds = clip(trace, len(tokens))["rounds"] if trace is not None else []
        prompt = trace["prompt_tokens"] if trace is not None else 0
        return {
            "tokens": tokens,
            "text": output.outputs[0].text,
            "finish": output.outputs[0].finish_reason or "",
            "steps": len(rounds) or len(tokens),
            "drafted": sum(len(item["drafted"]) for item in rounds),
            "accepted": sum(item["accepted"] for item in rounds),
            "relaxed": [item["base"] - prompt + offset for item in rounds for offset in item["relaxed"]],
        }

    def score(self, prompts: list[str], answers: list[list[int]]) -> dict[str, Any]:
        """The target's negative log-likelihood (nats) of each answer's tokens after its prompt, at temperature 1."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, extra_args={"chain": json.dumps({"enabled": False})}
        )
        heads = [self._render(prompt) for prompt in prompts]
        inputs = [{"prompt_token_ids": head + tokens} for head, tokens in zip(heads, answers, strict=True)]
        outputs = self._llm.generate(inputs, params, use_tqdm=False) if inputs else []
        nll = [
            -math.fsum(output.prompt_logprobs[len(head) + index][token].logprob for index, token in enumerate(tokens))
            for head, tokens, output in zip(heads, answers, outputs, strict=True)
        ]
        return {"nll": nll}

    def _render(self, prompt: str) -> list[int]:
        if prompt not in self._prompts:
            tokenizer = self._llm.get_tokenizer()
            chat = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            self._prompts[prompt] = list(tokenizer(text, add_special_tokens=False).input_ids)
        return self._prompts[prompt]


def main(_: Sequence[str] | None = None) -> None:
    """Obey commands on standard input until it closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the pipe is for answers; whatever else prints goes to the log
    pair = Pair()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(pair, command.pop("command"))(**command)
        except Exception as error:  # the parent says what it means
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
