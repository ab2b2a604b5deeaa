"""Files of block sets: what was written is read back, and nothing else is read at all."""

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hw.kv.codes import Code, Refused
from hw.kv.container import HEAD_BYTES, Container, ContainerError, parse_container, pieces, read_file, write_file
from hw.kv.manifest import Manifest
from hw.kv.prefix import Subject
from hw.kv.record import PREFIX_BYTES, Limits, Record, header_nbytes, parse, seal_into
from hw.kv.rows import RecordError, aligned, payload_nbytes, plan_rows
from tests.unit.kv.samples import SALT, header, manifest, manifests
from tests.unit.kv.test_record import GOLDEN_HEADER, SMALL, sealed

GOLDEN_HEAD = "4b56463101000000e30200005c6f9bce40060000000000000000000000000000" + SMALL.digest().hex()


def record(of: Manifest, start: int = 1, tokens: int = 4) -> Record:
    subject = Subject.of(list(range(start + tokens)), start, salt=SALT, adapter="")
    return parse(sealed(header(of, subject=subject), plan_rows(of, start, tokens)))


def whole(*records: Record, of: Manifest = SMALL) -> bytes:
    return b"".join(pieces(of, records))


def reheaded(data: bytes, at: int, layout: str, value: object) -> bytes:
    """The file with a field of its head overwritten and the checksum right again."""
    changed = bytearray(data)
    struct.pack_into("<" + layout, changed, at, value)
    struct.pack_into("<I", changed, 12, 0)
    struct.pack_into("<I", changed, 12, zlib.crc32(changed[:HEAD_BYTES]))
    return bytes(changed)


def refused(data: bytes, limits: Limits | None = None) -> Code:
    with pytest.raises(Refused) as caught:
        parse_container(data, limits=limits or Limits())
    return caught.value.code


ONE = whole(record(SMALL))
TWO = whole(record(SMALL), record(SMALL, 5, 3))
RECORD_AT = HEAD_BYTES + aligned(len(SMALL.encode()))


def test_golden_bytes() -> None:
    rows = plan_rows(SMALL, 1, 4)
    buffer = bytearray(header_nbytes(1) + payload_nbytes(rows))
    buffer[header_nbytes(1) :] = bytes(n % 256 for n in range(payload_nbytes(rows)))
    seal_into(buffer, header(SMALL), rows)
    data = whole(parse(buffer))
    assert data[:HEAD_BYTES].hex() == GOLDEN_HEAD
    assert data[HEAD_BYTES:RECORD_AT].rstrip(b"\0") == SMALL.encode()
    assert data[RECORD_AT:] == buffer
    assert data[RECORD_AT:].hex().startswith(GOLDEN_HEADER)


def test_the_documents_example_is_this_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "kv_block_format.md").read_text()
    example = text.split("### Head of a file")[1].split("```")[1]
    assert "".join(line.split("  ")[1] for line in example.strip().splitlines()[1:]).replace(" ", "") == GOLDEN_HEAD


@settings(deadline=None, max_examples=60)
@given(manifests(), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2)), min_size=1, max_size=3))
def test_any_manifest_and_records_come_back(of: Manifest, parts: list[tuple[int, int]]) -> None:
    records = tuple(record(of, start, blocks * max(1, of.geometry.block_tokens)) for start, blocks in parts)
    data = whole(*records, of=of)
    assert len(data) % 64 == 0
    assert parse_container(data) == Container(of, records)
    assert b"".join(pieces(of, parse_container(data).records)) == data


def test_every_byte_of_head_manifest_and_record_headers_counts() -> None:
    for at in range(RECORD_AT + header_nbytes(1)):
        changed = bytearray(ONE)
        changed[at] ^= 1
        refused(bytes(changed))  # whatever the code: it is not read


def test_a_flipped_payload_byte_is_found_by_its_digest() -> None:
    changed = bytearray(ONE)
    changed[-1] ^= 1
    with pytest.raises(RecordError) as caught:
        parse_container(bytes(changed)).records[0].verify()
    assert caught.value.code is Code.ROW_DIGEST


