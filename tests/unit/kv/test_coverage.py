"""Rows against the manifest: everything needed is there once, in the sizes the manifest says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hw.kv.codes import Code
from hw.kv.coverage import check_coverage
from hw.kv.manifest import Geometry, Manifest
from hw.kv.rows import Kind, RecordError, Row, plan_rows, row_nbytes
from tests.unit.kv.samples import manifest, manifests


def found(one: Manifest, rows: Sequence[Row], need: Geometry | None = None, tokens: int = 4) -> Code | None:
    try:
        check_coverage(one, rows, 1, tokens, need or one.geometry)
    except RecordError as error:
        return error.code
    return None


def row(one: Manifest, kind: Kind, **changes: Any) -> Row:
    """A row of everything, in the size that fits; the offset does not matter here."""
    whole = plan_rows(one, 1, 4)[0]
    made = replace(whole, kind=kind, **changes)
    return (
        replace(made, nbytes=row_nbytes(one, kind, made.layers, made.heads, made.tokens))
        if "nbytes" not in changes
        else made
    )


@given(manifests(), st.integers(0, 9))
def test_planned_rows_cover(one: Manifest, per_row: int) -> None:
    tokens = 2 * (one.geometry.block_tokens or 5) if one.layout.opaque else 5
    assert found(one, plan_rows(one, 1, tokens, per_row), tokens=tokens) is None


ONE = manifest()
K, V = row(ONE, Kind.K), row(ONE, Kind.V)
QUANTISED = manifest(numerics__k="int8", numerics__scheme="per_token_head_symmetric", numerics__scale="float16")


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([K, V], None),
        ([K], Code.ROWS_INCOMPLETE),
        ([V], Code.ROWS_INCOMPLETE),
        ([row(ONE, Kind.KV), V], Code.ROWS_OVERLAP),
        ([row(ONE, Kind.KV, layers=3)], Code.ROWS_INCOMPLETE),
        ([row(ONE, Kind.KV, layers=3), row(ONE, Kind.KV, first_layer=3, layers=1)], None),
        ([row(ONE, Kind.KV, layers=3), row(ONE, Kind.KV, first_layer=2, layers=2)], Code.ROWS_OVERLAP),
        ([row(ONE, Kind.KV, heads=1), row(ONE, Kind.KV, first_head=1, heads=1)], None),
        ([row(ONE, Kind.KV, tokens=2), row(ONE, Kind.KV, first_token=3, tokens=2)], None),
        ([row(ONE, Kind.KV, tokens=2), row(ONE, Kind.KV, first_token=4, tokens=1)], Code.ROWS_INCOMPLETE),
        ([row(ONE, Kind.KV, layers=5)], Code.BAD_ROW),
        ([row(ONE, Kind.KV, first_layer=1)], Code.BAD_ROW),
        ([row(ONE, Kind.KV, heads=3)], Code.BAD_ROW),
        ([K, V, row(QUANTISED, Kind.K_SCALE)], Code.BAD_ROW),  # scales that nothing has
        ([row(ONE, Kind.KV, nbytes=K.nbytes)], Code.ROW_BYTES),
        ([row(ONE, Kind.KV, nbytes=2 * K.nbytes + 64)], Code.ROW_BYTES),
    ],
)
def test_rows(rows: list[Row], code: Code | None) -> None:
    assert found(ONE, rows) is code


def test_scales_are_needed() -> None:
    assert found(QUANTISED, [row(QUANTISED, Kind.KV)]) is Code.ROWS_INCOMPLETE
    assert found(QUANTISED, [row(QUANTISED, Kind.KV), row(QUANTISED, Kind.K_SCALE)]) is None


def test_only_what_is_needed() -> None:
    part = manifest(geometry__first_layer=1, geometry__layers=2).geometry
    assert found(ONE, [row(ONE, Kind.KV, first_layer=1, layers=2)], part) is None
    assert found(ONE, [row(ONE, Kind.KV, first_layer=1, layers=1)], part) is Code.ROWS_INCOMPLETE
    assert found(ONE, [row(ONE, Kind.KV)], manifest(geometry__layers=5).geometry) is Code.ROWS_INCOMPLETE


def test_blocks() -> None:
    blocked = manifest(geometry__block_tokens=2)
    whole = plan_rows(blocked, 1, 5)[0]

    def part(first: int, tokens: int) -> Row:
        size = row_nbytes(blocked, Kind.KV, 4, 2, tokens)
        return replace(whole, first_token=first, tokens=tokens, nbytes=size)

    assert found(blocked, [part(1, 5)], tokens=5) is None
    assert found(blocked, [part(1, 2), part(3, 3)], tokens=5) is None
    assert found(blocked, [part(1, 3), part(4, 2)], tokens=5) is Code.BAD_ROW  # starts and ends inside a block
    opaque = manifest(geometry__block_tokens=2, layout__packing="opaque:neon")
    assert found(opaque, plan_rows(opaque, 1, 4)) is None
    assert found(opaque, plan_rows(opaque, 1, 3), tokens=3) is Code.BAD_ROW
    assert found(opaque, [row(opaque, Kind.K), row(opaque, Kind.V)]) is Code.BAD_ROW
