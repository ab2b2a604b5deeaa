"""One block set in bytes: a fixed little-endian header, a table of rows, and the payload the rows point into.

Header and payload may lie in one buffer, the payload after the header, or apart. A producer plans the rows, writes the
payload where it should lie (shared memory, say), and seals: digests are computed in place and nothing is copied. A reader
parses, which checks everything that can be checked without knowing the engines, and verifies the rows it reads. What the
record means to an engine is for ``hw/kv/verdict.py``. Offsets and sizes: ``docs/kv_block_format.md``.
"""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from hw.kv.codes import Code
from hw.kv.digests import Algorithm, row_digest
from hw.kv.prefix import Subject
from hw.kv.rows import (
    ALIGNMENT,
    ROW_BYTES,
    RecordError,
    Row,
    aligned,
    check_rows,
    decode_rows,
    encode_rows,
    payload_nbytes,
)

MAGIC = b"KVB1"
MAJOR, MINOR = 1, 0

_PREFIX = struct.Struct("<4sBBHIIQIBBHQQ16s16s32s32s16s16sIIII")
PREFIX_BYTES = _PREFIX.size
_CHECKSUM = slice(24, 28)
_RANGE = 2**31

Buffer = bytes | bytearray | memoryview


class Clock(IntEnum):
    """What a lease deadline is counted on."""

    NONE = 0  # no lease: the reader holds its own copy
    MONOTONIC = 1  # CLOCK_MONOTONIC of one boot of one host, named by ``clock_id``
    WALL = 2  # ns since 1970-01-01 UTC; ``clock_id`` is zero


@dataclass(frozen=True, slots=True)
class Header:
    """What is said of the block set as a whole."""

    manifest_digest: bytes  # 32 bytes
    subject: Subject
    generation: int  # grows when the memory behind it is given to other tokens
    epoch: bytes  # 16 bytes, new at every start of the producer
    clock: Clock
    clock_id: bytes  # 16 bytes
    lease_deadline_ns: int  # 0 without a clock
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class Limits:
    """The most a reader takes; refused before anything of that size is touched."""

    rows: int = 1024
    payload_bytes: int = 4 * 2**30


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed record. ``payload`` is a read-only view of the caller's buffer, not a copy."""

    header: Header
    rows: tuple[Row, ...]
    payload: memoryview

    def row(self, index: int) -> memoryview:
        """The bytes of one row; a view."""
        row = self.rows[index]
        return self.payload[row.offset : row.offset + row.nbytes]

    def verify(self, rows: Iterable[int] | None = None) -> None:
        """Compare the digests of the given rows (all by default) with their bytes.

        Raises RecordError: ``row_digest`` for the first that differs, ``missing_digest`` when the record has none.
        """
        algorithm = self.header.algorithm
        if algorithm is Algorithm.NONE:
            raise RecordError(Code.MISSING_DIGEST, "algorithm", "none", "a digest for each row")
        for index in range(len(self.rows)) if rows is None else rows:
            found = row_digest(algorithm, self.row(index))
            if found != self.rows[index].digest:
                raise RecordError(Code.ROW_DIGEST, f"rows[{index}].digest", found, self.rows[index].digest)


def header_nbytes(rows: int) -> int:
    """Size of the header of a record with so many rows; a multiple of 64."""
    return PREFIX_BYTES + ROW_BYTES * rows


def encode_header(header: Header, rows: tuple[Row, ...]) -> bytes:
    """The bytes before the payload, ``header_nbytes(len(rows))`` long. Rows carry their digests already, see :func:`seal`.

    Raises RecordError for what :func:`parse` would refuse.
    """
    _check_header(header)
    size = header_nbytes(len(rows))
    check_rows(rows, header.subject.start, header.subject.valid_tokens, header.algorithm)
    subject = header.subject
    prefix = _PREFIX.pack(
        MAGIC, MAJOR, MINOR, 0, size, len(rows), payload_nbytes(rows), 0,
        header.algorithm, header.clock, 0, header.generation, header.lease_deadline_ns, header.epoch, header.clock_id,
        header.manifest_digest, subject.prefix_hash, subject.token_digest, subject.tenant_digest,
        subject.prefix_block_tokens, subject.start, subject.valid_tokens, 0,
    )  # fmt: skip
    whole = bytearray(prefix + encode_rows(rows))
    whole[_CHECKSUM] = zlib.crc32(whole).to_bytes(4, "little")
    return bytes(whole)


