"""Do the rows of a record hold what its manifest promises, and all that a receiver needs, each part once?"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hw.kv.codes import Code
from hw.kv.manifest import QUANTISED, Geometry, Manifest
from hw.kv.rows import Kind, RecordError, Row, row_nbytes


def check_coverage(manifest: Manifest, rows: Sequence[Row], start: int, tokens: int, need: Geometry) -> None:
    """Check rows against the manifest and a need: positions ``[start, start + tokens)`` of the layers and heads of ``need``.

    Raises RecordError: ``bad_row`` for a row outside the manifest's layers and heads, of scales that nothing has, or that
    starts inside a block; ``row_bytes_mismatch``; ``rows_overlap``; ``rows_incomplete`` when something needed is missing.
    """
    numerics = manifest.numerics
    allowed = {Kind.KV} if manifest.layout.opaque else {Kind.KV, Kind.K, Kind.V}
    needed = [(Kind.K, "keys"), (Kind.V, "values")]
    if numerics.k in QUANTISED:
        allowed.add(Kind.K_SCALE)
        needed.append((Kind.K_SCALE, "scales of keys"))
    if numerics.v in QUANTISED:
        allowed.add(Kind.V_SCALE)
        needed.append((Kind.V_SCALE, "scales of values"))
    for index, row in enumerate(rows):
        _check_row(index, row, manifest, start, tokens, allowed)
    wanted = np.array(
        [
            [need.first_layer, need.first_layer + need.layers],
            [need.first_head, need.first_head + need.heads],
            [start, start + tokens],
        ]
    )
    for kind, name in needed:
        boxes = [_box(row) for row in rows if row.kind is kind or (row.kind is Kind.KV and kind in (Kind.K, Kind.V))]
        _check_boxes(np.array(boxes, dtype=np.int64).reshape(-1, 3, 2), wanted, name)


def _check_row(index: int, row: Row, manifest: Manifest, start: int, tokens: int, allowed: set[Kind]) -> None:
    geometry = manifest.geometry
    if row.kind not in allowed:
        raise RecordError(
            Code.BAD_ROW, f"rows[{index}].kind", row.kind.name, "a kind the numerics and the layout call for"
        )
    lowest, highest = geometry.first_layer, geometry.first_layer + geometry.layers
    if not lowest <= row.first_layer <= row.first_layer + row.layers <= highest:
        raise RecordError(Code.BAD_ROW, f"rows[{index}].layers", row.first_layer, "layers of the manifest")
    lowest, highest = geometry.first_head, geometry.first_head + geometry.heads
    if not lowest <= row.first_head <= row.first_head + row.heads <= highest:
        raise RecordError(Code.BAD_ROW, f"rows[{index}].heads", row.first_head, "heads of the manifest")
    block = geometry.block_tokens
    end = start + tokens
    aligned = not block or (row.first_token - start) % block == 0
    # only the last row along the tokens may end inside a block: elsewhere its padding would be read as tokens
    last = row.first_token + row.tokens == end and not manifest.layout.opaque
    whole = not block or row.tokens % block == 0 or last
    if not (aligned and whole):
        got = (row.first_token, row.tokens)
        raise RecordError(Code.BAD_ROW, f"rows[{index}].tokens", got, f"whole blocks of {block} tokens")
    size = row_nbytes(manifest, row.kind, row.layers, row.heads, row.tokens)
    if row.nbytes != size:
        raise RecordError(Code.ROW_BYTES, f"rows[{index}].nbytes", row.nbytes, size)


def _box(row: Row) -> list[tuple[int, int]]:
    return [
        (row.first_layer, row.first_layer + row.layers),
        (row.first_head, row.first_head + row.heads),
        (row.first_token, row.first_token + row.tokens),
    ]


def _check_boxes(boxes: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64], name: str) -> None:
    """``boxes`` [rows, 3, 2] are half-open ranges over (layer, head, token): disjoint, and do they fill ``wanted`` [3, 2]?"""
    low, high = boxes[..., 0], boxes[..., 1]
    if len(boxes) > 1:
        meet = np.ones((len(boxes), len(boxes)), dtype=bool)
        for axis in range(3):
            meet &= low[:, None, axis] < high[None, :, axis]
            meet &= low[None, :, axis] < high[:, None, axis]
        np.fill_diagonal(meet, False)
        if meet.any():
            first, second = np.argwhere(meet)[0].tolist()
            raise RecordError(
                Code.ROWS_OVERLAP, "rows", f"{name} twice in the rows {first} and {second} of them", "once"
            )
    sides = np.clip(np.minimum(high, wanted[:, 1]) - np.maximum(low, wanted[:, 0]), 0, None)
    have, want = int(sides.prod(axis=1).sum()), int((wanted[:, 1] - wanted[:, 0]).prod())
    if have != want:
        raise RecordError(
            Code.ROWS_INCOMPLETE, "rows", f"{have} of {name}", f"{want}, counted in layers x heads x tokens"
        )
