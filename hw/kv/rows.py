"""The row table of a record: which run of payload bytes holds which layers, heads and tokens of K, V or their scales."""

import struct
from dataclasses import dataclass
from enum import IntEnum

from hw.kv.codes import Code, Refused
from hw.kv.digests import DIGEST_BYTES, Algorithm
from hw.kv.manifest import BITS, QUANTISED, Manifest

ALIGNMENT = 64

_ROW = struct.Struct("<B3sIIIIIIIQQ16s")
ROW_BYTES = _ROW.size


class Kind(IntEnum):
    """What a row holds."""

    KV = 1  # layer by layer, all of a layer's keys and then all of its values
    K = 2
    V = 3
    K_SCALE = 4
    V_SCALE = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A run of payload bytes: ``layers`` x ``heads`` x ``tokens`` of one kind, in the order of the manifest's layout."""

    kind: Kind
    first_layer: int
    layers: int
    first_token: int  # a position of the sequence, like the header's ``start``
    tokens: int
    first_head: int
    heads: int
    offset: int  # from the start of the payload, a multiple of 64
    nbytes: int
    digest: bytes = bytes(DIGEST_BYTES)


class RecordError(Refused):
    """Bytes that are no well-formed record, or rows that are not what was written."""


def payload_nbytes(rows: tuple[Row, ...]) -> int:
    """Size of the payload that these rows describe, padding included; a multiple of 64."""
    return aligned(rows[-1].offset + rows[-1].nbytes)


def row_nbytes(manifest: Manifest, kind: Kind, layers: int, heads: int, tokens: int) -> int:
    """Size of a row. Tokens count as whole blocks; int4 takes half a byte an element."""
    geometry, numerics = manifest.geometry, manifest.numerics
    block = geometry.block_tokens
    cells = layers * heads * (-(-tokens // block) * block if block else tokens)
    keys = cells * geometry.head_dim * BITS[numerics.k] // 8
    values = cells * geometry.head_dim_v * BITS[numerics.v] // 8
    match kind:
        case Kind.KV:
            return keys + values
        case Kind.K:
            return keys
        case Kind.V:
            return values
        case Kind.K_SCALE | Kind.V_SCALE:
            return cells * BITS[numerics.scale] // 8 if numerics.scale else 0


def plan_rows(manifest: Manifest, start: int, tokens: int, layers_per_row: int = 0) -> tuple[Row, ...]:
    """Rows, without digests, for all layers and heads of the manifest and positions ``[start, start + tokens)``.

    One ``KV`` row for every ``layers_per_row`` layers (0: for all of them), with rows of scales after it where K or V is
    quantised. With unquantised K and V of one size, a float payload is thus one array ``[2 * layers, heads, tokens, dim]``.
    Smaller rows let a reader verify and take a few layers; one row is the least overhead.
    """
    if layers_per_row < 0 or tokens < 1 or start < 0:
        raise RecordError(Code.BAD_ROW, "plan", (start, tokens, layers_per_row), "at least 0, 1 and 0")
    geometry, numerics = manifest.geometry, manifest.numerics
    kinds = [Kind.KV]
    kinds += [Kind.K_SCALE] if numerics.k in QUANTISED else []
    kinds += [Kind.V_SCALE] if numerics.v in QUANTISED else []
    rows: list[Row] = []
    offset = 0
    step = layers_per_row or geometry.layers
    for done in range(0, geometry.layers, step):
        layers = min(step, geometry.layers - done)
        for kind in kinds:
            size = row_nbytes(manifest, kind, layers, geometry.heads, tokens)
            rows.append(
                Row(kind, geometry.first_layer + done, layers, start, tokens, geometry.first_head, geometry.heads, offset, size)
            )  # fmt: skip
            offset = aligned(offset + size)
    return tuple(rows)


def encode_rows(rows: tuple[Row, ...]) -> bytes:
    """The row table, ``ROW_BYTES`` a row."""
    return b"".join(
        _ROW.pack(
            row.kind, bytes(3), row.first_layer, row.layers, row.first_token, row.tokens, row.first_head, row.heads, 0,
            row.offset, row.nbytes, row.digest,
        )
        for row in rows
    )  # fmt: skip


def decode_rows(data: bytes) -> tuple[Row, ...]:
    """The rows of a table, whose length is a multiple of ``ROW_BYTES``. Raises RecordError for unknown kinds and set
    reserved bytes; :func:`check_rows` does the rest."""
    return tuple(_row(index, values) for index, values in enumerate(_ROW.iter_unpack(data)))


def check_rows(rows: tuple[Row, ...], start: int, valid_tokens: int, algorithm: Algorithm) -> None:
    """Are rows in canonical order, at canonical offsets, and within positions ``[start, start + valid_tokens)``?

    Raises RecordError naming the first row that is not.
    """
    end = start + valid_tokens
    if not rows:
        raise RecordError(Code.TOO_MANY_ROWS, "rows", 0, "at least 1")
    offset, last = 0, (-1, 0, 0, 0)
    for index, row in enumerate(rows):
        counts = min(row.layers, row.tokens, row.heads, row.nbytes) >= 1 and min(row.first_layer, row.first_head) >= 0
        limits = max(row.first_layer + row.layers, row.first_head + row.heads) <= 2**17 and row.nbytes < 2**63
        if not (counts and limits and len(row.digest) == DIGEST_BYTES):
            raise RecordError(Code.BAD_ROW, f"rows[{index}]", row, "counts of 1 or more in range")
        if not start <= row.first_token <= row.first_token + row.tokens <= end:
            got = f"[{row.first_token}, {row.first_token + row.tokens})"
            raise RecordError(Code.BAD_ROW, f"rows[{index}].tokens", got, f"within [{start}, {end})")
        if algorithm is Algorithm.NONE and any(row.digest):
            raise RecordError(Code.BAD_ROW, f"rows[{index}].digest", row.digest, "zeros without an algorithm")
        place = (row.first_layer, int(row.kind), row.first_head, row.first_token)
        if place <= last:
            raise RecordError(Code.ROW_ORDER, f"rows[{index}]", place, f"after {last}")
        if row.offset != offset:
            raise RecordError(Code.ROW_OFFSET, f"rows[{index}].offset", row.offset, offset)
        offset, last = aligned(offset + row.nbytes), place


def aligned(size: int) -> int:
    """``size`` rounded up to a multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _row(index: int, values: tuple[int, bytes, int, int, int, int, int, int, int, int, int, bytes]) -> Row:
    kind, pad, first_layer, layers, first_token, tokens, first_head, heads, zero, offset, nbytes, digest = values
    if any(pad) or zero:
        raise RecordError(Code.RESERVED_NOT_ZERO, f"rows[{index}].reserved", pad if any(pad) else zero, 0)
    if kind not in list(Kind):
        raise RecordError(Code.BAD_ROW, f"rows[{index}].kind", kind, "a known kind")
    return Row(Kind(kind), first_layer, layers, first_token, tokens, first_head, heads, offset, nbytes, digest)