def seal(header: Header, rows: tuple[Row, ...], payload: bytearray | memoryview) -> bytes:
    """Header bytes for a payload that has been written: zeroes the padding in place and computes the rows' digests.

    ``payload`` is writable and ``payload_nbytes(rows)`` long; raises RecordError when it is not so long.
    """
    view = memoryview(payload).cast("B")
    _check_header(header)
    check_rows(rows, header.subject.start, header.subject.valid_tokens, header.algorithm)
    if len(view) != payload_nbytes(rows):
        raise RecordError(Code.PAYLOAD_TOO_LONG, "payload", f"{len(view)} bytes", f"{payload_nbytes(rows)} bytes")
    sealed = []
    for row in rows:
        end = row.offset + row.nbytes
        view[end : aligned(end)] = bytes(aligned(end) - end)
        sealed.append(replace(row, digest=row_digest(header.algorithm, view[row.offset : end])))
    return encode_header(header, tuple(sealed))


def seal_into(buffer: bytearray | memoryview, header: Header, rows: tuple[Row, ...]) -> None:
    """:func:`seal` for one buffer: the payload lies at ``header_nbytes(len(rows))``, the header is written before it."""
    view = memoryview(buffer).cast("B")
    at = header_nbytes(len(rows))
    view[:at] = seal(header, rows, view[at:])


def parse(buffer: Buffer, payload: Buffer | None = None, *, limits: Limits = DEFAULT_LIMITS) -> Record:
    """The record in ``buffer``, or whose header is ``buffer`` and whose payload is ``payload``. Digests are not verified.

    The header is copied before it is looked at, so a writer that shares the memory cannot change what was checked.
    Raises RecordError for anything not canonical: no length in it is trusted, and no byte may be missing or too many.
    """
    view = memoryview(buffer).cast("B")
    size = _header_size(bytes(view[:PREFIX_BYTES]), limits)
    data = bytes(view[:size])
    if len(data) < size:
        raise RecordError(Code.TRUNCATED, "header", f"{len(data)} bytes", f"{size} bytes")
    fields = _PREFIX.unpack_from(data)
    checksum = zlib.crc32(data[:24] + bytes(4) + data[28:])
    if checksum != fields[7] or _header_size(data, limits) != size:
        raise RecordError(Code.HEADER_CHECKSUM, "header_checksum", fields[7], checksum)
    (nbytes, _, algorithm, clock, zero, generation, deadline, epoch, clock_id) = fields[6:15]
    (manifest, prefix, tokens, tenant, prefix_block, start, valid, last) = fields[15:]
    if zero or last:
        raise RecordError(Code.RESERVED_NOT_ZERO, "reserved", zero or last, 0)
    if algorithm not in list(Algorithm):
        raise RecordError(Code.UNKNOWN_DIGEST, "algorithm", algorithm, "a known algorithm")
    if clock not in list(Clock):
        raise RecordError(Code.UNKNOWN_CLOCK, "clock", clock, "a known clock")
    subject = Subject(tenant, prefix, prefix_block, tokens, start, valid)
    header = Header(
        manifest, subject, generation, epoch, Clock(clock), clock_id, deadline, Algorithm(algorithm)
    )  # fmt: skip
    _check_header(header)
    rows = decode_rows(data[PREFIX_BYTES:])
    check_rows(rows, header.subject.start, header.subject.valid_tokens, header.algorithm)
    if nbytes != payload_nbytes(rows):
        raise RecordError(Code.ROW_OFFSET, "payload_len", nbytes, payload_nbytes(rows))
    if payload is not None and len(view) > size:
        raise RecordError(Code.TRAILING_BYTES, "header", f"{len(view)} bytes", f"{size} bytes")
    body = (view[size:] if payload is None else memoryview(payload).cast("B")).toreadonly()
    if len(body) != nbytes:
        code = Code.TRUNCATED if len(body) < nbytes else Code.TRAILING_BYTES
        raise RecordError(code, "payload", f"{len(body)} bytes", f"{nbytes} bytes")
    for index, row in enumerate(rows):
        end = row.offset + row.nbytes
        if end % ALIGNMENT and any(body[end : aligned(end)]):
            raise RecordError(Code.PADDING_NOT_ZERO, f"rows[{index}]", "padding", "zeros")
    return Record(header, rows, body)


