"""Weights of a matrix product in blocks of few bits, as ONNX Runtime's ``MatMulNBits`` takes them.

Each row of ``[N, K]`` is cut into blocks along K; a block has one scale and (4 bits) one zero point. Of a few scales, each
block takes the one whose rounding errs least.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a block's range: less range, finer steps


class Blocks(NamedTuple):
    """``packed`` uint8 ``[N, K / block, block * bits / 8]`` (4 bits: the first of two in the low half), ``scales`` float32
    ``[N, K / block]``, ``zeros`` uint8 ``[N, ceil(K / block / 2)]`` packed likewise, None at 8 bits (it is 128)."""

    packed: npt.NDArray[np.uint8]
    scales: Matrix
    zeros: npt.NDArray[np.uint8] | None


def quantise(weight: Matrix, bits: int, block: int) -> Blocks:
    """``weight`` float32 ``[N, K]``. Raises ValueError for other bits than 4 and 8, or a K that blocks do not fill."""
    rows, columns = weight.shape
    if bits not in (4, 8) or columns % block or block % 2:
        raise ValueError(f"{bits} bits in blocks of {block} are not possible for a matrix of {weight.shape}")
    blocks = weight.reshape(rows, columns // block, block).astype(np.float32)
    best = np.full(blocks.shape[:2], np.inf, np.float32)
    codes = np.zeros(blocks.shape, np.uint8)
    scales = np.ones(blocks.shape[:2], np.float32)
    zeros = np.zeros(blocks.shape[:2], np.uint8)
    for shrink in _SHRINK:
        scale, zero = _range(blocks, bits, shrink)
        code = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, 2**bits - 1)
        error = (((code - zero[..., None]) * scale[..., None] - blocks) ** 2).sum(-1)
        better = error < best
        best = np.where(better, error, best)
        codes[better], scales[better], zeros[better] = code[better], scale[better], zero[better]
    if bits == 8:
        return Blocks(codes, scales, None)
    return Blocks(_pair(codes), scales, _pair(zeros))


def dequantise(blocks: Blocks, bits: int) -> Matrix:
    """What the product is taken with: float32 ``[N, K]``."""
    rows, count = blocks.scales.shape
    codes, zeros = blocks.packed, np.full((rows, count), 128, np.uint8)
    if bits == 4:
        assert blocks.zeros is not None
        codes, zeros = _unpair(blocks.packed), _unpair(blocks.zeros)[:, :count]
    values = (codes.astype(np.float32) - zeros[..., None].astype(np.float32)) * blocks.scales[..., None]
    return values.reshape(rows, -1)


def _range(blocks: Matrix, bits: int, shrink: float) -> tuple[Matrix, Matrix]:
    """Scale and zero point of each block."""
    if bits == 8:
        scale = np.abs(blocks).max(-1) * np.float32(shrink if shrink > 0.9 else 1.0) / 127
        return np.where(scale == 0, np.float32(1), scale), np.full(scale.shape, 128, np.float32)
    low, high = np.minimum(blocks.min(-1), 0) * np.float32(shrink), np.maximum(blocks.max(-1), 0) * np.float32(shrink)
    scale = (high - low) / 15
    scale = np.where(scale == 0, np.float32(1), scale)
    return scale, np.clip(np.rint(-low / scale), 0, 15).astype(np.float32)


def _pair(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], -1)
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def _unpair(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
