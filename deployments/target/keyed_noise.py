"""The torch twin of :mod:`deployments.chain.noise`: whole rows of the vocabulary at once, on the logits' device.

torch has no unsigned 32-bit arithmetic on every device, so the hash runs in int32: multiplication wraps alike, and
a logical right shift is an arithmetic one with the sign bits masked off.
"""

import torch

from deployments.chain.noise import GOLDEN, key_words

_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _lowbias32_(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((16, _M1), (15, _M2), (16, None)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        scratch.bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(scratch)
        if factor is not None:
            x.mul_(factor)
    return x


class KeyedNoise:
    """Makes ``ln E`` rows for a vocabulary; keeps the position-independent part of the hash."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._base = ids * _signed(GOLDEN)  # [V]

    def log_exponential(self, keys: list[tuple[int, int]]) -> torch.Tensor:
        """Return ``[R, V]`` float32 of ``ln E`` for ``R`` pairs (seed, position)."""
        words = [key_words(seed, position) for seed, position in keys]
        device = self._base.device
        k1 = torch.tensor([_signed(w[0]) for w in words], dtype=torch.int32, device=device)
        k2 = torch.tensor([_signed(w[1]) for w in words], dtype=torch.int32, device=device)
        x = self._base.unsqueeze(0) ^ k1.unsqueeze(1)  # [R, V]
        scratch = torch.empty_like(x)
        _lowbias32_(x, scratch)
        x.bitwise_xor_(k2.unsqueeze(1))
        _lowbias32_(x, scratch)
        torch.bitwise_right_shift(x, 1, out=scratch)
        scratch.bitwise_and_(0x7FFFFFFF)
        u = scratch.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
        return u.neg_().log1p_().neg_().log_()