def _header_size(data: bytes, limits: Limits) -> int:
    if len(data) < PREFIX_BYTES:
        raise RecordError(Code.TRUNCATED, "header", f"{len(data)} bytes", f"at least {PREFIX_BYTES} bytes")
    magic, major, minor, flags = _PREFIX.unpack_from(data)[:4]
    size, rows, payload = map(int, _PREFIX.unpack_from(data)[4:7])
    if magic != MAGIC:
        raise RecordError(Code.BAD_MAGIC, "magic", magic, MAGIC)
    if (major, minor) != (MAJOR, MINOR):
        raise RecordError(Code.RECORD_VERSION, "version", f"{major}.{minor}", f"{MAJOR}.{MINOR}")
    if flags:
        raise RecordError(Code.UNKNOWN_FLAGS, "flags", flags, 0)
    if not 1 <= rows <= limits.rows:
        raise RecordError(Code.TOO_MANY_ROWS, "rows", rows, f"1 to {limits.rows}")
    if payload > limits.payload_bytes:
        raise RecordError(Code.PAYLOAD_TOO_LONG, "payload_len", payload, f"at most {limits.payload_bytes}")
    if size != header_nbytes(rows):
        raise RecordError(Code.HEADER_LENGTH, "header_len", size, header_nbytes(rows))
    return size


def _check_header(header: Header) -> None:
    subject = header.subject
    sizes = {
        "manifest_digest": (header.manifest_digest, 32),
        "prefix_hash": (subject.prefix_hash, 32),
        "token_digest": (subject.token_digest, 16),
        "tenant_digest": (subject.tenant_digest, 16),
        "epoch": (header.epoch, 16),
        "clock_id": (header.clock_id, 16),
    }
    for field, (value, size) in sizes.items():
        if len(value) != size:
            raise RecordError(Code.HEADER_LENGTH, field, f"{len(value)} bytes", f"{size} bytes")
    for field in ("generation", "lease_deadline_ns"):
        if not 0 <= getattr(header, field) < 2**64:
            raise RecordError(Code.BAD_POSITIONS, field, getattr(header, field), "0..2**64-1")
    if not (subject.valid_tokens >= 1 and subject.start >= 0 and subject.start + subject.valid_tokens <= _RANGE):
        covered = f"{subject.start} + {subject.valid_tokens}"
        raise RecordError(Code.BAD_POSITIONS, "valid_tokens", covered, "1 or more tokens below position 2**31")
    if not 1 <= subject.prefix_block_tokens <= 2**16:
        raise RecordError(Code.BAD_POSITIONS, "prefix_block_tokens", subject.prefix_block_tokens, "1..65536")
    if header.clock is Clock.NONE and header.lease_deadline_ns:
        raise RecordError(Code.UNKNOWN_CLOCK, "lease_deadline_ns", header.lease_deadline_ns, "0 without a clock")
    if (header.clock is Clock.MONOTONIC) != any(header.clock_id):
        raise RecordError(Code.UNKNOWN_CLOCK, "clock_id", header.clock_id, "set exactly for the monotonic clock")
