"""Whole answers that a draft writes: what is asked, what comes back, and why one may be short or missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from deployments.chain.protocol import CONTEXT_FULL, DEADLINE, ERROR, NO_SLOT, Sampling
from deployments.draft.choose import Choice

# Why an answer is not complete. Stable strings: they label counters.
BUSY = "busy"  # too many requests wait already
CANCELLED = "cancelled"  # nobody waits for it any more
NO_HIDDEN = "no_hidden_states"  # the draft needs the target's, which whole answers do not have
REASONS = (BUSY, CANCELLED, CONTEXT_FULL, DEADLINE, ERROR, NO_HIDDEN, NO_SLOT)

MOST_ANSWERS = 8  # of one request
MOST_TOKENS = 2048  # of one answer
MOST_PROMPT = 1 << 17
_SEEDS = 1 << 63  # seeds are below it

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class WriteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``k`` answers to one prompt, at most ``length`` tokens each.

    ``prompt`` and ``stop`` are ids of the target's vocabulary; an answer ends before the first stop id. Answer ``i`` is
    sampled at ``temperature`` with the noise of ``seed + i``, so that it is what a request for one answer with that seed gives.
    At temperature 0 the first answer is greedy and the others are sampled at the draft's diversity temperature.
    ``top_k``: most likely tokens kept of each position. ``deadline_s``: from when the draft received it.
    """

    prompt: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MOST_PROMPT)]
    k: Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)] = 1
    length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = 64
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=5.0)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=_SEEDS - 1)] = 0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=64)] = 8
    stop: Annotated[list[TokenId], msgspec.Meta(max_length=256)] = []
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""
    deadline_s: Annotated[float, msgspec.Meta(gt=0.0, le=600.0)] = 10.0

    def sampling(self, index: int, diversity: float) -> Sampling:
        """How answer ``index`` is sampled. ``diversity``: temperature of all but the first where 0 was asked for."""
        temperature = self.temperature or (diversity if index else 0.0)
        return Sampling(temperature, (self.seed + index) % _SEEDS)


def read_request(given: Mapping[str, Any]) -> WriteRequest:
    """A request out of plain values. Raises ValueError naming what is wrong with it."""
    try:
        return msgspec.convert(dict(given), WriteRequest)
    except msgspec.ValidationError as error:
        raise ValueError(f"request for answers: {error}") from None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer; a reason where it is not complete, and then what there is of it."""

    index: int  # which of the ``k``
    tokens: list[int]  # without the stop id
    top_k: int = 0  # what was asked for; 0 where there are no tokens
    top_ids: bytes = b""  # little-endian int32 [len(tokens), top_k]: the most likely tokens at temperature 1
    top_probs: bytes = b""  # little-endian float16 [len(tokens), top_k]; what is missing to 1 is the tail's mass
    accept: bytes = (
        b""  # little-endian float16 [len(tokens)]: probability that the target agrees, given that it did before
    )
    finished: bool = False  # it ends here; False: cut, at its length where there is no reason
    reason: str = ""

    def plain(self) -> dict[str, Any]:
        """As plain values and bytes."""
        result: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return result


Emit = Callable[[Answer], None]


def pack_answer(index: int, choices: list[Choice], *, finished: bool, reason: str) -> Answer:
    """The answer that ``choices`` are, each with the same number of ids and probabilities."""
    top_k = len(choices[0].ids) if choices else 0
    ids = np.array([choice.ids for choice in choices], "<i4").tobytes()
    probs = np.array([choice.probs for choice in choices], "<f2").tobytes()
    return Answer(
        index=index,
        tokens=[choice.token for choice in choices],
        top_k=top_k,
        top_ids=ids,
        top_probs=probs,
        accept=np.array([choice.confidence for choice in choices], "<f2").tobytes(),
        finished=finished,
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class Writing:
    """How a draft writes whole answers beside the token chain."""

    share: float = (
        0.25  # of the time between the token chain's messages, while both want it; more where that leaves some
    )
    diversity: float = 0.7  # temperature of all answers but the first where a request says 0
    waiting: int = 16  # requests that wait or are worked on; more are refused, and one tenant has at most half
    kept: int = 2  # prompts whose KV is kept for a request of the same tenant; evicted before anything else
