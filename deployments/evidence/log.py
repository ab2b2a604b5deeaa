"""An append-only file of records, each with its length and checksum.

::

    magic 4 bytes | length u32 | crc32 u32, of the payload | payload (MessagePack)      little-endian

A process that is killed while it appends leaves the beginning of a record behind. Opening the file cuts that off: every record
before it is whole.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

MAGIC = b"CDX1"
HEADER = struct.Struct("<4sII")
MAX_PAYLOAD = 64 * 1024 * 1024  # bytes; a larger length is no length


class Put(msgspec.Struct, frozen=True, tag="put", array_like=True):
    """A key has this value and these rows from now on."""

    key: str
    group: str
    value: bytes
    first: int  # row in the matrix
    rows: int
    vectors_crc: int  # crc32 of those rows as they lie in the file


class Delete(msgspec.Struct, frozen=True, tag="delete", array_like=True):
    """A key is gone from now on."""

    key: str


Record = Put | Delete

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Put | Delete)


class Log:
    """The file, open for appending. One thread writes; reading is free."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._file).st_size
        self.cut = 0  # bytes of a damaged tail that opening removed

    def replay(self) -> Iterator[tuple[Record, int, int]]:
        """Every whole record, its offset and its bytes, in order; what follows the last one is then cut off."""
        at = 0
        while (found := self._at(at)) is not None:
            record, size = found
            yield record, at, size
            at += size
        self.cut = self.size - at
        if self.cut:
            os.ftruncate(self._file, at)
            os.fsync(self._file)
            self.size = at

    def _at(self, offset: int) -> tuple[Record, int] | None:
        """The record at an offset and its bytes; None where there is no whole one."""
        header = os.pread(self._file, HEADER.size, offset)
        if len(header) < HEADER.size:
            return None
        magic, length, crc = HEADER.unpack(header)
        if magic != MAGIC or length > MAX_PAYLOAD:
            return None
        payload = os.pread(self._file, length, offset + HEADER.size)
        if len(payload) < length or zlib.crc32(payload) != crc:
            return None
        try:
            return _decoder.decode(payload), HEADER.size + length
        except msgspec.DecodeError:
            return None

    def read(self, offset: int) -> Record | None:
        """The record at an offset of :meth:`replay` or :meth:`append`; None where the file was damaged since."""
        found = self._at(offset)
        return found[0] if found is not None else None

    def append(self, record: Record, sync: bool = True) -> int:
        """Write a record at the end and return its offset; with ``sync`` it is on the disk when this returns.

        Raises:
            ValueError: the record is larger than ``MAX_PAYLOAD``.
            OSError: it could not be written; the file is as before.
        """
        payload = _encoder.encode(record)
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(f"{len(payload)} bytes in one record; at most {MAX_PAYLOAD} are possible")
        offset = self.size
        try:
            write_all(self._file, HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload, offset)
            if sync:
                self.sync()
        except OSError:
            os.ftruncate(self._file, offset)
            raise
        self.size = offset + HEADER.size + len(payload)
        return offset

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def write_all(file: int, content: bytes | memoryview, offset: int) -> None:
    """Write everything at an offset; the system may take several calls for it."""
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
