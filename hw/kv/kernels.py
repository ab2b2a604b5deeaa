"""Compiled inner loops for the packings that a strided copy is slow at: vLLM's CPU caches.

numba compiles them on first use and keeps them beside this file (call :func:`warm_up` at start, not in a step); they hold no
interpreter lock. The two tile operations are written as vector shuffles, which LLVM turns into what the host has: left to
itself it makes scalar code of these loops, at a third of the speed.
"""

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from hw.kv.layouts import AMX_VNNI, K_TRANSPOSED, Kind

_U = numba.uint64  # unsigned indices: no wrap-around checks
_TILE = 16  # elements of a tile's side


def _compiled(function: Any) -> Any:
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return numba.njit(function, **options)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, lanes: int) -> Any:
    """A pointer to ``lanes`` elements from ``array[index]`` on."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    element = ir.IntType(array_type.dtype.bitwidth)
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(element, lanes).as_pointer())


def _lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), [ir.Constant(ir.IntType(32), n) for n in numbers])


_EVEN, _ODD = (_lanes(list(range(start, 2 * _TILE, 2))) for start in (0, 1))
_ZIPPED = [n // 2 + _TILE * (n % 2) for n in range(2 * _TILE)]  # a0 b0 a1 b1 ...


@intrinsic  # type: ignore[untyped-decorator]
def _split_pairs(typing: Any, source: Any, at: Any, target: Any, even: Any, odd: Any) -> Any:
    """``target[even:even+16], target[odd:odd+16] = source[at:at+32:2], source[at+1:at+33:2]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, out, even, odd = arguments
        align = signature.args[0].dtype.bitwidth // 8
        pairs = builder.load(_pointer(context, builder, signature.args[0], array, at, 2 * _TILE), align=align)
        for index, lanes in ((even, _EVEN), (odd, _ODD)):
            half = builder.shuffle_vector(pairs, pairs, lanes)
            builder.store(half, _pointer(context, builder, signature.args[2], out, index, _TILE), align=align)
        return context.get_dummy_value()

    return numba.types.void(source, numba.uint64, target, numba.uint64, numba.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _join_pairs(typing: Any, source: Any, even: Any, odd: Any, target: Any, at: Any) -> Any:
    """The inverse of :func:`_split_pairs`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, even, odd, out, at = arguments
        align = signature.args[0].dtype.bitwidth // 8
        first, second = (
            builder.load(_pointer(context, builder, signature.args[0], array, index, _TILE), align=align)
            for index in (even, odd)
        )
        pairs = builder.shuffle_vector(first, second, _lanes(_ZIPPED))
        builder.store(pairs, _pointer(context, builder, signature.args[3], out, at, 2 * _TILE), align=align)
        return context.get_dummy_value()

    return numba.types.void(source, numba.uint64, numba.uint64, target, numba.uint64), generate


def _tile(source: Any, target: Any, height: int) -> Any:
    """``target[c, r] = source[r, c]`` for ``height`` x 16 elements whose rows are ``row`` and ``to_row`` apart.

    Four rounds of zipping row i with row i + 8. With 32 rows their pairs are zipped first, and are one element from then
    on: a half-word shuffle costs several of a word, and whole cache lines are stored.
    """
    halves = (_lanes(_ZIPPED[:_TILE]), _lanes(_ZIPPED[_TILE:]))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, row, out, to, to_row = arguments
        bits = signature.args[0].dtype.bitwidth

        def places(array_type: Any, data: Any, start: Any, step: Any, rows: int, lanes: int) -> list[Any]:
            indices = [builder.add(start, builder.mul(step, ir.Constant(step.type, n))) for n in range(rows)]
            return [_pointer(context, builder, array_type, data, index, lanes) for index in indices]

        rows = [
            builder.load(place, align=bits // 8) for place in places(signature.args[0], array, at, row, height, _TILE)
        ]
        if height == 2 * _TILE:
            words = ir.VectorType(ir.IntType(2 * bits), _TILE)
            zipped = [builder.shuffle_vector(rows[n], rows[n + 1], _lanes(_ZIPPED)) for n in range(0, height, 2)]
            rows = [builder.bitcast(pair, words) for pair in zipped]
        for _ in range(4):
            rows = [
                builder.shuffle_vector(rows[n], rows[n + _TILE // 2], half)
                for n in range(_TILE // 2)
                for half in halves
            ]
        for vector, place in zip(rows, places(signature.args[3], out, to, to_row, _TILE, height), strict=True):
            builder.store(builder.bitcast(vector, place.type.pointee), place, align=bits // 8)
        return context.get_dummy_value()

    unsigned = numba.uint64
    return numba.types.void(source, unsigned, unsigned, target, unsigned, unsigned), generate


@intrinsic  # type: ignore[untyped-decorator]
def _tile16(typing: Any, source: Any, at: Any, row: Any, target: Any, to: Any, to_row: Any) -> Any:
    return _tile(source, target, _TILE)


@intrinsic  # type: ignore[untyped-decorator]
def _tile32(typing: Any, source: Any, at: Any, row: Any, target: Any, to: Any, to_row: Any) -> Any:
    return _tile(source, target, 2 * _TILE)


@_compiled
def _transpose(source, starts, target, ends, rows, columns, source_row, target_row):  # type: ignore[no-untyped-def]
    """``target[columns, rows] = source[rows, columns].T`` for every pair of starts and ends."""
    for i in range(_U(starts.shape[0])):
        for c in range(_U(0), _U(columns), _U(_TILE)):
            for r in range(_U(0), _U(rows), _U(_TILE)):
                at = _U(starts[i]) + r * _U(source_row) + c
                to = _U(ends[i]) + c * _U(target_row) + r
                _tile16(source, at, _U(source_row), target, to, _U(target_row))


@_compiled
def _transpose_halves(source, starts, target, ends, rows, columns, source_row, target_row):  # type: ignore[no-untyped-def]
    """The same for 16-bit elements and a multiple of 32 rows."""
    for i in range(_U(starts.shape[0])):
        for c in range(_U(0), _U(columns), _U(_TILE)):
            for r in range(_U(0), _U(rows), _U(2 * _TILE)):
                at = _U(starts[i]) + r * _U(source_row) + c
                to = _U(ends[i]) + c * _U(target_row) + r
                _tile32(source, at, _U(source_row), target, to, _U(target_row))


@_compiled
def _split_values(source, starts, target, ends, pairs, groups):  # type: ignore[no-untyped-def]
    """AMX values ``[groups, pairs, 16, 2]`` to ``[2 * pairs, groups * 16]``."""
    dim = _U(groups) * _U(_TILE)
    for i in range(_U(starts.shape[0])):
        for p in range(_U(pairs)):
            for g in range(_U(groups)):
                at = _U(starts[i]) + (g * _U(pairs) + p) * _U(2 * _TILE)
                even = _U(ends[i]) + _U(2) * p * dim + g * _U(_TILE)
                _split_pairs(source, at, target, even, even + dim)


@_compiled
def _join_values(source, starts, target, ends, pairs, groups):  # type: ignore[no-untyped-def]
    """The inverse of :func:`_split_values`."""
    dim = _U(groups) * _U(_TILE)
    for i in range(_U(starts.shape[0])):
        for p in range(_U(pairs)):
            for g in range(_U(groups)):
                even = _U(starts[i]) + _U(2) * p * dim + g * _U(_TILE)
                to = _U(ends[i]) + (g * _U(pairs) + p) * _U(2 * _TILE)
                _join_pairs(source, even, even + dim, target, to)


def move(
    packing: str,
    kind: Kind,
    stored: torch.Tensor,
    ids: npt.NDArray[np.int64],
    rows: torch.Tensor,
    *,
    writing: bool,
) -> bool:
    """Copy whole blocks between a cache and canonical rows; False, and nothing done, where a strided copy must do it.

    ``stored`` is ``[layers, blocks, heads, t1, t2, d1, d2]`` and ``rows`` ``[layers, heads, len(ids) * block_tokens, dim]``.
    """
    layers, _, heads = stored.shape[:3]
    tokens, dim = stored.shape[3] * stored.shape[4], rows.shape[3]
    size = rows.dtype.itemsize
    amx = packing == AMX_VNNI
    if not (amx or (packing == K_TRANSPOSED and kind == "K")):
        return False
    if stored.device.type != "cpu" or rows.device.type != "cpu" or rows.dtype != stored.dtype:
        return False
    steps = (stored.stride(0), stored.stride(2), stored.stride(1), rows.stride(0), rows.stride(1))
    unit = 2 if amx and kind == "K" else 1  # AMX keys are pairs of dimensions: one word each
    fits = tokens % _TILE == 0 and dim % (_TILE * unit) == 0 and size in ((2,) if amx else (2, 4))
    if not fits or rows.stride()[2:] != (dim, 1) or any(step % unit for step in steps):
        return False
    layer, head, block = np.ix_(range(layers), range(heads), range(len(ids)))
    in_cache = layer * steps[0] + head * steps[1] + ids[block] * steps[2]
    in_rows = layer * steps[3] + head * steps[4] + block * tokens * dim
    cache, canonical = _flat(stored, size), _flat(rows, size)
    arguments: tuple[int, ...]
    if amx and kind == "V":
        loop = _join_values if writing else _split_values
        arguments = (tokens // 2, dim // 16)
    else:
        if unit == 2:
            cache, canonical, in_cache, in_rows = cache.view("u4"), canonical.view("u4"), in_cache // 2, in_rows // 2
            dim //= 2
        # A strip is [dim, strip] in the cache and [strip, dim] in the rows.
        strip = 2 * _TILE if cache.itemsize == 2 and tokens % (2 * _TILE) == 0 else _TILE
        step = np.arange(0, tokens, strip)
        in_cache = in_cache[..., None] + step * (dim if amx else 1)
        in_rows = in_rows[..., None] + step * dim
        cache_row = _TILE if amx else tokens
        arguments = (strip, dim, dim, cache_row) if writing else (dim, strip, cache_row, dim)
        loop = _transpose_halves if cache.itemsize == 2 and arguments[0] % (2 * _TILE) == 0 else _transpose
    ends = (canonical, in_rows.reshape(-1)), (cache, in_cache.reshape(-1))
    (source, starts), (target, stops) = ends if writing else ends[::-1]
    loop(source, starts, target, stops, *arguments)
    return True


def _flat(tensor: torch.Tensor, size: int) -> npt.NDArray[Any]:
    """The memory from a tensor's first to its last element as unsigned integers of ``size`` bytes."""
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((count,), (1,), tensor.storage_offset()).view(torch.int16 if size == 2 else torch.int32)
    array: npt.NDArray[Any] = flat.numpy().view(f"u{size}")
    return array


def warm_up() -> None:
    """Compile every loop, or load what an earlier process compiled: some seconds the first time on a machine."""
    ids = np.zeros(1, np.int64)
    for size, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        stored = torch.zeros(1, 1, 1, 32, 1, 32, 1, dtype=dtype)
        rows = torch.zeros(1, 1, 32, 32, dtype=dtype)
        for packing, kind in ((K_TRANSPOSED, "K"), (AMX_VNNI, "K"), (AMX_VNNI, "V")):
            for writing in (False, True):
                if size == 2 or packing == K_TRANSPOSED:
                    move(packing, "K" if kind == "K" else "V", stored, ids, rows, writing=writing)
