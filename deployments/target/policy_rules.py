"""The rules of :mod:`deployments.chain.acceptance` on the device: which of a step's drawn tokens the draft's token replaces.

Works inside the sampler, between drawing a token and gathering its logprobs, so that a draft token that passes is treated in
all that follows as if the target had drawn it. Costs one pass over the vocabulary for each candidate the target did not draw.
"""

import numpy as np
import numpy.typing as npt
import torch

from deployments.chain.acceptance.candidates import Candidates
from deployments.chain.acceptance.lossless import NO_DRAFT
from deployments.chain.acceptance.nkl import REST, log_vocabulary


def look(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log probabilities ``[N, k]`` of ``ids [N, k]`` and the largest probability ``[N]`` under ``logits [N, V]``."""
    log_sum = torch.logsumexp(logits, dim=1)  # [N]
    return logits.gather(1, ids) - log_sum.unsqueeze(1), (logits.amax(dim=1) - log_sum).exp()


def nkl(probs: torch.Tensor, log_q: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """NKL ``[N]`` of usable ``probs [N, k]`` and the target's log probabilities ``[N, k]`` of the same tokens."""
    entry = probs > 0
    head = torch.where(entry, probs * (probs.log() - log_q), 0.0).sum(dim=1)
    tail = (1.0 - probs.sum(dim=1)).clamp_(0.0, 1.0)
    rest = (1.0 - torch.where(entry, log_q.exp(), 0.0).sum(dim=1)).clamp_(min=REST)
    divergence = head + torch.where(tail > 0, tail * (tail.log() - rest.log()), 0.0)
    return (divergence / log_vocabulary(vocab_size)).clamp_(0.0, 1.0).nan_to_num_(nan=1.0)


def keep_long(own: torch.Tensor, passing: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Device form of :func:`deployments.chain.acceptance.block.keep_long`: ``[B, T]`` each, ``block [B]`` shortest runs."""
    run = (own | passing).to(torch.int32).cumprod(dim=1).sum(dim=1)  # [B]
    return passing & (run >= block).unsqueeze(1)


class Relaxation:
    """Judges one verifying step. The sampler calls :meth:`before` and then :meth:`after` on the same rows."""

    def __init__(self, found: Candidates, drafts: torch.Tensor, grid: npt.NDArray[np.int64]) -> None:
        """``drafts [B, T]`` padded with ``NO_DRAFT``; ``grid [B, T + 1]`` the logits row of each request and offset."""
        device = drafts.device
        self._drafts = drafts
        self._grid = torch.from_numpy(grid[:, :-1].copy()).to(device)  # [B, T]
        self._row = torch.from_numpy(grid[found.request, found.offset]).to(device)  # [N]
        self._place = torch.from_numpy(found.request * drafts.shape[1] + found.offset).to(device)  # [N] in [B, T]
        self._token = torch.from_numpy(found.token).to(device)
        self._ids = torch.from_numpy(found.ids).to(device)
        self._probs = torch.from_numpy(found.probs).to(device)
        self._limit = torch.from_numpy(found.limit).to(device)
        self._mask = torch.from_numpy(found.mask).to(device)
        self._stops = torch.from_numpy(found.stops).to(device)
        self._block = torch.from_numpy(found.block).to(device)
        self._blocks = bool((found.block > 1).any())
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        self.passed: torch.Tensor | None = None  # [B, T] whose token replaced the drawn one

    def before(self, logits: torch.Tensor) -> None:
        """Look at matched ``logits [R, V]`` that are about to be truncated in place: all candidates, as none is drawn yet."""
        self._seen = look(logits[self._row], self._ids)

    def after(self, drawn: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return ``drawn [R]`` with draft tokens where they pass. ``logits [R, V]``: matched, and truncated where asked."""
        own = drawn[self._row]  # [N]
        differs = (own != self._token) & torch.isfinite(logits[self._row, self._token])
        if self._stops.shape[1]:
            differs &= ~(self._stops == own.unsqueeze(1)).any(dim=1)
        which = differs.nonzero().flatten()  # [M]
        passing = torch.zeros(self._drafts.numel(), dtype=torch.bool, device=drawn.device)
        if len(which):
            seen = self._seen
            if seen is None:
                log_q, top = look(logits[self._row[which]], self._ids[which])
            else:
                log_q, top = seen[0][which], seen[1][which]
            near = nkl(self._probs[which], log_q, logits.shape[1]) < self._limit[which]
            passing[self._place[which]] = near & (top <= self._mask[which])  # a NaN passes nothing
        grid = passing.view(self._drafts.shape)
        if self._blocks:
            grid = keep_long((self._drafts == drawn[self._grid]) & (self._drafts != NO_DRAFT), grid, self._block)
        self.passed = grid
        # rows of a short request repeat in the grid: write only where something passes
        where = grid.flatten().nonzero().flatten()
        drawn = drawn.clone()
        drawn[self._grid.flatten()[where]] = self._drafts.flatten()[where].to(drawn.dtype)
        return drawn
