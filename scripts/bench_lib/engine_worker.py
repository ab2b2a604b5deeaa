"""Child process: one vLLM engine that answers JSON-line commands. Started by :mod:`scripts.bench_lib.engine`.

Commands: ``load`` (vLLM arguments), ``kv_offer``, ``connect`` (draft endpoints), ``run`` (groups of chats to answer), ``settle``.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from scripts.bench_lib.statistics import ROUND_COSTS

SETTLE_TRIES = 40  # a frozen connection has missed its heartbeats and is made anew; a circuit may be open for seconds
SETTLE_PAUSE_S = 0.4
QUIET_ANSWERS = 3  # without a draft and without a reason below: the chain sees no gain in asking, which is its right
NO_ANSWER = ("deadline_missed", "not_sent", "not_answered", "circuit_open", "no_draft_replica")


class Engine:
    """The engine behind the pipe; each public method is one command."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._suffix_kept: set[str] = set()

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        if (arguments.get("speculative_config") or {}).get("method") == "suffix":
            # says what is missing before the model loads
            import arctic_inference.suffix_decoding  # type: ignore[import-untyped]  # noqa: F401
        from vllm import LLM

        self._llm = LLM(**arguments)
        chain = "worker_cls" in arguments
        return {
            "seconds": time.perf_counter() - started,
            "client_key": self._llm.collective_rpc("client_key")[0] if chain else None,
        }

    def kv_offer(self) -> dict[str, Any]:
        """What the draft must know to take this engine's KV or hidden states; empty where it gives neither."""
        while (offer := self._llm.collective_rpc("kv_offer")[0]) is None:  # fingerprints of the weights are being made
            time.sleep(SETTLE_PAUSE_S)
        return {**offer, "manifest": offer["manifest"].hex()} if "manifest" in offer else offer

    def connect(self, endpoints: list[dict[str, Any]]) -> dict[str, Any]:
        return {"connected": self._llm.collective_rpc("connect_drafts", args=(endpoints,))[0]}

    def warm_up(
        self, chats: list[list[dict[str, str]]], batches: list[int], temperatures: list[float], chain: str | None
    ) -> dict[str, Any]:
        """Answer warm-up prompts at every batch size and temperature that will be measured."""
        for temperature in temperatures:
            for batch in batches:
                group = [chats[index % len(chats)] for index in range(batch)]
                self._answer([group], self._params(temperature, 16, True, chain))
        cache = self._suffix_cache()
        if cache is not None:
            self._suffix_kept = set(cache.cached_requests)
        return {}

    def settle(self, chat: list[dict[str, str]], tokens: int, chain: str | None, asks_model: bool) -> dict[str, Any]:
        """Short unmeasured answers after the process was frozen: caches fill, sockets notice that time has passed.

        With ``asks_model`` it goes on until the draft process drafts, or is not asked for reasons other than its silence.
        """
        quiet = 0
        for _ in range(SETTLE_TRIES):
            before = self._stats()
            self._answer([[chat]], self._params(0.0, tokens, True, chain))
            after = self._stats()
            if not asks_model or after.get("drafted_tokens", 0.0) > before.get("drafted_tokens", 0.0):
                return {}
            quiet = 0 if silent(before, after) else quiet + 1
            if quiet == QUIET_ANSWERS:
                return {}
            time.sleep(SETTLE_PAUSE_S)
        raise RuntimeError("the draft does not answer any more")

    def run(
        self,
        groups: list[list[list[dict[str, str]]]],
        temperature: float,
        max_tokens: int,
        ignore_eos: bool,
        chain: str | None,
        forget: bool,
    ) -> dict[str, Any]:
        """Measure: each group is one batch, submitted at once; the clock runs only while the engine answers.

        ``forget`` empties first what would let a prompt that comes again be replayed.
        """
        if forget:
            self._llm.reset_prefix_cache()
            self._forget_outputs()
        if self._is_chain():
            self._llm.collective_rpc("reset_draft_stats")
        before = self._stats()  # drops are counted per connection, not since the reset
        params = self._params(temperature, max_tokens, ignore_eos, chain)
        prepared = [[{"prompt_token_ids": ids} for ids in self._render(group)] for group in groups]
        requests = []
        worked, started = time.process_time(), time.perf_counter()
        for prompts in prepared:
            requests += self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - worked,
            "requests": [_figures(request.outputs[0]) for request in requests],
            "overhead_ms": self._overhead(),
            "stats": since(before, self._stats()),
        }

    # --- helpers --------------------------------------------------------------------------------------------------

    def _params(self, temperature: float, max_tokens: int, ignore_eos: bool, chain: str | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            detokenize=True,
            extra_args={"chain": chain} if chain is not None else None,
        )

    def _render(self, chats: list[list[dict[str, str]]]) -> Iterator[list[int]]:
        tokenizer = self._llm.get_tokenizer()
        for chat in chats:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            yield tokenizer(text, add_special_tokens=False).input_ids

    def _answer(self, groups: list[list[list[dict[str, str]]]], params: Any) -> None:
        for group in groups:
            self._llm.generate([{"prompt_token_ids": ids} for ids in self._render(group)], params, use_tqdm=False)

    def _is_chain(self) -> bool:
        return hasattr(_worker(self._llm), "draft_stats")

    def _stats(self) -> dict[str, float]:
        return self._llm.collective_rpc("draft_stats")[0] if self._is_chain() else {}

    def _overhead(self) -> list[float]:
        """Every round's overhead since the last reset: percentiles of several runs cannot be merged, samples can."""
        proposer = getattr(_worker(self._llm), "_proposer", None)
        rounds = getattr(proposer, "rounds", None)
        return [round(value, 4) for value in rounds.overheads_ms()] if rounds is not None else []

    def _suffix_cache(self) -> Any:
        drafter = getattr(_worker(self._llm).model_runner, "drafter", None)
        return getattr(drafter, "suffix_cache", None)

    def _forget_outputs(self) -> None:
        """Drop answers of earlier cells: from vLLM's suffix cache, where those of the warm-up stay, and all from the chain's."""
        if self._is_chain():
            self._llm.collective_rpc("forget_outputs")
        cache = self._suffix_cache()
        if cache is not None:
            for request in set(cache.cached_requests) - self._suffix_kept:
                cache.evict_cached_response(request)


def silent(before: dict[str, float], after: dict[str, float]) -> bool:
    """Did a draft fail to answer between two readings of the chain's counters, or is none in use?"""
    failed = any(after.get(f"miss:{reason}", 0.0) > before.get(f"miss:{reason}", 0.0) for reason in NO_ANSWER)
    return failed or after.get("drafts_usable", 1.0) < 1.0


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What counters grew by; the costs of a round are means since the reset and stay as they are."""
    return {
        name: value if name in ROUND_COSTS.values() else value - before.get(name, 0.0) for name, value in after.items()
    }


def _worker(llm: Any) -> Any:
    """The one worker of an engine in this process."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker)


def _figures(output: Any) -> dict[str, int]:
    metrics = output.spec_decode_metrics
    counts = metrics.to_dict() if metrics is not None else {}
    return {
        "tokens": len(output.token_ids),
        "drafted": counts.get("num_draft_tokens", 0),
        "accepted": counts.get("num_accepted_draft_tokens", 0),
        "verifies": counts.get("num_spec_steps", 0),
    }


def _private_stdout() -> TextIO:
    """Keep the pipe to the parent for answers; whatever else prints goes to stderr, which is the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = _private_stdout()
    engine = Engine()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(engine, command.pop("command"))(**command)
        except Exception as error:  # reported to the parent, which leaves this engine out
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
