"""Block sets in a file: one manifest and the records made under it, for what outlives both engines or goes to another place.

A head of 64 bytes, the manifest, padding to a multiple of 64, then the records one after another to the end of the file.
Every part is checked on the way in, and nothing is skipped; field table: ``docs/kv_block_format.md``. A file is a copy, so
a lease in one of its records says nothing about it.
"""

import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hw.kv.codes import Code, Refused
from hw.kv.manifest import MAX_BYTES, Manifest
from hw.kv.record import DEFAULT_LIMITS, PREFIX_BYTES, Buffer, Limits, Record, encode_header, header_nbytes, parse
from hw.kv.rows import aligned

MAGIC = b"KVF1"
MAJOR, MINOR = 1, 0

_HEAD = struct.Struct("<4sBBHIIQQ32s")
HEAD_BYTES = _HEAD.size
_CHECKSUM = slice(12, 16)
_LENGTHS = struct.Struct("<8xI4xQ")  # of a record: header_len, payload_len


class ContainerError(Refused):
    """Bytes that are no such file, or records that do not belong to its manifest. The file was not made or used."""


@dataclass(frozen=True, slots=True)
class Container:
    """What a file holds. The records' payloads are views of the bytes it was parsed from."""

    manifest: Manifest
    records: tuple[Record, ...]


def pieces(manifest: Manifest, records: Sequence[Record]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, piece by piece; payloads are not copied.

    Raises ContainerError, before the first piece, without records and for one of another manifest.
    """
    digest, encoded = manifest.digest(), manifest.encode()
    if not records:
        raise ContainerError(Code.TRUNCATED, "file.records", 0, "at least 1")
    size = HEAD_BYTES + aligned(len(encoded))
    for index, record in enumerate(records):
        if record.header.manifest_digest != digest:
            raise ContainerError(Code.MANIFEST_DIGEST, f"records[{index}]", record.header.manifest_digest, digest)
        size += header_nbytes(len(record.rows)) + len(record.payload)
    head = bytearray(_HEAD.pack(MAGIC, MAJOR, MINOR, 0, len(encoded), 0, size, 0, digest))
    head[_CHECKSUM] = zlib.crc32(head).to_bytes(4, "little")
    yield bytes(head)
    yield encoded + bytes(aligned(len(encoded)) - len(encoded))
    for record in records:
        yield encode_header(record.header, record.rows)
        yield record.payload


def parse_container(data: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> Container:
    """The file in ``data``. Row digests are not verified: ``Record.verify`` does that.

    Raises ContainerError, ManifestError or RecordError for anything but what :func:`pieces` gives; ``limits`` hold for each
    record.
    """
    view = memoryview(data).cast("B").toreadonly()
    length, digest = _check_head(bytes(view[:HEAD_BYTES]), len(view))
    size = len(view)
    at = HEAD_BYTES + aligned(length)
    if at + PREFIX_BYTES > size:
        raise ContainerError(Code.TRUNCATED, "file", f"{size} bytes", "a manifest and at least one record")
    manifest = Manifest.decode(view[HEAD_BYTES : HEAD_BYTES + length])
    if manifest.digest() != digest:
        raise ContainerError(Code.MANIFEST_DIGEST, "file.manifest_digest", digest, manifest.digest())
    if any(view[HEAD_BYTES + length : at]):
        raise ContainerError(Code.PADDING_NOT_ZERO, "file.manifest", "padding", "zeros")
    records: list[Record] = []
    while at < size:
        end = at + sum(_LENGTHS.unpack_from(view, at)) if at + PREFIX_BYTES <= size else size
        # Whatever the lengths claim: a record that is not exactly so long, or not all there, is refused.
        record = parse(view[at:end], limits=limits)
        if record.header.manifest_digest != digest:
            got = record.header.manifest_digest
            raise ContainerError(Code.MANIFEST_DIGEST, f"records[{len(records)}]", got, digest)
        records.append(record)
        at = end
    return Container(manifest, tuple(records))


def write_file(path: Path, manifest: Manifest, records: Sequence[Record]) -> int:
    """Write a file, replacing one that is there only once all of it is on disk; how many bytes. Raises ContainerError, OSError."""
    parts = pieces(manifest, records)
    first = next(parts)  # what is refused is refused before there is a file
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            size = file.write(first) + sum(file.write(part) for part in parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return size


def read_file(path: Path, *, limits: Limits = DEFAULT_LIMITS) -> Container:
    """Read a file into memory, where nobody changes it any more, and parse it. Raises as ``parse_container``, and OSError.

    A file that does not begin as one of these, or is not as long as it says, is not read on.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        _check_head(head, os.fstat(file.fileno()).st_size)
        return parse_container(head + file.read(), limits=limits)


def _check_head(head: bytes, nbytes: int) -> tuple[int, bytes]:
    """Length and digest of the manifest, as the head of a file of ``nbytes`` has them."""
    if len(head) < HEAD_BYTES:
        raise ContainerError(Code.TRUNCATED, "file.head", f"{len(head)} bytes", f"{HEAD_BYTES} bytes")
    magic, major, minor, flags, length, checksum, size, reserved, digest = _HEAD.unpack(head)
    if magic != MAGIC:
        raise ContainerError(Code.BAD_MAGIC, "file.magic", magic, MAGIC)
    if (major, minor) != (MAJOR, MINOR):
        raise ContainerError(Code.RECORD_VERSION, "file.version", f"{major}.{minor}", f"{MAJOR}.{MINOR}")
    if flags:
        raise ContainerError(Code.UNKNOWN_FLAGS, "file.flags", flags, 0)
    found = zlib.crc32(head[:12] + bytes(4) + head[16:])
    if checksum != found:
        raise ContainerError(Code.HEADER_CHECKSUM, "file.checksum", checksum, found)
    if reserved:
        raise ContainerError(Code.RESERVED_NOT_ZERO, "file.reserved", reserved, 0)
    if length > MAX_BYTES:
        raise ContainerError(Code.MANIFEST_TOO_LONG, "file.manifest_len", length, f"at most {MAX_BYTES}")
    if nbytes != size:
        code = Code.TRUNCATED if nbytes < size else Code.TRAILING_BYTES
        raise ContainerError(code, "file", f"{nbytes} bytes", f"{size} bytes")
    return length, digest
