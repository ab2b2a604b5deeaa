"""Conversions of a block set: the steps that ``hw/kv/verdict.py`` plans, and resharding over tensor-parallel ranks.

What loses nothing (everything but ``Dequantise``, ``Quantise`` and a ``Cast`` to 16 bits) gives identical bytes back when it is
undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace as changed

from hw.kv import codecs
from hw.kv.coverage import check_coverage
from hw.kv.layouts import TOKEN_MAJOR, Array, Interior, Kind, interior
from hw.kv.manifest import QUANTISED, Manifest, Numerics
from hw.kv.payload import ConvertError, Held, load, store
from hw.kv.rows import Row, plan_rows
from hw.kv.steps import (
    Cast,
    Dequantise,
    Quantise,
    Reblock,
    Reorder,
    Repack,
    SelectHeads,
    SelectLayers,
    Step,
)

Tensor = Literal["k", "v"]
_TENSORS: tuple[Tensor, Tensor] = ("k", "v")


@dataclass(frozen=True)
class Converted:
    """A payload after its steps, what its rows are, and what was lost."""

    rows: tuple[Row, ...]
    payload: memoryview
    losses: tuple[codecs.Loss, ...]


def convert(
    manifest: Manifest,
    rows: Sequence[Row],
    payload: memoryview,
    steps: Sequence[Step],
    result: Manifest,
    *,
    start: int,
    tokens: int,
    out: memoryview | None = None,
) -> Converted:
    """Run the steps of a ``Convert`` verdict on positions ``[start, start + tokens)``; ``result`` is the verdict's.

    ``out`` receives the payload if given (writable, at least ``payload_nbytes`` of the planned rows). Raises ConvertError,
    LayoutError, CodecError or RecordError, before ``out`` is touched.
    """
    check_coverage(manifest, rows, start, tokens, result.geometry)
    held = run(load(manifest, rows, payload, start, tokens), steps)
    for name in ("geometry", "numerics", "layout"):
        if getattr(held, name) != getattr(result, name):
            raise ConvertError(f"the steps lead to {getattr(held, name)}, not to {getattr(result, name)}")
    planned = plan_rows(result, start, tokens)
    return Converted(planned, store(held, result, planned, out), held.losses)


def run(held: Held, steps: Sequence[Step]) -> Held:
    """Execute steps in order. Raises ConvertError at the first that does not fit what it finds; ``held`` stays as it is."""
    for step in steps:
        held = _run(held, step)
    return held


def _run(held: Held, step: Step) -> Held:
    match step:
        case SelectLayers(first, count):
            cut = _range(first, count, held.geometry.first_layer, held.geometry.layers, step)
            return _each(
                replace(held, geometry=changed(held.geometry, first_layer=first, layers=count)), lambda a: a[cut]
            )
        case SelectHeads(first, count):
            cut = _range(first, count, held.geometry.first_head, held.geometry.heads, step)
            nhd = held.layout.order == "NHD"
            moved = replace(held, geometry=changed(held.geometry, first_head=first, heads=count))
            return _each(moved, lambda a: a[:, :, :, cut] if nhd else a[:, :, cut])
        case Repack(source, target):
            _find(step, held.layout.packing, source)
            return _repack(held, target, step)
        case Reblock(source, target):
            _find(step, (held.geometry.block_tokens, held.layout.packing), (source, TOKEN_MAJOR))
            return _reblock(held, target)
        case Reorder(source, target):
            _find(step, (held.layout.order, held.layout.packing), (source, TOKEN_MAJOR))
            moved = replace(held, layout=changed(held.layout, order=target))
            return moved if source == target else _each(moved, lambda a: a.swapaxes(2, 3))
        case Dequantise() | Cast() | Quantise():
            return _renumber(held, step)


def _renumber(held: Held, step: Dequantise | Cast | Quantise) -> Held:
    name = step.tensor
    _find(step, getattr(held.numerics, name), step.source)
    if held.layout.packing != TOKEN_MAJOR:
        raise ConvertError(f"{step}: numbers are converted in {TOKEN_MAJOR} form, not in {held.layout.packing}")
    array, scales = getattr(held, name), getattr(held, f"{name}_scale")
    if isinstance(step, Cast):
        after = codecs.cast(array, step.source, step.target)
        found = (
            codecs.loss(str(step), _float32(array, step.source), _float32(after, step.target)) if step.lossy else None
        )
    elif isinstance(step, Quantise):
        after, scales = codecs.quantise(array, step.source, step.target, step.scale)
        back = codecs.dequantise(after, scales, step.target, "float32")
        found = codecs.loss(str(step), _float32(array, step.source), back)
    else:
        if scales is None:
            raise ConvertError(f"{step}: there are no scales")
        after = codecs.dequantise(array, scales, step.source, step.target)
        exact = codecs.dequantise(array, scales, step.source, "float32")
        found = codecs.loss(str(step), exact, _float32(after, step.target))
        scales = None
    changes: dict[str, Any] = {name: after, f"{name}_scale": scales}
    numbers = {"k": held.numerics.k, "v": held.numerics.v, name: step.target}
    quantised = any(dtype in QUANTISED for dtype in numbers.values())
    scheme = step.scheme if isinstance(step, Quantise) else held.numerics.scheme
    scale = step.scale if isinstance(step, Quantise) else held.numerics.scale
    changes["numerics"] = Numerics(numbers["k"], numbers["v"], scheme if quantised else "", scale if quantised else "")
    return replace(held, losses=held.losses + ((found,) if found else ()), **changes)


def _repack(held: Held, target: str, step: Step) -> Held:
    if held.layout.packing == target:
        return held
    if TOKEN_MAJOR not in (held.layout.packing, target):
        raise ConvertError(f"{step}: one side must be {TOKEN_MAJOR}")
    if held.layout.order != "HND":
        raise ConvertError(f"{step}: only HND blocks have a packing")
    packing = target if held.layout.packing == TOKEN_MAJOR else held.layout.packing
    changes: dict[str, Any] = {}
    for name in _TENSORS:
        array: Array = getattr(held, name)
        dim = held.geometry.head_dim if name == "k" else held.geometry.head_dim_v
        kind: Kind = "K" if name == "k" else "V"
        inner = interior(packing, kind, held.block, dim)
        if target == TOKEN_MAJOR:
            changes[name] = _stored(array, inner).reshape(*array.shape[:3], held.block, dim)
        else:
            packed = np.empty((*array.shape[:3], held.block * dim), array.dtype)
            _stored(packed, inner)[...] = array.reshape(*array.shape[:3], *inner.sizes)
            changes[name] = packed
    return replace(held, layout=changed(held.layout, packing=target), **changes)


def _stored(packed: Array, inner: Interior) -> Array:
    """``[layers, blocks, heads, tokens * dim]`` with a dense last axis as ``[layers, blocks, heads, t1, t2, d1, d2]``."""
    if packed.strides[-1] != packed.itemsize:
        packed = np.ascontiguousarray(packed)
    strides = (*packed.strides[:3], *(stride * packed.itemsize for stride in inner.strides))
    shape = (*packed.shape[:3], *inner.sizes)
    return np.lib.stride_tricks.as_strided(packed, shape, strides, writeable=packed.flags.writeable)


def _reblock(held: Held, target: int) -> Held:
    tokens, nhd = held.tokens, held.layout.order == "NHD"
    block = target or tokens
    blocks = -(-tokens // block)

    def cut(array: Array) -> Array:
        flat = array if nhd else array.swapaxes(2, 3)  # [layers, blocks, tokens, heads, ...]
        flat = flat.reshape(array.shape[0], -1, *flat.shape[3:])[:, :tokens]
        if tokens != blocks * block:
            padded = np.zeros((flat.shape[0], blocks * block, *flat.shape[2:]), flat.dtype)
            padded[:, :tokens] = flat
            flat = padded
        again = flat.reshape(flat.shape[0], blocks, block, *flat.shape[2:])
        return again if nhd else again.swapaxes(2, 3)

    return _each(replace(held, geometry=changed(held.geometry, block_tokens=target)), cut)


# --- resharding ---------------------------------------------------------------------------------------------------------


def join_heads(parts: Sequence[Held]) -> Held:
    """What tensor-parallel ranks hold, as one: parts in any order, their head ranges adjacent. ``SelectHeads`` is the inverse.

    Raises ConvertError when they do not belong together or leave a gap.
    """
    ordered = sorted(parts, key=lambda part: part.geometry.first_head)
    if not ordered:
        raise ConvertError("nothing to join")
    first = ordered[0]
    after = first.geometry.first_head
    for part in ordered:
        same = changed(part.geometry, first_head=0, heads=1) == changed(first.geometry, first_head=0, heads=1)
        if not same or (part.tokens, part.numerics, part.layout) != (first.tokens, first.numerics, first.layout):
            raise ConvertError("parts of different geometry, numerics, layout or length")
        if part.geometry.first_head != after:
            raise ConvertError(f"heads {after}..{part.geometry.first_head - 1} are missing or held twice")
        after += part.geometry.heads
    axis = 3 if first.layout.order == "NHD" else 2
    names = [name for name in ("k", "v", "k_scale", "v_scale") if getattr(first, name) is not None]
    joined = {name: np.concatenate([getattr(part, name) for part in ordered], axis=axis) for name in names}
    geometry = changed(first.geometry, heads=after - first.geometry.first_head)
    return replace(first, geometry=geometry, losses=sum((part.losses for part in ordered), ()), **joined)


# --- small things -------------------------------------------------------------------------------------------------------


def _each(held: Held, change: Any) -> Held:
    """Apply a change to keys, values and their scales alike."""
    names = [name for name in ("k", "v", "k_scale", "v_scale") if getattr(held, name) is not None]
    return replace(held, **{name: change(getattr(held, name)) for name in names})


def _range(first: int, count: int, have: int, size: int, step: Step) -> slice:
    if count < 1 or first < have or first + count > have + size:
        raise ConvertError(f"{step}: only {have}..{have + size - 1} are there")
    return slice(first - have, first - have + count)


def _find(step: Step, found: object, wanted: object) -> None:
    if found != wanted:
        raise ConvertError(f"{step}: finds {found}, expected {wanted}")


def _float32(array: Array, dtype: str) -> Array:
    return codecs.cast(array, dtype, "float32")
