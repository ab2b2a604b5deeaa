"""Whole drafts of an answer, checked by the target's engine: how far it agrees with them, or how likely it finds them.

Two ways, both beside the requests of clients in the engine's ordinary batch:

*verify* decides as a request would: its sampling, its seed, its policy. Each draft is a request that brought this draft and ends
where the output departs from it. It takes a step of the engine for every few tokens, those that one step verifies.

*score* asks for probabilities only: one pass over each draft, as if it were prompt, whatever its length. The prompt is
read once where the prefix cache holds whole blocks of it (also within one step: vLLM enters blocks when it schedules them).
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

from deployments.chain.acceptance.policy import Policy
from deployments.chain.given import MAX_DRAFTS, problem
from deployments.chain.trace import clip
from deployments.target.options import ChainOptions

logger = logging.getLogger(__name__)

LATE = "deadline"
# What decides a token at a position; the last two vLLM refuses beside drafts, they go through the chain's options.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
)
OPTIONS = ("min_p", "logit_bias")

TakeTrace = Callable[[str], Awaitable[dict[str, Any] | None]]


@dataclass(slots=True)
class Verification:
    """What became of one draft so far."""

    draft: list[int]
    accepted: int = 0
    relaxed: int = 0
    own: int | None = None
    logprobs: float = 0.0  # sum over the accepted tokens
    reason: str = ""

    def saw(self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Any]]) -> bool:
        """Output that followed; whether the draft can still be accepted further."""
        for token, of_token in zip(tokens, logprobs, strict=True):
            if self.accepted == len(self.draft) or token != self.draft[self.accepted]:
                self.own = token
                return False
            self.accepted += 1
            self.logprobs += of_token[token].logprob
        return True

    def as_dict(self) -> dict[str, Any]:
        mean = self.logprobs / self.accepted if self.accepted else 0.0
        return {
            "accepted": self.accepted,
            "relaxed": self.relaxed,
            "own": self.own,
            "logprob": mean,
            "reason": self.reason,
        }


@dataclass(slots=True)
class Score:
    """What the target thinks of one draft."""

    draft: list[int]
    logprobs: list[float]
    top_ids: bytes = b""
    top_probs: bytes = b""
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "logprobs": self.logprobs,
            "top_ids": self.top_ids,
            "top_probs": self.top_probs,
            "reason": self.reason,
        }


class AnswerChecks:
    """Checks of one engine."""

    def __init__(self, client: EngineClient, take_trace: TakeTrace) -> None:
        """``take_trace`` returns the rounds of a request by its chain id."""
        self._client = client
        self._take_trace = take_trace
        config = client.model_config
        self._vocab_size = config.get_vocab_size()
        self._most_tokens = config.max_model_len
        self._most_logprobs = config.max_logprobs if config.max_logprobs >= 0 else self._vocab_size

    async def verify(
        self,
        prompt: list[int],
        drafts: list[list[int]],
        policy: dict[str, Any] | None,
        sampling: dict[str, Any],
        deadline_s: float,
        tenant: str = "",
    ) -> list[dict[str, Any]]:
        """For each draft how much of it a request with this policy and sampling would say; stops at the first rejection.

        ``policy`` as the options of a request carry it (a :class:`Policy` as builtins), None: lossless; a given draft
        has no probabilities, so rules that compare them let pass exact matches only. ``sampling``: names from ``SAMPLING``
        and ``OPTIONS``.

        Returns, in the order of ``drafts``: ``accepted`` tokens, how many of them were ``relaxed`` (let pass though not the target's
        own), the target's ``own`` token behind them (None where there is none: the draft ended the answer, or time was up), the mean
        ``logprob`` of the accepted ones at temperature 1 (0 where there is none), and a ``reason`` where the check is not complete.
        """
        checks = [Verification(list(draft)) for draft in drafts]
        try:
            params, options = _sampling(sampling), _options(policy, sampling, tenant)
        except (ValueError, TypeError, msgspec.ValidationError, VLLMValidationError) as error:
            for check in checks:
                check.reason = str(error)
            return [check.as_dict() for check in checks]
        usable = self._usable(prompt, checks)
        await _in_time([(check, self._verify(prompt, check, params, options)) for check in usable], deadline_s)
        return [check.as_dict() for check in checks]

    async def score(
        self, prompt: list[int], drafts: list[list[int]], top_k: int, deadline_s: float, tenant: str = ""
    ) -> list[dict[str, Any]]:
        """For each draft the target's log probability of every token after those before it, at temperature 1.

        Returns, in the order of ``drafts``: ``logprobs`` [L], ``top_ids`` (<i4) and ``top_probs`` (<f2) of the k likeliest tokens
        [L, k], k the smaller of ``top_k`` and what the engine gives (``max_logprobs``, 20), and a ``reason`` where there is none of it.
        """
        scores = [Score(list(draft), []) for draft in drafts]
        top_k = max(0, min(top_k, self._most_logprobs))
        usable = self._usable(prompt, scores)
        await _in_time([(score, self._score(prompt, score, top_k, tenant)) for score in usable], deadline_s)
        return [score.as_dict() for score in scores]

    def _usable(self, prompt: list[int], checks: Sequence[Any]) -> list[Any]:
        """Those that can be checked; the others get their reason, and an empty draft has nothing to be checked."""
        room = self._most_tokens - len(prompt) - 1
        for index, check in enumerate(checks):
            if not prompt:
                check.reason = "the prompt is empty"
            elif index >= MAX_DRAFTS:
                check.reason = f"at most {MAX_DRAFTS} drafts at once"
            elif len(check.draft) > room:
                check.reason = f"prompt and draft leave no room in the context of {self._most_tokens} tokens"
            else:
                check.reason = problem(check.draft, self._vocab_size)
        return [check for check in checks if check.draft and not check.reason]

    async def _verify(
        self, prompt: list[int], check: Verification, sampling: dict[str, Any], options: ChainOptions
    ) -> None:
        lossy = options.policy is not None and options.policy.lossy
        name = uuid.uuid4().hex
        mine = msgspec.structs.replace(options, id=name if lossy else "", trace=lossy, given=[check.draft])
        params = SamplingParams(
            **sampling,
            max_tokens=len(check.draft) + 1,
            logprobs=0,
            detokenize="bad_words" in sampling,
            output_kind=RequestOutputKind.DELTA,
            extra_args=_extra(mine),
        )
        stream = self._client.generate(TokensPrompt(prompt_token_ids=prompt), params, f"verify-{name}")
        async with aclosing(stream):  # type: ignore[type-var]  # closing it early ends the request
            async for output in stream:
                answer = output.outputs[0]
                if not check.saw(answer.token_ids, answer.logprobs or []):
                    break
        if lossy and check.accepted and (trace := await self._take_trace(name)):
            check.relaxed = sum(len(item["relaxed"]) for item in clip(trace, check.accepted)["rounds"])

    async def _score(self, prompt: list[int], score: Score, top_k: int, tenant: str) -> None:
        """One pass; a second one without the prefix cache in the rare case that the draft itself was in it.

        vLLM returns log probabilities of what a request computes only, and therefore reads no cached prefix for requests that
        want them unless told to. Here it is: those of the prompt are of no interest.
        """
        for skip_cache in (False, True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                prompt_logprobs=top_k,
                flat_logprobs=True,
                detokenize=False,
                skip_reading_prefix_cache=skip_cache,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=_extra(ChainOptions(enabled=False, tenant=tenant)),
            )
            whole = TokensPrompt(prompt_token_ids=prompt + score.draft)
            stream = self._client.generate(whole, params, f"score-{uuid.uuid4().hex}")
            async with aclosing(stream):  # type: ignore[type-var]
                async for output in stream:
                    if (output.num_cached_tokens or 0) < len(prompt):
                        _read(score, output.prompt_logprobs, len(prompt), top_k)
                        return


def _read(score: Score, told: Any, start: int, top_k: int) -> None:
    """Take over ``told``, vLLM's ``FlatLogprobs`` of prompt and draft: at each position the token that is there, then the top."""
    first, width = told.start_indices[start], top_k + 1
    ids = np.asarray(told.token_ids[first:], "<i4").reshape(-1, width)  # [L, 1 + k]
    logprobs = np.asarray(told.logprobs[first:], np.float64).reshape(-1, width)
    score.logprobs = logprobs[:, 0].tolist()
    score.top_ids = ids[:, 1:].tobytes()
    score.top_probs = np.exp(logprobs[:, 1:]).astype("<f2").tobytes()


