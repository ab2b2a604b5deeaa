"""The rules of :mod:`deployments.chain.acceptance` over a step's logits: which drawn tokens the draft's tokens replace.

Works inside the sampler, between drawing a token and gathering its logprobs, so that a draft token that passes is treated in
all that follows as if the target had drawn it. The device only picks logits and sums rows of the vocabulary; the rules run on
the few numbers that come of it. A row is summed only for a token that the target did not draw, that could still be part of an
accepted prefix, and that a bound from a handful of logits does not already refuse.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from deployments.chain.acceptance import nkl
from deployments.chain.acceptance.block import keep_long
from deployments.chain.acceptance.candidates import Candidates, Lossy, candidates, reachable, shortest_runs

ROUNDING = 1e-4  # a bound in other arithmetic may not refuse what the value itself lets pass


def pick(logits: torch.Tensor, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """``logits[rows[n], columns[n, c]]`` as ``[N, c]`` on the host."""
    if logits.device.type == "cpu":
        on_host: npt.NDArray[np.float32] = logits.numpy()[rows[:, None], columns]
        return on_host
    index = torch.from_numpy(rows[:, None] * logits.shape[1] + columns).to(logits.device)
    picked: npt.NDArray[np.float32] = logits.view(-1)[index].cpu().numpy()
    return picked


class RowCopy:
    """Memory for copies of logits rows, kept between steps: on CPUs, fresh memory of that size costs more than the copy."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def of(self, logits: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """``logits[rows]``, valid until the next call."""
        memory = self._memory
        if memory is None or len(memory) < len(rows) or memory.shape[1] != logits.shape[1]:
            memory = self._memory = logits.new_empty(len(rows), logits.shape[1])
        return torch.index_select(logits, 0, torch.from_numpy(rows).to(logits.device), out=memory[: len(rows)])


def sums(logits: torch.Tensor, rows: npt.NDArray[np.int64], copy: RowCopy) -> npt.NDArray[np.float64]:
    """Largest logit and logarithm of the sum of exponentials of each row: ``[2, N]`` on the host."""
    chosen = copy.of(logits, rows)
    highest = chosen.amax(dim=1)
    mass = chosen.sub_(highest.unsqueeze(1)).exp_().sum(dim=1)
    result: npt.NDArray[np.float64] = torch.stack([highest, highest + mass.log()]).cpu().numpy().astype(np.float64)
    return result


class Relaxation:
    """Judges one verifying step. The sampler calls :meth:`before` if it is to truncate logits, and then :meth:`after`."""

    def __init__(
        self,
        requests: Sequence[Lossy | None],
        drafts: npt.NDArray[np.int64],  # [B, T] padded with NO_DRAFT
        grid: npt.NDArray[np.int64],  # [B, T + 1] logits row of each request and offset
        copies: tuple[RowCopy, RowCopy],  # of the sampler: for rows to be truncated, for rows to be summed
    ) -> None:
        self._to_keep, self._to_sum = copies
        self._requests = requests
        self._drafts = drafts
        self._grid = grid
        self._kept: npt.NDArray[np.int64] | None = None  # [R] where a row is in the copy
        self._matched: torch.Tensor | None = None  # rows as they were before truncation
        self.passed: npt.NDArray[np.bool_] | None = None  # [B, T] whose token replaced the drawn one

    def before(self, logits: torch.Tensor) -> None:
        """Keep what of matched ``logits [R, V]`` may be needed after they were truncated in place."""
        judged = [request is not None and request.proposal is not None for request in self._requests]
        rows = np.unique(self._grid[judged, :-1])
        self._kept = np.zeros(len(logits), np.int64)
        self._kept[rows] = np.arange(len(rows))
        self._matched = self._to_keep.of(logits, rows)

    def after(self, drawn: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return ``drawn [R]`` with draft tokens where they pass. ``logits [R, V]``: matched, and truncated where asked."""
        own = drawn.cpu().numpy()[self._grid]  # [B, T + 1]
        passing = np.zeros(self._drafts.shape, np.bool_)
        found = candidates(self._requests, self._drafts, own, logits.shape[1])
        found = self._near(found, own, logits) if found is not None else None
        if found is None:
            return drawn
        passing[found.request, found.offset] = True
        passing = keep_long(self._drafts == own[:, :-1], passing, shortest_runs(self._requests)[:, None])
        self.passed = passing
        rows = torch.from_numpy(self._grid[:, :-1][passing]).to(drawn.device)
        tokens = torch.from_numpy(self._drafts[passing]).to(drawn.device, drawn.dtype)
        return drawn.index_copy(0, rows, tokens)

    def _near(self, found: Candidates, own: npt.NDArray[np.int64], logits: torch.Tensor) -> Candidates | None:
        """The candidates that pass by themselves."""
        vocab_size = logits.shape[1]
        rows = self._grid[found.request, found.offset]
        matched = logits
        if self._matched is not None and self._kept is not None:
            allowed = np.isfinite(pick(logits, rows, found.token[:, None])[:, 0])
            matched, rows = self._matched, self._kept[rows]
        columns = np.concatenate([found.ids, found.token[:, None], own[found.request, found.offset][:, None]], axis=1)
        picked = pick(matched, rows, columns)
        at = picked[:, :-2]
        if matched is logits:
            allowed = np.isfinite(picked[:, -2])
        bound = nkl.at_least(found.probs, at, picked[:, -1].astype(np.float64), vocab_size)
        which = allowed & (bound < found.limit + ROUNDING)
        if not which.any():
            return None
        which[which] = reachable(self._drafts, own, found.those(which))
        found, at, rows = found.those(which), at[which], rows[which]
        if not len(rows):
            return None
        highest, log_sum = sums(matched, rows, self._to_sum)
        value, top = nkl.from_logits(found.probs, at, highest, log_sum, vocab_size)
        near = (value < found.limit) & (top <= found.mask)
        return found.those(near) if near.any() else None
