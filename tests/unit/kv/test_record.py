"""Records in bytes: what was written is read back, and nothing else is read at all."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hw.kv.codes import Code
from hw.kv.digests import Algorithm
from hw.kv.manifest import Manifest
from hw.kv.prefix import Subject
from hw.kv.record import (
    PREFIX_BYTES,
    Clock,
    Header,
    Limits,
    Record,
    encode_header,
    header_nbytes,
    parse,
    seal,
    seal_into,
)
from hw.kv.rows import ROW_BYTES, Kind, RecordError, Row, payload_nbytes, plan_rows
from tests.unit.kv.samples import BOOT, SALT, TOKENS, header, manifest, manifests


def sealed(one: Header, rows: tuple[Row, ...], seed: int = 1) -> bytearray:
    """A whole record with random payload."""
    size = header_nbytes(len(rows)) + payload_nbytes(rows)
    buffer = bytearray(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes())
    seal_into(buffer, one, rows)
    return buffer


def resealed(buffer: bytearray, at: int, layout: str, value: object) -> bytearray:
    """The record with a field overwritten and the header's checksum right again."""
    changed = bytearray(buffer)
    struct.pack_into("<" + layout, changed, at, value)
    size = struct.unpack_from("<I", changed, 8)[0]
    struct.pack_into("<I", changed, 24, 0)
    struct.pack_into("<I", changed, 24, zlib.crc32(changed[:size]))
    return changed


SMALL = manifest(
    geometry__layers=1, geometry__heads=1, geometry__kv_heads=1, numerics__k="float16", numerics__v="float16"
)
GOLDEN_HEADER = (
    "4b56423101000000000100000100000000020000000000003d33778e01010000"
    "0700000000000000009435770000000070726f64756365722d65706f63682d31"
    "000102030405060708090a0b0c0d0e0f6006376ac85350ba1a331a2f3c3d5b9b"
    "15cabd3472cd4b243a1c9e634c871d6530677cd86bc8796a520270136ac96626"
    "8ea522076eff03c2d8e6af59e7731865e9e0e3d8a1954b483b2d2df45ad3fedc"
    "2aa5057213212ec5ae0b78eddb839cda10000000010000000400000000000000"
    "0100000000000000010000000100000004000000000000000100000000000000"
    "00000000000000000002000000000000b51f4245a290e02746b8a92dad1b89ef"
)


def test_golden() -> None:
    """The worked example of docs/kv_block_format.md: positions 1..4 of one layer, one head, payload 00 01 02 ..."""
    rows = plan_rows(SMALL, 1, len(TOKENS) - 1)
    payload = bytearray(index % 256 for index in range(payload_nbytes(rows)))
    data = seal(header(SMALL), rows, payload)
    assert data.hex() == GOLDEN_HEADER
    assert parse(data, payload).rows[0].nbytes == 4 * 1 * (32 + 32) * 2


@given(
    manifests(), st.integers(0, 40), st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**64 - 1),
    st.sampled_from(list(Algorithm)), st.sampled_from(list(Clock)), st.integers(1, 2**16),
)  # fmt: skip
def test_round_trip(
    one: Manifest, start: int, tokens: int, per_row: int, number: int, algorithm: Algorithm, clock: Clock, block: int
) -> None:
    rows = plan_rows(one, start, tokens, per_row)
    if payload_nbytes(rows) > 2**22 or len(rows) > 64:
        rows = plan_rows(manifest(), start, tokens)
    subject = Subject.of(range(start + tokens), start, salt=SALT, adapter="", block_tokens=block)
    before = header(
        one, subject=subject, generation=number, algorithm=algorithm, clock=clock,
        clock_id=BOOT if clock is Clock.MONOTONIC else bytes(16), lease_deadline_ns=0 if clock is Clock.NONE else number,
    )  # fmt: skip
    buffer = sealed(before, rows)
    record = parse(buffer)
    assert record.header == before
    assert [replace(row, digest=bytes(16)) for row in record.rows] == list(rows)
    assert encode_header(record.header, record.rows) == buffer[: header_nbytes(len(rows))]
    assert bytes(record.payload) == buffer[header_nbytes(len(rows)) :]
    if algorithm is Algorithm.NONE:
        with pytest.raises(RecordError, match="missing_digest"):
            record.verify()
    else:
        record.verify()


