"""Which draft tokens of a step could pass although the target drew others, and how near the two distributions must be.

Everything here is known without the target's logits. What is left to do with them is one NKL for each candidate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance import nkl
from deployments.chain.acceptance.evidence import Ints
from deployments.chain.acceptance.lossless import NO_DRAFT
from deployments.chain.acceptance.policy import Policy
from deployments.chain.acceptance.probabilistic import coins, thinned


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one sequence with what the draft thought of each position."""

    base: int  # tokens committed before them
    tokens: list[int]  # [T]
    ids: npt.NDArray[np.int32]  # [T, k]
    probs: npt.NDArray[np.float32]  # [T, k]


@dataclass(frozen=True, slots=True)
class Lossy:
    """One request whose policy lets mismatches pass."""

    policy: Policy
    seed: int
    generated: int  # tokens generated before the draft
    stops: frozenset[int]  # tokens that end the answer, and those the request bans
    proposal: Proposal | None = None  # None: who drafted gave no probabilities
    # ``semantic``: all tokens before the draft, prompt included
    committed: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def by_meaning(self) -> bool:
        """Judged by a sentence model rather than by probabilities."""
        return self.policy.rule == "semantic"


@dataclass(frozen=True, slots=True)
class Candidates:
    """``N`` draft tokens of a batch that could pass, those of one request together and in order."""

    request: npt.NDArray[np.int64]  # [N] index into the batch
    offset: npt.NDArray[np.int64]  # [N] index into the request's draft
    token: npt.NDArray[np.int64]  # [N]
    ids: npt.NDArray[np.int64]  # [N, k] what the draft named, and
    probs: npt.NDArray[np.float32]  # [N, k] how likely it found that; zeros where it named fewer
    limit: npt.NDArray[np.float64]  # [N] NKL that must not be reached
    mask: npt.NDArray[np.float64]  # [N] largest probability the target may give its favourite


def candidates(requests: Sequence[Lossy | None], drafts: Ints, drawn: Ints) -> Candidates | None:
    """Find them in ``drafts [B, T]`` (padded with ``NO_DRAFT``) where ``drawn [B, T + 1]`` differs; None: there are none.

    Behind the first mismatch of a draft that cannot pass there are none: no accepted prefix reaches so far. So of one request, a
    candidate counts only if all before it pass.
    """
    found = [
        (b, t, token, request, request.proposal)
        for b, (request, drafted, own) in enumerate(zip(requests, drafts.tolist(), drawn.tolist(), strict=True))
        if request is not None and request.proposal is not None and not request.by_meaning
        for t, token in _mismatches(drafted, own, request.stops)
    ]
    if not found:
        return None
    index, places, token = np.asarray([entry[:3] for entry in found]).T.copy()
    ids, probs = _named([(proposal.ids[t], proposal.probs[t]) for _, t, _, _, proposal in found])
    knobs = np.asarray([_knobs(request) for _, _, _, request, _ in found], np.float64)
    delta, alpha, delta_max, scale, mask, generated, chancy = knobs.T
    limit = nkl.limits(delta, alpha, delta_max, scale, places, generated)
    if chancy.any():
        seeds = np.asarray([request.seed for _, _, _, request, _ in found], np.uint64)
        base = np.asarray([proposal.base for *_, proposal in found])
        limit = np.where(chancy > 0, thinned(limit, coins(seeds, base + places)), limit)
    return Candidates(index, places, token, ids, probs, limit, mask.copy())


def _mismatches(drafted: list[int], own: list[int], stops: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Offset and token, up to the first one that ends the draft, the answer, or both."""
    for t, (token, theirs) in enumerate(zip(drafted, own, strict=False)):
        if token == theirs:
            continue
        if token == NO_DRAFT or token in stops or theirs in stops:
            return
        yield t, token


def _named(
    rows: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Token ids and probabilities ``[N, k]`` out of rows that may be of different widths."""
    width = max(len(ids) for ids, _ in rows)
    if all(len(ids) == width for ids, _ in rows):
        return np.asarray([ids for ids, _ in rows], np.int64), np.asarray([probs for _, probs in rows])
    wide = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.float32)
    for n, (ids, probs) in enumerate(rows):
        wide[0][n, : len(ids)], wide[1][n, : len(ids)] = ids, probs
    return wide


def shortest_runs(requests: Sequence[Lossy | None]) -> npt.NDArray[np.int64]:
    """Of each request ``[B]`` the shortest run of matches that counts."""
    return np.asarray([1 if request is None else request.policy.block for request in requests])


def _knobs(request: Lossy) -> tuple[float, ...]:
    policy, chancy = request.policy, float(request.policy.rule == "probabilistic")
    return policy.delta, policy.alpha, policy.delta_max, policy.length_scale, policy.mask, request.generated, chancy
