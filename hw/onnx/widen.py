"""bfloat16 to float32 past the caches: what a long prompt's KV becomes in a draft's slots.

A plain copy first reads every line it is about to overwrite. Of a few MB that lie in no cache anyway this is a third of all
traffic, and storing past the caches saves it. numba compiles the loop on import and keeps it beside this file; it holds no
interpreter lock.
"""

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

LANES = 16  # elements of one store: 64 bytes, which targets are aligned to

_HALF, _WORD, _INT = (ir.IntType(bits) for bits in (16, 32, 64))
_HALVES, _WORDS = ir.VectorType(_HALF, LANES), ir.VectorType(_WORD, LANES)


@intrinsic  # type: ignore[untyped-decorator]
def _store(typing: Any, source: Any, target: Any) -> Any:
    """``LANES`` bfloat16 from address ``source`` as float32 to address ``target``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        halves = builder.load(builder.inttoptr(arguments[0], _HALVES.as_pointer()), align=2)
        shift = ir.Constant(_WORDS, [ir.Constant(_WORD, 16)] * LANES)
        words = builder.shl(builder.zext(halves, _WORDS), shift)
        stored = builder.store(words, builder.inttoptr(arguments[1], _WORDS.as_pointer()), align=4 * LANES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_WORD, 1)]))
        return context.get_dummy_value()

    return numba.types.void(numba.uint64, numba.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typing: Any) -> Any:
    """Stores past the caches are not ordered by themselves: before this returns, other threads see them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.types.void(), generate


def _loop(sources, targets, elements):  # type: ignore[no-untyped-def]
    for i in range(numba.uint64(sources.shape[0])):
        source, target = sources[i], targets[i]
        for at in range(numba.uint64(0), elements, numba.uint64(LANES)):
            _store(source + numba.uint64(2) * at, target + numba.uint64(4) * at)
    _fence()


def _compiled() -> Any:
    signature = numba.void(numba.uint64[::1], numba.uint64[::1], numba.uint64)
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(signature, cache=True, **options)(_loop)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return numba.njit(signature, **options)(_loop)


_run = _compiled()


def fits(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> bool:
    """Can :func:`widen` copy ``source`` to ``target``, both ``[rows, heads, positions, dim]``?

    Both need dense ``[positions, dim]``, the target runs of whole, aligned stores.
    """
    if source.dtype.name != "bfloat16" or target.dtype != np.float32 or source.shape != target.shape:
        return False
    dim = source.shape[3]
    dense = source.strides[2:] == (2 * dim, 2) and target.strides[2:] == (4 * dim, 4)
    aligned = all(step % (4 * LANES) == 0 for step in (_address(target), *target.strides[:3]))
    return dense and aligned and target.flags.writeable


def widen(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy bfloat16 ``source`` to float32 ``target``; only what :func:`fits`. They must not overlap."""
    _run(_runs(source), _runs(target), np.uint64(source.shape[2] * source.shape[3]))


def _runs(array: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Address of every ``[positions, dim]`` of an array."""
    rows, heads = (
        np.arange(extent, dtype=np.int64) * step for extent, step in zip(array.shape, array.strides[:2], strict=False)
    )
    return (_address(array) + rows[:, None] + heads).astype(np.uint64).reshape(-1)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
