"""Which steps turn the bytes of one manifest into those another describes, and which conversions there are none for."""

from typing import Literal

from hw.kv.codes import Code, Refused
from hw.kv.manifest import QUANTISED, DType, Geometry, Manifest
from hw.kv.steps import Cast, Dequantise, Quantise, Reblock, Reorder, Repack, SelectHeads, SelectLayers, Step


def plan_steps(source: Manifest, target: Manifest) -> tuple[Step, ...]:
    """The steps, in the order ``hw/kv/steps.py`` states, from the source's geometry, numerics and layout to the target's.

    Identity, RoPE and attention are taken to agree, and the source's layers and heads to include the target's. Raises
    Refused: ``double_quantisation`` for what was quantised before in another way, ``opaque_packing`` when an interior
    order nobody knows would have to be converted.
    """
    selections = _selections(source.geometry, target.geometry)
    if source.layout.opaque or target.layout.opaque:
        _check_opaque(source, target)
        return tuple(selections)
    inner: list[Step] = []
    blocks = source.geometry.block_tokens, target.geometry.block_tokens
    if blocks[0] != blocks[1]:
        inner.append(Reblock(*blocks))
    if source.layout.order != target.layout.order:
        inner.append(Reorder(source.layout.order, target.layout.order))
    inner += _number_steps(source, target)
    packed, wanted = source.layout.packing, target.layout.packing
    if inner or packed != wanted:
        inner[:0] = [Repack(packed, "token_major")] if packed != "token_major" else []
        inner += [Repack("token_major", wanted)] if wanted != "token_major" else []
    return (*selections, *inner)


def _selections(got: Geometry, want: Geometry) -> list[Step]:
    steps: list[Step] = []
    if (got.first_layer, got.layers) != (want.first_layer, want.layers):
        steps.append(SelectLayers(want.first_layer, want.layers))
    if (got.first_head, got.heads) != (want.first_head, want.heads):
        steps.append(SelectHeads(want.first_head, want.heads))
    return steps


def _check_opaque(source: Manifest, target: Manifest) -> None:
    got, want = source.geometry, target.geometry
    same: list[tuple[str, object, object]] = [
        ("layout.packing", source.layout.packing, target.layout.packing),
        ("layout.order", source.layout.order, target.layout.order),
        ("numerics", source.numerics, target.numerics),
        ("geometry.block_tokens", got.block_tokens, want.block_tokens),
        ("geometry.first_head", got.first_head, want.first_head),
        ("geometry.heads", got.heads, want.heads),
    ]
    for name, have, need in same:
        if have != need:
            raise Refused(Code.OPAQUE, name, have, need)


def _number_steps(source: Manifest, target: Manifest) -> list[Step]:
    got, want = source.numerics, target.numerics
    quantised_before = any(step.startswith(("quantise(", "dequantise(")) for step in source.lineage)
    dequantise: list[Step] = []
    cast: list[Step] = []
    quantise: list[Step] = []
    tensors: tuple[tuple[Literal["k", "v"], DType, DType], ...] = (("k", got.k, want.k), ("v", got.v, want.v))
    for tensor, have, need in tensors:
        if have in QUANTISED and need in QUANTISED:
            if have != need:
                raise Refused(Code.DOUBLE_QUANTISATION, f"numerics.{tensor}", have, need)
            if (got.scheme, got.scale) != (want.scheme, want.scale):
                raise Refused(Code.DOUBLE_QUANTISATION, "numerics.scale", got.scale, want.scale)
        elif have in QUANTISED:
            dequantise.append(Dequantise(tensor, have, need, got.scheme))
        elif need in QUANTISED:
            if quantised_before:
                raise Refused(Code.DOUBLE_QUANTISATION, "lineage", source.lineage, "bytes never quantised before")
            quantise.append(Quantise(tensor, have, need, want.scheme, want.scale))
        elif have != need:
            cast.append(Cast(tensor, have, need))
    return [*dequantise, *cast, *quantise]
