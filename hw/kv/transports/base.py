"""What every transport of block sets shares: the reference that travels in messages, the two ends, bounds and errors.

A block set is opaque here: ``nbytes`` bytes (header, rows, payload), known by the digest of its manifest and by its prefix
hash. The producer offers it and gets a ``Ref``; whoever is sent the ``Ref`` fetches the bytes until the lease ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Literal, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

Kind = Literal["shared_memory", "zeromq", "ray_objects", "device"]
Bytes = npt.NDArray[np.uint8]

DIGEST_BYTES = 32
MAX_SALT_BYTES = 64
MAX_REF_BYTES = 2048

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Every wait and bound of the store and of its transports. Times in seconds."""

    block_bytes: int = 256 << 20  # one block set; 8,192 tokens of a 1B draft in bfloat16
    tenant_share: float = 0.5  # of the memory; what one tenant fills up hurts no other
    lease_s: float = 2.0  # a copy takes milliseconds; a dead reader costs its block this long
    lease_max_s: float = 30.0  # longest anybody may ask for
    leases: int = 4096  # held at one time
    fetch_s: float = 0.25  # waiting for a block longer than this costs more than computing it
    chunk_bytes: int = 1 << 20  # of one ZeroMQ frame
    window: int = 8  # chunks asked for and not yet here: what one fetch may keep in a socket
    queue: int = 64  # messages waiting in one socket
    arenas: int = 16  # mappings of other processes' arenas kept by a reader
    heartbeat_s: float = 1.0  # ZeroMQ heartbeats; a peer silent for three of them is reconnected
    stop_s: float = 5.0  # a server thread that is told to end


class BlockError(Exception):
    """A block set could not be kept, offered or fetched. ``code`` is stable and is what gets counted."""

    code = "error"


class Missing(BlockError):
    """There is no such block (any more). Compute it."""

    code = "missing"


class Stale(BlockError):
    """The memory was given to another block since. What was read is worthless; compute it or ask for a new reference."""

    code = "stale_generation"


class Expired(BlockError):
    """The lease is over. Ask the producer for a new reference."""

    code = "lease_expired"


class Full(BlockError):
    """No room that is not leased (``refused_full``), or the tenant has its share (``refused_share``). Go on without."""

    def __init__(self, message: str, code: str = "refused_full") -> None:
        super().__init__(message)
        self.code = code


class TooLarge(BlockError):
    """Larger than ``Limits.block_bytes`` or than the memory."""

    code = "too_large"


class Malformed(BlockError):
    """A reference or message that no producer of ours wrote."""

    code = "malformed"


class Unreachable(BlockError):
    """The producer is gone, or its memory is on another machine."""

    code = "unreachable"


class Late(BlockError):
    """Not there by the deadline. Compute it."""

    code = "deadline"


class Unavailable(BlockError):
    """This machine or process lacks what the transport needs; the message names it."""

    code = "unavailable"


class IntegrityError(AssertionError):
    """The books of a store disagree with its memory: a bug."""


class BlockKey(msgspec.Struct, frozen=True):
    """What a block set is known by. ``salt`` separates tenants: equal contents under two salts are two blocks."""

    manifest: bytes  # SHA-256 of the manifest
    prefix: bytes  # hash of the last token covered
    salt: bytes = b""

    def __post_init__(self) -> None:
        if len(self.manifest) != DIGEST_BYTES or len(self.prefix) != DIGEST_BYTES:
            raise ValueError(f"manifest digest and prefix hash have {DIGEST_BYTES} bytes each")
        if len(self.salt) > MAX_SALT_BYTES:
            raise ValueError(f"a salt has at most {MAX_SALT_BYTES} bytes, not {len(self.salt)}; pass its digest")


class Ref(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a block set can be fetched, for how long, and what it is. Whoever holds it may read: ``lease`` is random."""

    kind: Kind
    handle: Annotated[str, msgspec.Meta(max_length=1024)]  # arena name, endpoint name or object id, as the kind wants
    offset: _Natural  # bytes into the producer's memory
    nbytes: _Natural
    generation: _Natural
    lease: _Natural
    lease_until_ns: _Natural  # CLOCK_MONOTONIC of the producer: comparable on its machine only
    manifest: _Digest
    prefix: _Digest

    def encode(self) -> bytes:
        """As msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Ref":
        """Strict inverse of ``encode``; raises ``Malformed``."""
        if len(data) > MAX_REF_BYTES:
            raise Malformed(f"a reference has at most {MAX_REF_BYTES} bytes, not {len(data)}")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise Malformed(f"not a reference: {error}") from error


Verify = Callable[[memoryview], Any]
"""Looks at the bytes of a block set and raises if they are not what they should be; what it returns is ignored."""


class Fetched:
    """A block set at the receiver: ``view``, read-only, good until released and only if ``check`` still passes then.

    As a context manager it checks and releases at the end, so that leaving the block without an error means that what was
    read inside it was whole.
    """

    def __init__(self, view: memoryview, check: Callable[[], None], done: Callable[[], None] | None = None) -> None:
        self.view = view.toreadonly()
        self._check = check
        self._done = done

    @property
    def array(self) -> Bytes:
        """The same bytes as an array, no copy."""
        return np.frombuffer(self.view, dtype=np.uint8)

    def check(self) -> None:
        """Raises ``Stale`` if the bytes may have changed since the fetch."""
        self._check()

    def copy_into(self, out: Bytes, start: int = 0) -> None:
        """Copy ``out.nbytes`` bytes from ``start`` and check; ``out`` (contiguous) is zeroed if they turn out stale."""
        if start < 0 or start + out.nbytes > self.view.nbytes:
            raise ValueError(f"bytes {start}..{start + out.nbytes} of a block set of {self.view.nbytes}")
        flat = out.reshape(-1).view(np.uint8)
        if not np.shares_memory(flat, out):
            raise ValueError("the destination must be contiguous")
        np.copyto(flat, self.array[start : start + out.nbytes])
        try:
            self._check()
        except BlockError:
            flat.fill(0)
            raise

    def release(self) -> None:
        """Give the view up. Idempotent; arrays over it may live on but must not be read."""
        done, self._done = self._done, None
        if done is not None:
            done()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._check()
        finally:
            self.release()


class Producer(Protocol):
    """The end that has the block sets."""

    kind: Kind

    def offer(self, key: BlockKey, data: memoryview, verify: Verify | None = None) -> Ref:
        """Keep a copy of ``data`` and lease it; raises ``Full``, ``TooLarge``, or what ``verify`` raises."""
        ...

    def refer(self, key: BlockKey, lease_s: float | None = None) -> Ref:
        """A new lease on a block that is there; raises ``Missing``."""
        ...

    def release(self, ref: Ref) -> None:
        """End a lease early. Unknown and ended ones are no error: releases cross with expiry."""
        ...

    def close(self) -> None:
        """Give all memory back; later fetches fail."""
        ...


class Consumer(Protocol):
    """The end that is sent references. Used by one thread."""

    kind: Kind

    def fetch(self, ref: Ref, deadline_s: float | None = None) -> Fetched:
        """The bytes of ``ref`` within ``deadline_s`` seconds; raises a ``BlockError``."""
        ...

    def close(self) -> None:
        """Forget all producers."""
        ...
