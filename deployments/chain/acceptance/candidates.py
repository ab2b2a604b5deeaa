"""The host's part of a lossy step: which draft tokens could pass if the target draws another, and how near it must be.

Everything but the target's logits is known before the step ends. What is left for the device is one NKL for each candidate
whose token the target did not draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance import nkl
from deployments.chain.acceptance.lossless import PAD
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
    stops: frozenset[int]  # tokens that end the answer
    proposal: Proposal | None  # None: who drafted gave no probabilities


@dataclass(frozen=True, slots=True)
class Candidates:
    """``N`` draft tokens of a batch of ``B`` requests that could pass."""

    request: npt.NDArray[np.int64]  # [N] index into the batch
    offset: npt.NDArray[np.int64]  # [N] index into the request's draft
    token: npt.NDArray[np.int64]  # [N]
    ids: npt.NDArray[np.int64]  # [N, k]
    probs: npt.NDArray[np.float32]  # [N, k]
    limit: npt.NDArray[np.float32]  # [N] NKL that must not be reached
    mask: npt.NDArray[np.float32]  # [N] largest probability the target may give its favourite
    stops: npt.NDArray[np.int64]  # [N, S] padded with PAD: nothing passes in place of these
    block: npt.NDArray[np.int64]  # [B] shortest run of matches that counts


def candidates(requests: Sequence[Lossy | None], counts: Sequence[int], vocab_size: int) -> Candidates | None:
    """Find them among the first ``counts[b]`` tokens of each request's proposal; None where there are none at all."""
    rows = [
        (index, request, request.proposal, min(count, len(request.proposal.tokens)))
        for index, (request, count) in enumerate(zip(requests, counts, strict=True))
        if request is not None and request.proposal is not None and count and request.proposal.ids.shape[1]
    ]
    if not rows:
        return None
    lengths = np.asarray([count for *_, count in rows])
    of = np.repeat(np.arange(len(rows)), lengths)  # [M] row of each draft token
    offset = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    token = np.concatenate([np.asarray(proposal.tokens[:count], np.int64) for *_, proposal, count in rows])
    width = max(proposal.ids.shape[1] for *_, proposal, _ in rows)
    ids, probs = np.zeros((len(of), width), np.int64), np.zeros((len(of), width), np.float32)
    start = 0
    for *_, proposal, count in rows:
        k = proposal.ids.shape[1]
        ids[start : start + count, :k], probs[start : start + count, :k] = proposal.ids[:count], proposal.probs[:count]
        start += count
    ends = [request.stops for _, request, *_ in rows]
    stops = np.full((len(rows), max(map(len, ends), default=0)), PAD, np.int64)
    for row, tokens in enumerate(ends):
        stops[row, : len(tokens)] = sorted(tokens)
    knobs = np.asarray([_knobs(request.policy) for _, request, *_ in rows], np.float64)[of].T  # [6, M]
    delta, alpha, delta_max, scale, mask, chancy = knobs
    generated = np.asarray([request.generated for _, request, *_ in rows])[of]
    limit = nkl.limits(delta, alpha, delta_max, scale, offset, generated)
    if chancy.any():
        seeds = np.asarray([request.seed for _, request, *_ in rows], np.uint64)[of]
        base = np.asarray([proposal.base for *_, proposal, _ in rows])[of]
        limit = np.where(chancy > 0, thinned(limit, coins(seeds, base + offset)), limit)
    possible = nkl.usable(ids, probs, vocab_size) & ((ids == token[:, None]) & (probs > 0)).any(axis=1)
    possible &= (limit > 0) & ~(stops[of] == token[:, None]).any(axis=1)
    kept = np.flatnonzero(possible)
    if not len(kept):
        return None
    of = of[kept]
    block = np.asarray([1 if request is None else request.policy.block for request in requests], np.int64)
    return Candidates(
        request=np.asarray([index for index, *_ in rows])[of],
        offset=offset[kept],
        token=token[kept],
        ids=ids[kept],
        probs=probs[kept],
        limit=limit[kept].astype(np.float32),
        mask=mask[kept].astype(np.float32),
        stops=stops[of],
        block=block,
    )


def _knobs(policy: Policy) -> tuple[float, ...]:
    chancy = policy.rule == "probabilistic"
    return policy.delta, policy.alpha, policy.delta_max, policy.length_scale, policy.mask, float(chancy)
