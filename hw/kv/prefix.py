"""Names for token prefixes: a chain of SHA-256, the same in every process, on every machine and in every language.

The chain starts at a root made of an explicit seed string, the tenant's salt, the adapter and the block size, and goes on
block by block of tokens. Blocks here are a granularity of naming, ``HASH_BLOCK_TOKENS`` for everybody; they have nothing
to do with how many tokens an engine keeps in a block of its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hw.kv.digests import tagged

SEED = b"chain-of-draft/kv/prefix/1"
HASH_BLOCK_TOKENS = 16

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


class PrefixError(ValueError):
    """Tokens that are no token ids, or a block size that is none."""


class PrefixChain:
    """The hashes of one growing sequence. ``hashes[i]`` names its first ``i + 1`` whole blocks."""

    def __init__(self, block_tokens: int = HASH_BLOCK_TOKENS, *, salt: bytes, adapter: str) -> None:
        if not 1 <= block_tokens <= 2**16:
            raise PrefixError(f"block_tokens must be in 1..65536, not {block_tokens}")
        self.block_tokens = block_tokens
        self.hashes: list[bytes] = []
        self._root = tagged(b"prefix.root", SEED, salt, adapter.encode(), block_tokens.to_bytes(4, "little"))
        self._tail = b""  # tokens after the last whole block, little-endian i32

    def __len__(self) -> int:
        """How many tokens it names."""
        return len(self.hashes) * self.block_tokens + len(self._tail) // 4

    def extend(self, tokens: Tokens) -> None:
        """Append tokens. Raises PrefixError, leaving the chain as it was, for one outside 0..2**31-1."""
        data = self._tail + _packed(tokens)
        size = 4 * self.block_tokens
        whole = len(data) - len(data) % size
        parent = self.hashes[-1] if self.hashes else self._root
        for at in range(0, whole, size):
            parent = tagged(b"prefix.block", parent, data[at : at + size])
            self.hashes.append(parent)
        self._tail = data[whole:]

    def hash(self) -> bytes:
        """Name of the whole sequence, 32 bytes. A partial last block has a tag of its own."""
        parent = self.hashes[-1] if self.hashes else self._root
        return tagged(b"prefix.tail", parent, self._tail) if self._tail else parent


def block_hashes(
    tokens: Tokens, block_tokens: int = HASH_BLOCK_TOKENS, *, salt: bytes, adapter: str
) -> list[bytes]:  # fmt: skip
    """The name (32 bytes) of the prefix that ends with each whole block of ``tokens``.

    ``salt`` is the tenant's secret bytes, ``adapter`` the hex digest in the manifest's identity ("" for none). Raises
    PrefixError for a token outside 0..2**31-1.
    """
    chain = PrefixChain(block_tokens, salt=salt, adapter=adapter)
    chain.extend(tokens)
    return chain.hashes


def prefix_hash(tokens: Tokens, block_tokens: int = HASH_BLOCK_TOKENS, *, salt: bytes, adapter: str) -> bytes:
    """The name (32 bytes) of exactly ``tokens``, whole blocks or not; see :func:`block_hashes`."""
    chain = PrefixChain(block_tokens, salt=salt, adapter=adapter)
    chain.extend(tokens)
    return chain.hash()


def token_digest(tokens: Tokens, *, salt: bytes) -> bytes:
    """Digest (16 bytes) of a record's own tokens. Salted: whoever sees it learns nothing across tenants."""
    return tagged(b"tokens", salt, _packed(tokens))[:16]


def tenant_digest(salt: bytes) -> bytes:
    """Digest (16 bytes) of a tenant's salt: tells tenants apart without the salt."""
    return tagged(b"tenant", salt)[:16]


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose tokens, and which: what a record says and what a receiver asks for, built from the same facts by both."""

    tenant_digest: bytes  # 16 bytes
    prefix_hash: bytes  # 32 bytes, of all tokens up to and with the last one covered
    prefix_block_tokens: int
    token_digest: bytes  # 16 bytes, of the tokens covered
    start: int  # position of the first token covered
    valid_tokens: int

    @classmethod
    def of(
        cls, tokens: Tokens, start: int = 0, *, salt: bytes, adapter: str, block_tokens: int = HASH_BLOCK_TOKENS
    ) -> Self:
        """The subject of positions ``[start, len(tokens))`` of a sequence whose tokens up to there are ``tokens``.

        Raises PrefixError for bad tokens or an empty range.
        """
        if not 0 <= start < len(tokens):
            raise PrefixError(f"start must be in 0..{len(tokens) - 1}, not {start}")
        return cls(
            tenant_digest(salt),
            prefix_hash(tokens, block_tokens, salt=salt, adapter=adapter),
            block_tokens,
            token_digest(tokens[start:], salt=salt),
            start,
            len(tokens) - start,
        )


def _packed(tokens: Tokens) -> bytes:
    try:
        array = np.asarray(tokens, dtype=np.int64) if len(tokens) else np.empty(0, np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise PrefixError(f"tokens must be token ids: {error}") from None
    if array.ndim != 1 or (array.size and not (array.min() >= 0 and array.max() < 2**31)):
        raise PrefixError("tokens must be a flat sequence of ids in 0..2**31-1")
    return array.astype("<i4").tobytes()