@given(st.integers(0, len(TWO) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    assert refused(TWO[:length]) is Code.TRUNCATED


@given(st.integers(HEAD_BYTES, len(TWO) - 1))
def test_so_is_a_truncation_whose_head_was_adapted(length: int) -> None:
    data = reheaded(TWO[:length], 16, "Q", length)
    if length == len(ONE):  # the first record is all there
        assert data == ONE
    else:
        refused(data)


def test_bytes_after_the_end_are_refused() -> None:
    assert refused(ONE + bytes(64)) is Code.TRAILING_BYTES
    longer = ONE + bytes(64)
    assert refused(reheaded(longer, 16, "Q", len(longer))) is Code.TRUNCATED  # of the record that begins there


@pytest.mark.parametrize(
    ("at", "layout", "value", "code"),
    [
        (0, "4s", b"KVB1", Code.BAD_MAGIC),
        (4, "B", 2, Code.RECORD_VERSION),
        (5, "B", 1, Code.RECORD_VERSION),
        (6, "H", 1, Code.UNKNOWN_FLAGS),
        (8, "I", 2**16 + 1, Code.MANIFEST_TOO_LONG),
        (8, "I", len(SMALL.encode()) - 1, Code.MANIFEST_MALFORMED),
        (16, "Q", len(ONE) + 1, Code.TRUNCATED),
        (16, "Q", len(ONE) - 1, Code.TRAILING_BYTES),
        (24, "Q", 1, Code.RESERVED_NOT_ZERO),
        (32, "32s", bytes(32), Code.MANIFEST_DIGEST),
    ],
)
def test_a_wrong_field_is_refused_although_the_checksum_is_right(
    at: int, layout: str, value: object, code: Code
) -> None:
    assert refused(reheaded(ONE, at, layout, value)) is code


def test_padding_of_the_manifest_must_be_zero() -> None:
    assert HEAD_BYTES + len(SMALL.encode()) < RECORD_AT
    changed = bytearray(ONE)
    changed[RECORD_AT - 1] = 1
    assert refused(bytes(changed)) is Code.PADDING_NOT_ZERO


def test_lengths_of_a_record_are_not_trusted() -> None:
    for at, layout, value in ((8, "I", 0), (8, "I", 2**32 - 1), (16, "Q", 0), (16, "Q", 2**64 - 1)):
        changed = bytearray(ONE)
        struct.pack_into("<" + layout, changed, RECORD_AT + at, value)
        refused(bytes(changed))
    assert refused(ONE, Limits(payload_bytes=64)) is Code.PAYLOAD_TOO_LONG


def test_a_record_of_another_manifest_goes_neither_in_nor_out() -> None:
    other = record(manifest(numerics__k="float16", numerics__v="float16"))
    with pytest.raises(ContainerError, match="manifest_digest_mismatch"):
        whole(record(SMALL), other)
    joined = ONE + b"".join(pieces(parse_container(ONE).manifest, [record(SMALL)]))[RECORD_AT:]
    assert len(parse_container(reheaded(joined, 16, "Q", len(joined))).records) == 2
    foreign = ONE + whole(other, of=manifest(numerics__k="float16", numerics__v="float16"))[-len(other.payload) - 256 :]
    assert refused(reheaded(foreign, 16, "Q", len(foreign))) is Code.MANIFEST_DIGEST


def test_no_records_is_no_file() -> None:
    with pytest.raises(ContainerError, match="truncated"):
        whole()
    bare = ONE[:RECORD_AT]
    assert refused(reheaded(bare, 16, "Q", len(bare))) is Code.TRUNCATED
    assert len(bare) + PREFIX_BYTES < len(ONE)


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "one.kv"
    assert write_file(path, SMALL, [record(SMALL)]) == len(ONE)
    assert path.read_bytes() == ONE
    assert read_file(path) == parse_container(ONE)
    with pytest.raises(ContainerError):
        write_file(path, manifest(), [record(SMALL)])
    assert path.read_bytes() == ONE
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.kv"]
    write_file(path, SMALL, [record(SMALL), record(SMALL, 5, 3)])
    assert path.read_bytes() == TWO


def test_what_is_no_file_of_ours_is_not_read_on(tmp_path: Path) -> None:
    path = tmp_path / "one.kv"
    for data, code in ((b"", Code.TRUNCATED), (b"x" * 4096, Code.BAD_MAGIC), (ONE[:-64], Code.TRUNCATED)):
        path.write_bytes(data)
        with pytest.raises(ContainerError) as caught:
            read_file(path)
        assert caught.value.code is code
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none.kv")
