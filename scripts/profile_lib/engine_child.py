"""Child process: one vLLM engine whose steps are timed one by one. Commands: ``load``, ``time_steps``."""

import json
import time
from typing import Any

from scripts.profile_lib.commands import serve

PROMPT = 64  # tokens
WARM_UP = 2  # decoding steps before those that count
LONGEST = 1024  # answers end by being aborted, never by their length: a length that is near would shorten drafts


class TimedEngine:
    """Each public method is one command."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._chain = False
        self._requests = 0

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Load vLLM. Where the arguments name the chain's worker, a draft inside this process guesses wrong at once."""
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._chain = "worker_cls" in arguments
        if self._chain:
            from deployments.channel.inprocess import InProcessChannel
            from scripts.bench_lib.wrong_draft import WrongDrafter

            vocab_size = self._llm.model_config.get_vocab_size()
            channel = InProcessChannel(WrongDrafter("profile", vocab_size), "profile")
            self._llm.collective_rpc("set_channels", args=({channel.name: channel},))
        return {}

    def time_steps(self, batch: int, steps: int, verified: int = 0, threads: int | None = None) -> dict[str, Any]:
        """Time ``steps`` decoding steps of ``batch`` sequences that each verify ``verified`` tokens besides making one.

        ``ms``: of each step that did verify as many; ``uneven``: how many did not; ``began``, ``ended``: of all of them, in
        seconds of ``time.perf_counter``. ``threads``: OpenMP threads from now on.
        """
        if threads is not None:
            import torch

            # vLLM's CPU worker replaces torch.set_num_threads to keep others from undoing its binding; this keeps to it
            torch._C.set_num_threads(threads)  # type: ignore[attr-defined]
        engine = self._llm.llm_engine
        requests = self._start(batch, verified)
        try:
            waiting = set(requests)
            while waiting:  # prompts
                waiting -= {output.request_id for output in engine.step()}
            for _ in range(WARM_UP):
                engine.step()
            times: list[float] = []
            began, drafted = time.perf_counter(), self._drafted()
            for _ in range(steps):
                entered = time.perf_counter()
                engine.step()
                left = time.perf_counter()
                before, drafted = drafted, self._drafted()
                if drafted - before == batch * verified:
                    times.append(1e3 * (left - entered))
            ended = time.perf_counter()
        finally:
            engine.abort_request(requests)
        return {"ms": times, "uneven": steps - len(times), "began": began, "ended": ended}

    def _start(self, batch: int, verified: int) -> list[str]:
        from vllm import SamplingParams

        chain = json.dumps({"enabled": verified > 0, "tokens": verified})
        params = SamplingParams(
            temperature=0.0,
            max_tokens=LONGEST,
            ignore_eos=True,
            detokenize=False,
            extra_args={"chain": chain} if self._chain else None,
        )
        names = []
        for index in range(batch):
            self._requests += 1
            names.append(f"profile-{self._requests}")
            prompt = [100 + PROMPT * index + offset for offset in range(PROMPT)]
            self._llm.llm_engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        return names

    def _drafted(self) -> int:
        """Tokens verified so far."""
        if not self._chain:
            return 0
        return int(self._llm.collective_rpc("draft_stats")[0].get("drafted_tokens", 0))


if __name__ == "__main__":
    serve(TimedEngine())