def odd_record() -> bytearray:
    """Three rows, with padding after each (quantised, 3 tokens)."""
    one = manifest(
        numerics__k="int8", numerics__scheme="per_token_head_symmetric", numerics__scale="float16", geometry__layers=1,
        geometry__head_dim=33, rope__rotary_dim=32,
    )  # fmt: skip
    rows = plan_rows(one, 1, 3)
    assert [row.kind for row in rows] == [Kind.KV, Kind.K_SCALE]
    assert all(row.nbytes % 64 for row in rows)
    return sealed(header(one, subject=Subject.of(TOKENS[:4], 1, salt=SALT, adapter="")), rows)


def refusal(buffer: bytes | bytearray, payload: bytearray | None = None) -> RecordError | None:
    try:
        parse(buffer, payload).verify()
    except RecordError as error:
        return error
    return None


def test_every_bit_of_header_and_payload_is_guarded() -> None:
    buffer = odd_record()
    assert refusal(buffer) is None
    size = struct.unpack_from("<I", buffer, 8)[0]
    for place in range(len(buffer)):
        for bit in range(8) if place < size else (place % 8,):
            buffer[place] ^= 1 << bit
            error = refusal(buffer)
            buffer[place] ^= 1 << bit
            assert error is not None, f"bit {bit} of byte {place}"
            assert isinstance(error.code, Code)
            if place >= size:
                assert error.code in (Code.ROW_DIGEST, Code.PADDING_NOT_ZERO)
            elif 24 <= place < size:
                assert error.code is Code.HEADER_CHECKSUM


def test_every_length_is_guarded() -> None:
    buffer = odd_record()
    size = header_nbytes(2)
    for length in range(len(buffer)):
        error = refusal(buffer[:length])
        assert error is not None
        assert error.code is Code.TRUNCATED
    for extra in (1, 64, 4096):
        error = refusal(buffer + bytes(extra))
        assert error is not None
        assert error.code is Code.TRAILING_BYTES
    head, payload = buffer[:size], buffer[size:]
    assert refusal(head, payload) is None
    codes = [refusal(*pair) for pair in ((head + b"\0", payload), (head, payload + b"\0"), (head, payload[:-1]))]
    assert [error and error.code for error in codes] == [Code.TRAILING_BYTES, Code.TRAILING_BYTES, Code.TRUNCATED]


@pytest.mark.parametrize(
    ("at", "layout", "value", "code"),
    [
        (0, "4s", b"KVB2", Code.BAD_MAGIC),
        (4, "B", 2, Code.RECORD_VERSION),
        (5, "B", 1, Code.RECORD_VERSION),
        (6, "H", 1, Code.UNKNOWN_FLAGS),
        (12, "I", 3, Code.HEADER_LENGTH),
        (12, "I", 0, Code.TOO_MANY_ROWS),
        (12, "I", 2**31, Code.TOO_MANY_ROWS),
        (16, "Q", 2**63, Code.PAYLOAD_TOO_LONG),
        (16, "Q", 64, Code.ROW_OFFSET),
        (28, "B", 9, Code.UNKNOWN_DIGEST),
        (28, "B", 0, Code.BAD_ROW),  # digests are there, the header says there are none
        (29, "B", 9, Code.UNKNOWN_CLOCK),
        (29, "B", 0, Code.UNKNOWN_CLOCK),
        (29, "B", 2, Code.UNKNOWN_CLOCK),  # a wall clock has no id
        (30, "H", 1, Code.RESERVED_NOT_ZERO),
        (64, "16s", bytes(16), Code.UNKNOWN_CLOCK),
        (176, "I", 0, Code.BAD_POSITIONS),
        (180, "I", 2**31, Code.BAD_POSITIONS),
        (184, "I", 0, Code.BAD_POSITIONS),
        (184, "I", 2, Code.BAD_ROW),  # rows go past the valid tokens
        (188, "I", 1, Code.RESERVED_NOT_ZERO),
        (192, "B", 9, Code.BAD_ROW),
        (192, "B", 5, Code.ROW_ORDER),
        (193, "B", 1, Code.RESERVED_NOT_ZERO),
        (196, "I", 2**32 - 1, Code.BAD_ROW),
        (200, "I", 0, Code.BAD_ROW),
        (204, "I", 0, Code.BAD_ROW),
        (208, "I", 0, Code.BAD_ROW),
        (216, "I", 0, Code.BAD_ROW),
        (220, "I", 1, Code.RESERVED_NOT_ZERO),
        (224, "Q", 64, Code.ROW_OFFSET),
        (232, "Q", 0, Code.BAD_ROW),
        (232, "Q", 1, Code.ROW_OFFSET),
        (232, "Q", 2**64 - 1, Code.BAD_ROW),
        (288, "Q", 0, Code.ROW_OFFSET),
    ],
)
def test_fields_that_say_something_else(at: int, layout: str, value: object, code: Code) -> None:
    error = refusal(resealed(odd_record(), at, layout, value))
    assert error is not None
    assert error.code is code


