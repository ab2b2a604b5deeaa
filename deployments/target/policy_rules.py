"""The rules of :mod:`deployments.chain.acceptance` over a step's logits: which drawn tokens the draft's tokens replace.

Works inside the sampler, between drawing a token and gathering its logprobs, so that a draft token that passes is treated in
all that follows as if the target had drawn it. The device only picks logits and sums rows of the vocabulary; the rules run on
the few numbers that come of it. A row is summed only for a token that the target did not draw, that could still be part of an
accepted prefix, and that a bound from a handful of logits does not already refuse.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from deployments.chain.acceptance import nkl
from deployments.chain.acceptance.block import keep_long
from deployments.chain.acceptance.candidates import Candidates, Lossy, candidates, shortest_runs
from deployments.target import row_kernels
from deployments.target.meaning import Meaning


def pick(logits: torch.Tensor, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """``logits[rows[n], columns[n, c]]`` as ``[N, c]`` on the host."""
    if logits.device.type == "cpu":
        on_host: npt.NDArray[np.float32] = logits.numpy()[rows[:, None], columns]
        return on_host
    index = torch.from_numpy(rows[:, None] * logits.shape[1] + columns).to(logits.device)
    picked: npt.NDArray[np.float32] = logits.view(-1)[index].cpu().numpy()
    return picked


def sums(
    logits: torch.Tensor, rows: npt.NDArray[np.int64], reference: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Largest logit and logarithm of the sum of exponentials of each row: ``[2, N]`` on the host.

    ``reference [N]``: some logit of each row. NaN where a row has a logit that is NaN or infinite upwards.
    """
    if compiled(logits):
        return row_kernels.sums(logits.numpy(), rows, reference)
    chosen = logits[torch.from_numpy(rows).to(logits.device)]
    both = torch.stack([chosen.amax(dim=1), torch.logsumexp(chosen, dim=1)])
    result: npt.NDArray[np.float64] = both.cpu().numpy().astype(np.float64)
    return result


def compiled(logits: torch.Tensor) -> bool:
    """Whether :mod:`deployments.target.row_kernels` can read them."""
    return bool(logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous())


def near(
    found: Candidates,
    rows: npt.NDArray[np.int64],  # [N] of each candidate
    theirs: npt.NDArray[np.int64],  # [N] the tokens the target drew
    logits: torch.Tensor,  # [R, V] as the target drew from
    matched: torch.Tensor,  # [R, V] before truncation
) -> npt.NDArray[np.bool_]:
    """Which candidates ``[N]`` are near enough for their limits, on any device: two reads of the device for all of them."""
    vocab_size = logits.shape[1]
    result = np.zeros(len(rows), np.bool_)
    which = nkl.usable(found.ids, found.probs, vocab_size) & nkl.named(found.token, found.ids, found.probs)
    which &= found.limit > 0
    if not which.any():
        return result
    ids = np.where(which[:, None] & (found.probs > 0), found.ids, found.token[:, None])
    picked = pick(matched, rows, np.concatenate([ids, theirs[:, None]], axis=1))
    possible = np.isfinite(pick(logits, rows, found.token[:, None])[:, 0])
    terms = nkl.terms(found.probs, picked[:, :-1])
    bound = nkl.at_least(terms, picked[:, -1].astype(np.float64), vocab_size)
    which &= possible & (bound < found.limit + row_kernels.ROUNDING)
    if not which.any():
        return result
    summed = np.full((2, len(rows)), np.nan)
    summed[:, which] = sums(matched, rows[which], picked[which].max(axis=1))
    value, top = nkl.from_logits(terms, summed[0], summed[1], vocab_size)
    return which & (value < found.limit) & (top <= found.mask)


class Relaxation:
    """Judges one verifying step. The sampler calls :meth:`before` if it truncates logits, and then :meth:`after`."""

    def __init__(
        self,
        requests: Sequence[Lossy | None],
        drafts: npt.NDArray[np.int64],  # [B, T] padded with NO_DRAFT
        grid: npt.NDArray[np.int64],  # [B, T + 1] logits row of each request and offset
        meaning: Meaning | None = None,  # judges requests with the policy ``semantic``; None: nothing of theirs passes
    ) -> None:
        self._requests = requests
        self._meaning = meaning
        self._drafts = drafts
        self._grid = grid
        self._matched: torch.Tensor | None = None  # as they were before truncation
        self.passed: npt.NDArray[np.bool_] | None = None  # [B, T] whose token replaced the drawn one

    def before(self, logits: torch.Tensor) -> None:
        """Matched ``logits [R, V]``, which the sampler does not change until :meth:`after`."""
        self._matched = logits

    def after(self, drawn: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return ``drawn [R]`` with draft tokens where they pass. ``logits [R, V]``: matched, and truncated where asked."""
        own = drawn.cpu().numpy()[self._grid]  # [B, T + 1]
        passing = np.zeros(self._drafts.shape, np.bool_)
        found = candidates(self._requests, self._drafts, own)
        if found is not None:
            passing[found.request, found.offset] = self._near(found, own, logits)
        if self._meaning is not None:
            passing |= self._meaning.passing(self._requests, self._drafts, own, partial(self._doubtful, logits, own))
        if not passing.any():
            return drawn
        if any(request is not None and request.policy.block > 1 for request in self._requests):
            passing = keep_long(self._drafts == own[:, :-1], passing, shortest_runs(self._requests)[:, None])
        self.passed = passing
        rows = torch.from_numpy(self._grid[:, :-1][passing]).to(drawn.device)
        tokens = torch.from_numpy(self._drafts[passing]).to(drawn.device, drawn.dtype)
        return drawn.index_copy(0, rows, tokens)

    def _near(self, found: Candidates, own: npt.NDArray[np.int64], logits: torch.Tensor) -> npt.NDArray[np.bool_]:
        """Which candidates ``[N]`` pass by themselves."""
        rows, theirs = self._grid[found.request, found.offset], own[found.request, found.offset]
        matched = logits if self._matched is None else self._matched
        if compiled(logits) and compiled(matched):
            return row_kernels.near(found, rows, theirs, logits.numpy(), matched.numpy())
        return near(found, rows, theirs, logits, matched)

    def _doubtful(
        self,
        logits: torch.Tensor,
        own: npt.NDArray[np.int64],
        request: npt.NDArray[np.int64],
        offset: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Where ``[N]`` the draft's token is possible and the target not certain of its own: what all rules ask for."""
        rows, tokens = self._grid[request, offset], self._drafts[request, offset]
        matched = logits if self._matched is None else self._matched
        result: npt.NDArray[np.bool_] = np.isfinite(pick(logits, rows, tokens[:, None])[:, 0])
        if result.any():
            reference = pick(matched, rows[result], own[request, offset][result][:, None])[:, 0]
            highest, log_sum = sums(matched, rows[result], reference)
            masks = np.asarray([found.policy.mask for b in request[result].tolist() if (found := self._requests[b])])
            with np.errstate(invalid="ignore"):
                top = np.minimum(np.exp(highest - log_sum), 1.0)  # rounding may exceed a mask of 1
                result[result] = top <= masks  # false for NaN
        return result
