"""The acceptance sampler that takes the place of vLLM's rejection sampler: verification by agreement.

A request with a lossy policy differs in one thing: where the policy lets a draft token pass, it counts as what the target drew
(:mod:`deployments.target.policy_rules`). Prefixes, logprobs and everything after follow from that.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from deployments.chain.acceptance.lossless import NO_DRAFT, PAD
from deployments.target.meaning import Meaning
from deployments.target.policy_rules import Relaxation
from deployments.target.sampler import KeyedSampler, RequestSampling, Rows


def verify(drafts: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Device form of :func:`deployments.chain.acceptance.lossless.verify`.

    ``drafts [B, T]`` padded with ``NO_DRAFT``, ``drawn [B, T + 1]``; returns committed tokens ``[B, T + 1]`` padded with ``PAD``.
    """
    agrees = drafts == drawn[:, :-1]
    accepted = agrees.to(torch.int32).cumprod(dim=1).sum(dim=1, keepdim=True)  # [B, 1]
    columns = torch.arange(drawn.shape[1], device=drawn.device).unsqueeze(0)  # [1, T + 1]
    return torch.where(columns <= accepted, drawn, PAD)


class AcceptanceSampler(nn.Module):
    """Draws the target's own token at every verified position, then keeps the agreeing prefix and one token more."""

    def __init__(self, sampler: KeyedSampler, meaning: Meaning | None = None) -> None:
        """``meaning`` judges requests with the policy ``semantic``; without it nothing of theirs passes."""
        super().__init__()
        self.sampler = sampler
        self.meaning = meaning
        self._relaxed: npt.NDArray[np.bool_] | None = None  # [B, T] of the last step

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,  # not needed: agreement never looks at them
        logits: torch.Tensor,  # [N + B, V], request by request, drafts then bonus
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        counts = metadata.num_draft_tokens
        rows = Rows.verifying(counts)
        requests = self.sampler.requests()
        host_grid = _grid(counts)  # [B, T + 1] -> row
        drafts = _pad(metadata.draft_token_ids, counts)  # [B, T]
        relaxation = self._relaxation(requests, drafts, host_grid)
        output = self.sampler.draw(logits, sampling_metadata, rows, requests, relaxation)
        grid = host_grid.to(logits.device)
        drawn = output.sampled_token_ids.flatten()[grid]  # [B, T + 1]
        committed = verify(drafts, drawn)
        self._relaxed = relaxation.passed if relaxation is not None else None
        return SamplerOutput(
            sampled_token_ids=committed,
            logprobs_tensors=_regrid(output.logprobs_tensors, grid),
        )

    def take_relaxed(self) -> dict[int, list[int]]:
        """Of the last step, by index in the batch: offsets of draft tokens that passed though the target drew others.

        Those behind the accepted prefix are among them.
        """
        relaxed, self._relaxed = self._relaxed, None
        found: dict[int, list[int]] = {}
        for request, offset in np.argwhere(relaxed).tolist() if relaxed is not None else ():
            found.setdefault(request, []).append(offset)
        return found

    def _relaxation(
        self, requests: list[RequestSampling], drafts: torch.Tensor, grid: torch.Tensor
    ) -> Relaxation | None:
        """What lossy policies may let pass in this step; None, at no cost, where no request has one."""
        if not any(request.lossy for request in requests):
            return None
        lossy = [request.lossy for request in requests]
        return Relaxation(lossy, drafts.cpu().numpy(), grid.numpy(), self.meaning)


def _grid(counts: list[int]) -> torch.Tensor:
    """Logits row of each (request, offset); short requests repeat their last row, which acceptance never reaches."""
    length = torch.tensor(counts, dtype=torch.int64) + 1  # [B]
    start = torch.cumsum(length, 0) - length
    columns = torch.arange(int(length.max()))
    return start.unsqueeze(1) + torch.minimum(columns.unsqueeze(0), length.unsqueeze(1) - 1)


def _pad(flat: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """``[N]`` draft tokens, request after request -> ``[B, T]`` padded with ``NO_DRAFT``."""
    padded = torch.full((len(counts), max(counts)), NO_DRAFT, dtype=flat.dtype, device=flat.device)
    number = torch.tensor(counts, device=flat.device).unsqueeze(1)
    mask = torch.arange(max(counts), device=flat.device).unsqueeze(0) < number
    padded[mask] = flat
    return padded


def _regrid(logprobs: LogprobsTensors | None, grid: torch.Tensor) -> LogprobsTensors | None:
    """vLLM filters logprobs by the flattened ``[B, T + 1]`` token grid; ours are one a row."""
    if logprobs is None:
        return None
    index = grid.flatten()
    return LogprobsTensors(
        logprobs.logprob_token_ids[index], logprobs.logprobs[index], logprobs.selected_token_ranks[index]
    )