def test_a_partial_read_verifies_what_it_read() -> None:
    one = manifest()
    rows = plan_rows(one, 1, 4, layers_per_row=1)
    buffer = sealed(header(one), rows)
    record = parse(buffer)
    assert len(record.rows) == 4
    buffer[header_nbytes(4) + record.rows[2].offset] ^= 1  # the record sees it: it is a view
    record.verify([0, 1, 3])
    with pytest.raises(RecordError) as refused:
        record.verify([2])
    assert (refused.value.code, refused.value.field) == (Code.ROW_DIGEST, "rows[2].digest")


def test_views_are_read_only_and_no_copies() -> None:
    buffer = odd_record()
    record = parse(buffer)
    assert record.payload.readonly
    assert record.row(1).readonly
    whole = np.frombuffer(buffer, dtype=np.uint8)
    assert np.shares_memory(np.frombuffer(record.row(0), dtype=np.uint8), whole)
    with pytest.raises(TypeError):
        record.payload[0] = 1


def test_limits() -> None:
    buffer = odd_record()
    for limits, code in ((Limits(rows=1), Code.TOO_MANY_ROWS), (Limits(payload_bytes=64), Code.PAYLOAD_TOO_LONG)):
        with pytest.raises(RecordError) as refused:
            parse(buffer, limits=limits)
        assert refused.value.code is code


def test_a_writer_refuses_what_a_reader_would() -> None:
    one = manifest()
    rows = plan_rows(one, 1, 4)
    payload = bytearray(payload_nbytes(rows))
    good = header(one)
    for bad in (
        replace(good, manifest_digest=b""),
        replace(good, epoch=b"short"),
        replace(good, generation=2**64),
        replace(good, clock=Clock.NONE),
        replace(good, subject=replace(good.subject, valid_tokens=3)),
        replace(good, subject=replace(good.subject, prefix_hash=bytes(31))),
    ):
        with pytest.raises(RecordError):
            seal(bad, rows, payload)
    for wrong in (bytearray(len(payload) - 1), bytearray(len(payload) + 64)):
        with pytest.raises(RecordError):
            seal(good, rows, wrong)
    for order in ((), (rows[0], rows[0])):
        with pytest.raises(RecordError):
            encode_header(good, order)
    for start, tokens, per_row in ((-1, 1, 0), (0, 0, 0), (0, 1, -1)):
        with pytest.raises(RecordError):
            plan_rows(one, start, tokens, per_row)


def test_one_row_is_the_fast_layout() -> None:
    """Unquantised, unblocked: the payload is one array [2 * layers, heads, tokens, dim], keys and values alternating."""
    one = manifest()
    (row,) = plan_rows(one, 1, 4)
    assert row.nbytes == payload_nbytes((row,)) == 2 * 4 * 2 * 4 * 32 * 4
    per_layer = plan_rows(one, 1, 4, layers_per_row=1)
    assert [each.offset for each in per_layer] == [index * row.nbytes // 4 for index in range(4)]
    assert PREFIX_BYTES == 192
    assert ROW_BYTES == 64


def test_blocks_count_whole() -> None:
    (row,) = plan_rows(manifest(geometry__block_tokens=16), 1, 17)
    assert row.tokens == 17
    assert row.nbytes == 2 * 4 * 2 * 32 * 32 * 4
    nibbles = manifest(
        numerics__k="int4", numerics__v="int4", numerics__scheme="per_token_head_symmetric", numerics__scale="float32"
    )
    rows = plan_rows(nibbles, 0, 3)
    assert [(each.kind, each.nbytes) for each in rows] == [
        (Kind.KV, 2 * 4 * 2 * 3 * 32 // 2),
        (Kind.K_SCALE, 4 * 2 * 3 * 4),
        (Kind.V_SCALE, 4 * 2 * 3 * 4),
    ]


def test_header_is_read_once() -> None:
    """What a record says is fixed once it is parsed, whatever the writer does to shared memory afterwards."""
    buffer = odd_record()
    record: Record = parse(buffer)
    before = (record.header, record.rows)
    buffer[: header_nbytes(2)] = bytes(header_nbytes(2))
    assert (record.header, record.rows) == before
