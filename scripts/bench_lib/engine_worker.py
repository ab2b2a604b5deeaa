"""Child process: one vLLM engine that answers JSON-line commands. Started by :mod:`scripts.bench_lib.engine`.

Commands: ``load`` (vLLM arguments), ``connect`` (draft endpoints), ``run`` (groups of chats to answer), ``settle``.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

SETTLE_TRIES = 40  # a frozen connection has missed its heartbeats and is made anew; a circuit may be open for seconds
SETTLE_PAUSE_S = 0.4


class Engine:
    """The engine behind the pipe; each public method is one command."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._suffix_kept: set[str] = set()

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        if (arguments.get("speculative_config") or {}).get("method") == "suffix":
            import arctic_inference.suffix_decoding  # noqa: F401  (says what is missing before the model loads)
        from vllm import LLM

        self._llm = LLM(**arguments)
        chain = "worker_cls" in arguments
        return {
            "seconds": time.perf_counter() - started,
            "client_key": self._llm.collective_rpc("client_key")[0] if chain else None,
        }

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

    def settle(self, chat: list[dict[str, str]], tokens: int, chain: str | None) -> dict[str, Any]:
        """A short unmeasured answer after the process was frozen: caches fill, sockets notice that time has passed."""
        drafting = self._is_chain() and json.loads(chain or "{}").get("enabled", True)
        for _ in range(SETTLE_TRIES):
            before = self._stats().get("drafted_tokens", 0.0)
            self._answer([[chat]], self._params(0.0, tokens, True, chain))
            if not drafting or self._stats().get("drafted_tokens", 0.0) > before:
                return {}
            time.sleep(SETTLE_PAUSE_S)
        raise RuntimeError("the draft brings nothing any more")

    def run(
        self,
        groups: list[list[list[dict[str, str]]]],
        temperature: float,
        max_tokens: int,
        ignore_eos: bool,
        chain: str | None,
    ) -> dict[str, Any]:
        """Measure: each group is one batch, submitted at once; the clock runs only while the engine answers."""
        self._llm.reset_prefix_cache()
        self._forget_suffixes()
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
            "stats": {name: value - before.get(name, 0.0) for name, value in self._stats().items()},
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

    def _forget_suffixes(self) -> None:
        """Drop answers of earlier cells, so that a prompt that comes again is not replayed. Warm-up answers stay."""
        cache = self._suffix_cache()
        if cache is not None:
            for request in set(cache.cached_requests) - self._suffix_kept:
                cache.evict_cached_response(request)


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
