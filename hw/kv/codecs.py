"""Numbers as they are stored: float32, float16, bfloat16, and int8 or int4 with one scale for each token and head.

bfloat16 is carried as uint16 words. Quantised, value = integer * scale with the scale of a token and head being its largest
magnitude over 127 (int8) or 7 (int4), rounded to the scale's dtype; all zeros have scale 0. int4 nibbles are two's
complement, two a byte, the even element in the low nibble. What a target dtype cannot hold (NaN, infinity,
overflow) is refused: it would not come back as what it was.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LIMIT = {"int8": 127, "int4": 7}
STORAGE: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "int4": np.int8,  # while it is worked on; two a byte in a payload
}
_FLOATS = ("float32", "float16", "bfloat16")


class CodecError(ValueError):
    """A number that the target dtype cannot hold, or stored numbers that no encoder writes; nothing was produced."""


@dataclass(frozen=True)
class Loss:
    """How far a lossy step moved the values: the largest absolute difference, and the RMS of the differences over the
    RMS of the values (0 when all are zero)."""

    step: str
    elements: int
    max_abs: float
    relative_rms: float


def loss(step: str, before: Array, after: Array) -> Loss:
    """Compare two arrays of finite floats of one shape, in float32 with float64 sums."""
    before, after = np.asarray(before, np.float32), np.asarray(after, np.float32)
    difference = after - before
    power = float(np.sum(np.square(before), dtype=np.float64))
    error = float(np.sum(np.square(difference), dtype=np.float64))
    return Loss(
        step, before.size, float(np.max(np.abs(difference), initial=0.0)), (error / power) ** 0.5 if power else 0.0
    )


def cast(array: Array, source: str, target: str) -> Array:
    """Floats of ``source`` as ``target``, rounding to nearest even. Same dtype: the array itself, unlooked at.

    Raises CodecError for NaN, infinity, and what overflows the target.
    """
    _check_storage(array, source)
    if target not in _FLOATS or source not in _FLOATS:
        raise CodecError(f"cannot cast {source} to {target}: quantise or dequantise instead")
    return array if source == target else _narrow(_widen(array, source), target)


def quantise(array: Array, source: str, target: str, scale: str) -> tuple[Array, Array]:
    """Floats ``[..., dim]`` as int8 integers ``[..., dim]`` for ``target`` int8 or int4, and scales ``[...]``.

    Raises CodecError for NaN, infinity, and a scale that overflows its dtype.
    """
    _check_storage(array, source)
    if target not in LIMIT or scale not in ("float16", "float32"):
        raise CodecError(f"cannot quantise to {target} with scales of {scale!r}")
    values = _widen(array, source)
    largest = np.max(np.abs(values), axis=-1, initial=0.0)
    exact = largest / np.float32(LIMIT[target])
    scales = _narrow(exact, scale)
    least = np.finfo(scales.dtype).smallest_subnormal
    scales = np.where((largest > 0) & (scales == 0), least, scales)  # tiny values keep a scale that is not zero
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))[..., None]
    integers = np.clip(np.rint(values / divisor), -LIMIT[target], LIMIT[target])
    return integers.astype(np.int8), scales


def dequantise(integers: Array, scales: Array, source: str, target: str) -> Array:
    """Integers ``[..., dim]`` of :func:`quantise` times their scales ``[...]``, as floats of ``target``.

    Raises CodecError for integers outside the symmetric range, and scales that are negative, NaN or infinite.
    """
    _check_storage(integers, source)
    limit = LIMIT.get(source)
    if limit is None or target not in _FLOATS or scales.shape != integers.shape[:-1]:
        raise CodecError(f"cannot dequantise {source} {integers.shape} with scales {scales.shape} to {target}")
    if integers.size and (integers.min() < -limit or integers.max() > limit):
        raise CodecError(f"integers outside -{limit}..{limit} in {source}")
    wide = scales.astype(np.float32)
    if not np.isfinite(wide).all() or (wide < 0).any():
        raise CodecError("a scale is negative, NaN or infinite")
    return _narrow(integers.astype(np.float32) * wide[..., None], target)


def pack_nibbles(integers: Array) -> npt.NDArray[np.uint8]:
    """int8 integers in -8..7, an even number of them along the last axis, two a byte: the even element low."""
    if integers.shape[-1] % 2:
        raise CodecError(f"an odd number of int4 elements ({integers.shape[-1]}) does not fill bytes")
    nibbles = integers.view(np.uint8) & np.uint8(0xF)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """The inverse of :func:`pack_nibbles`: twice as many int8 integers along the last axis."""
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.int8)
    out[..., 0::2] = (packed << np.uint8(4)).view(np.int8) >> 4  # the arithmetic shift brings the sign along
    out[..., 1::2] = packed.view(np.int8) >> 4
    return out


def _check_storage(array: Array, dtype: str) -> None:
    if dtype not in STORAGE or array.dtype != STORAGE[dtype]:
        raise CodecError(f"{dtype} is carried as {STORAGE.get(dtype, type(None)).__name__}, not {array.dtype}")


def _widen(array: Array, source: str) -> npt.NDArray[np.float32]:
    """As float32, exactly; refuses NaN and infinity."""
    if source == "bfloat16":
        wide = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        wide = array.astype(np.float32)
    if not np.isfinite(wide).all():
        raise CodecError(f"NaN or infinity among {source} values")
    return wide


def _narrow(values: npt.NDArray[np.float32], target: str) -> Array:
    """Finite float32 as ``target``, rounded to nearest even; refuses overflow."""
    values = np.ascontiguousarray(values, np.float32)
    if target == "float32":
        return values
    if target == "float16":
        with np.errstate(over="ignore"):
            half: Array = values.astype(np.float16)
        fits = np.isfinite(half)
    else:
        bits = values.view(np.uint32)
        half = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
        fits = (half & np.uint16(0x7F80)) != np.uint16(0x7F80)
    if not fits.all():
        raise CodecError(f"a value is too large for {target}")
    return half