async def _in_time(work: list[tuple[Any, Coroutine[Any, Any, None]]], deadline_s: float) -> None:
    """Run all at once; what fails or is late gets its reason, and its request is aborted."""
    tasks = {asyncio.create_task(coroutine): check for check, coroutine in work}
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, timeout=max(0.0, deadline_s))
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    for task, check in tasks.items():
        if task.cancelled():
            check.reason = LATE
        elif error := task.exception():
            logger.warning("a draft could not be checked: %r", error)
            check.reason = f"{type(error).__name__}: {error}"


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = next((name for name in given if name not in SAMPLING and name not in OPTIONS), None)
    if unknown is not None:
        raise ValueError(f"sampling: {unknown} is not one of {', '.join((*SAMPLING, *OPTIONS))}")
    params = {name: value for name, value in given.items() if name in SAMPLING and value is not None}
    SamplingParams(**params)  # refuses values out of range before there is a request
    return params


def _options(policy: dict[str, Any] | None, sampling: Mapping[str, Any], tenant: str) -> ChainOptions:
    bias = {str(token): float(value) for token, value in (sampling.get("logit_bias") or {}).items()}
    min_p = float(sampling.get("min_p") or 0.0)
    if not 0.0 <= min_p <= 1.0 or not all(math.isfinite(value) for value in bias.values()):
        raise ValueError("sampling: min_p must be in [0, 1] and logit_bias finite")
    asked = msgspec.convert(policy, Policy) if policy is not None else None
    return ChainOptions(sources=[], tenant=tenant, policy=asked, min_p=min_p, logit_bias=bias)


def _extra(options: ChainOptions) -> dict[str, Any]:
    return {"chain": msgspec.json.encode(options).decode()}
