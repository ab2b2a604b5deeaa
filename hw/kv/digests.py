"""The two kinds of hashes of the KV plane: digests of payload rows, and tagged SHA-256 over parts."""

import hashlib
import struct
from enum import IntEnum

from blake3 import blake3

DIGEST_BYTES = 16


class Algorithm(IntEnum):
    """How the rows of a record are digested; the numbers are part of the format."""

    NONE = 0  # no digests: same host and a generation to check, and only where the reader's policy says so
    BLAKE3 = 1  # first 16 bytes of BLAKE3-256: no collisions on purpose either, at 0.4 of the speed of memcpy


def row_digest(algorithm: Algorithm, data: bytes | bytearray | memoryview) -> bytes:
    """Digest of one row's bytes, 16 bytes; zeros for ``NONE``. On the calling thread only."""
    if algorithm is Algorithm.NONE:
        return bytes(DIGEST_BYTES)
    return blake3(data, max_threads=1).digest(DIGEST_BYTES)


def tagged(tag: bytes, *parts: bytes) -> bytes:
    """SHA-256 (32 bytes) over the tag and the parts, each preceded by its length as little-endian u32.

    Lengths make the parts unambiguous, and a tag for each use keeps equal parts of different uses apart.
    """
    found = hashlib.sha256()
    for part in (tag, *parts):
        found.update(struct.pack("<I", len(part)))
        found.update(part)
    return found.digest()
