"""The target's sampler: vLLM's own, over any number of positions of each request, with position-keyed randomness.

A *row* is one position at which the target draws a token. A plain step has one row a request; a verifying step has one
for each draft token and one more. Every row goes through vLLM's full sampler (allowed tokens, bad words, min_tokens,
penalties, temperature, min_p, top-k/top-p) as if the draft tokens before it had been generated, so there is no second,
approximate implementation of any parameter for verifying.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from deployments.chain.acceptance.candidates import Lossy
from deployments.target import row_kernels
from deployments.target.keyed_noise import KeyedNoise
from deployments.target.policy_rules import Relaxation
from deployments.target.truncation import truncate

T = TypeVar("T")

_GREEDY_BELOW = 1e-5  # vLLM's own threshold


@dataclass(frozen=True, slots=True)
class Rows:
    """Which position of which request each logits row belongs to."""

    request: npt.NDArray[np.int64]  # [R] index into the batch
    offset: npt.NDArray[np.int64]  # [R] draft tokens assumed before this row

    @classmethod
    def plain(cls, batch: int) -> "Rows":
        return cls(np.arange(batch), np.zeros(batch, dtype=np.int64))

    @classmethod
    def verifying(cls, num_draft_tokens: list[int]) -> "Rows":
        """Rows ``0..n_b`` of each request ``b``, in vLLM's flattened order."""
        counts = np.asarray(num_draft_tokens, dtype=np.int64) + 1
        request = np.repeat(np.arange(len(counts)), counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        return cls(request, np.arange(int(counts.sum())) - starts)

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """What the sampler needs to know of one request beyond vLLM's metadata."""

    seed: int
    position: int  # index in the whole sequence of the first token to draw
    min_p: float = 0.0
    bias: dict[int, float] | None = None
    lossy: Lossy | None = None  # None: only the target's own tokens are accepted


class _Memory:
    """For a second set of logits, kept between steps on CPUs: there, fresh memory of that size costs more than filling it."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def like(self, logits: torch.Tensor) -> torch.Tensor:
        """``[R, V]`` as ``logits``, with anything in it; valid until the next call."""
        if logits.device.type != "cpu":
            return torch.empty_like(logits)
        kept = self._kept
        if kept is None or len(kept) < len(logits) or kept.shape[1] != logits.shape[1]:
            kept = self._kept = torch.empty_like(logits, memory_format=torch.contiguous_format)
        return kept[: len(logits)]


class _RowProcessor:
    """A logits processor for this call only; lives outside vLLM's persistent batch."""

    def __init__(self, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.apply = apply


class KeyedSampler(Sampler):
    """vLLM's sampler with draws that depend on nothing but (logits, parameters, seed, position)."""

    def __init__(self, base: Sampler, requests: Callable[[], list[RequestSampling]]) -> None:
        super().__init__(base.logprobs_mode, base.use_fp64_gumbel)
        self.requests = requests
        if current_platform.is_cpu():
            row_kernels.warm_up()
        self._noise: KeyedNoise | None = None
        self._memory = _Memory()
        self._relaxation: Relaxation | None = None  # of the call under way
        self._keys: list[tuple[int, int]] = []

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        """Plain step: ``logits [B, V]``."""
        return self.draw(logits, sampling_metadata, Rows.plain(logits.shape[0]))

    def draw(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        rows: Rows,
        requests: list[RequestSampling] | None = None,
        relaxation: Relaxation | None = None,
    ) -> SamplerOutput:
        """Draw one token a row: ``logits [R, V]`` -> ``sampled_token_ids [R, 1]`` and, if asked for, logprobs ``[R, k]``.

        Where ``relaxation`` lets a draft token pass, that is the row's token, and the logprobs are the target's for it.
        """
        requests = self.requests() if requests is None else requests
        # The keyed noise replaces vLLM's sequential generators, which would need one draw per generated token.
        metadata.generators.clear()
        expanded = expand(metadata, rows, requests, logits.device)
        if not metadata.all_greedy:
            self._keys = [
                (requests[b].seed, requests[b].position + int(k))
                for b, k in zip(rows.request.tolist(), rows.offset.tolist(), strict=True)
            ]
        self._relaxation = relaxation
        try:
            return super().forward(logits, expanded)
        finally:
            self._relaxation = None

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Override of vLLM's last stage: greedy rows by argmax, the rest by the keyed race."""
        mode = logprobs_mode_override or self.logprobs_mode
        greedy = None if sampling_metadata.all_random else self.greedy_sample(logits)
        if not sampling_metadata.all_greedy:
            assert sampling_metadata.temperature is not None
            logits = self.apply_temperature(logits, sampling_metadata.temperature, sampling_metadata.all_random)
            logits = self._truncated(logits, sampling_metadata)
        processed = self._processed(logits, sampling_metadata, mode)
        if sampling_metadata.all_greedy:
            assert greedy is not None
            drawn = greedy
        else:
            drawn = self._race(logits)
            if greedy is not None:
                drawn = torch.where(sampling_metadata.temperature < _GREEDY_BELOW, greedy, drawn)
        if self._relaxation is not None:
            drawn = self._relaxation.after(drawn, logits)
        return drawn, processed

    def _truncated(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """After min_p, top-k and top-p. In place, unless a policy is to see what was there before."""
        out = None
        if self._relaxation is not None and _truncates(metadata):
            self._relaxation.before(logits)
            out = self._memory.like(logits)
            if metadata.logitsprocs.argmax_invariant:
                logits, out = out.copy_(logits), None
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        return truncate(logits, metadata.top_k, metadata.top_p, out)

    def _processed(self, logits: torch.Tensor, metadata: SamplingMetadata, mode: str) -> torch.Tensor | None:
        if metadata.max_num_logprobs is None and not metadata.logprob_token_ids:
            return None
        if mode == "processed_logits":
            return logits.clone()
        return self.compute_logprobs(logits) if mode == "processed_logprobs" else None

    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        """Override of vLLM's argmax: on CPUs torch's takes twenty times as long as NumPy's."""
        if logits.device.type == "cpu":
            return torch.from_numpy(logits.numpy().argmax(axis=-1))
        return logits.argmax(dim=-1)

    def _race(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.device.type == "cpu":
            return torch.from_numpy(row_kernels.race(logits.contiguous().numpy(), self._keys))
        if self._noise is None:
            self._noise = KeyedNoise(logits.shape[1], logits.device)
        return (logits - self._noise.log_exponential(self._keys)).argmax(dim=-1)


def _truncates(metadata: SamplingMetadata) -> bool:
    return metadata.top_k is not None or metadata.top_p is not None or bool(metadata.logitsprocs.argmax_invariant)


def expand(
    metadata: SamplingMetadata, rows: Rows, requests: list[RequestSampling], device: torch.device
) -> SamplingMetadata:
    """Return metadata with one entry a row (``R`` of them) out of metadata with one a request (``B``)."""
    extras = any(r.min_p > 0 or r.bias for r in requests)
    one_each = len(rows) == len(requests)  # then row r is request r
    if one_each and not extras:
        return metadata
    index = torch.from_numpy(rows.request).to(device)

    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return values if values is None or one_each else values[index]

    outputs: list[list[int]] = metadata.output_token_ids
    if outputs and not one_each:
        drafts = metadata.spec_token_ids or [[] for _ in requests]
        outputs = [
            outputs[b] + drafts[b][:k] if k else outputs[b]
            for b, k in zip(rows.request.tolist(), rows.offset.tolist(), strict=True)
        ]
    by_request = _rows_by_request(rows, len(requests))
    return replace(
        metadata,
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        prompt_token_ids=pick(metadata.prompt_token_ids),
        frequency_penalties=pick(metadata.frequency_penalties),
        presence_penalties=pick(metadata.presence_penalties),
        repetition_penalties=pick(metadata.repetition_penalties),
        output_token_ids=outputs,
        allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
        bad_words_token_ids=_by_row(metadata.bad_words_token_ids, by_request),
        logprob_token_ids=_by_row(metadata.logprob_token_ids, by_request) if metadata.logprob_token_ids else None,
        spec_token_ids=None,
        logitsprocs=_processors(metadata, rows, requests, by_request, device),
        thinking_budget_state_holder=None,  # refused by the API: it keeps its state per request, not per position
    )


def _rows_by_request(rows: Rows, batch: int) -> list[list[int]]:
    grouped: list[list[int]] = [[] for _ in range(batch)]
    for row, request in enumerate(rows.request.tolist()):
        grouped[request].append(row)
    return grouped


def _by_row(values: dict[int, T], by_request: list[list[int]]) -> dict[int, T]:
    return {row: value for request, value in values.items() for row in by_request[request]}


def _processors(
    metadata: SamplingMetadata,
    rows: Rows,
    requests: list[RequestSampling],
    by_request: list[list[int]],
    device: torch.device,
) -> LogitsProcessors:
    """The persistent processors keep state per request; here each is applied per row."""
    result = LogitsProcessors()
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            if processor.min_toks:
                result.non_argmax_invariant.append(_min_tokens(processor, rows, by_request, device))
        else:
            raise RuntimeError(f"{type(processor).__name__} cannot be applied per position")
    if any(r.bias for r in requests):
        result.non_argmax_invariant.append(_logit_bias(requests, by_request, device))
    if any(r.min_p > 0 for r in requests):
        result.argmax_invariant.append(_min_p(rows, requests, device))
    return result


def _min_tokens(
    processor: MinTokensLogitsProcessor, rows: Rows, by_request: list[list[int]], device: torch.device
) -> _RowProcessor:
    """A row is masked while output plus the drafts before it are fewer than ``min_tokens``."""
    masked: list[tuple[int, int]] = []
    restorable: list[tuple[int, int]] = []
    for request, (min_tokens, output, stop_ids, structured) in processor.min_toks.items():
        for row in by_request[request]:
            if len(output) + int(rows.offset[row]) < min_tokens:
                masked.extend((row, token) for token in stop_ids)
                if structured:
                    restorable.extend((row, token) for token in stop_ids)

    def apply(logits: torch.Tensor) -> torch.Tensor:
        processor._mask_stop_token_logits(logits, _index(masked, device), _index(restorable, device))
        return logits

    return _RowProcessor(apply)


def _logit_bias(requests: list[RequestSampling], by_request: list[list[int]], device: torch.device) -> _RowProcessor:
    entries = [
        (row, token, value)
        for request, sampling in enumerate(requests)
        for token, value in (sampling.bias or {}).items()
        for row in by_request[request]
    ]
    where = _index([(row, token) for row, token, _ in entries], device)
    values = torch.tensor([value for _, _, value in entries], dtype=torch.float32, device=device)

    def apply(logits: torch.Tensor) -> torch.Tensor:
        logits[where] += values
        return logits

    return _RowProcessor(apply)


def _min_p(rows: Rows, requests: list[RequestSampling], device: torch.device) -> _RowProcessor:
    """Keep tokens with ``p >= min_p * max p`` (vLLM's definition), as a threshold on logits."""
    values = torch.tensor([requests[b].min_p for b in rows.request.tolist()], dtype=torch.float32, device=device)
    margin = values.log().unsqueeze(1)  # [R, 1]; -inf where min_p is 0, which masks nothing

    def apply(logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + margin, float("-inf"))

    return _RowProcessor(apply)


def _index(pairs: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    return flat[:, 0], flat[:, 1]
