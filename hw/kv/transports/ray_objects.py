"""Block sets in Ray's object store: one object each, kept by the producer for as long as the block is leased or cached.

Objects cannot be changed, so nothing is ever torn; what goes stale is their existence. References travel in our own messages,
not as Ray arguments, so what Ray needs to find an object (its id and its owner's address) is their handle. Ray itself takes
objects whose reference left that way to be needed for ever and never frees them; here it is not told, and the lease counts.
"""

import base64
import hashlib
import mmap
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from hw.kv.memory import GRANULE, granules
from hw.kv.store import Store
from hw.kv.transports.base import (
    BlockError,
    BlockKey,
    Bytes,
    Fetched,
    Kind,
    Late,
    Limits,
    Malformed,
    Missing,
    Ref,
    TooLarge,
    Unavailable,
    Verify,
)

_CHECKSUM_BYTES = 8
_OBJECT_ID_BYTES = 28
_WORKER_ID_BYTES = 28  # and those of a node
_NIL = b"\xff" * _WORKER_ID_BYTES


def _connected() -> Any:
    """Ray's worker; raises ``Unavailable``."""
    try:
        import ray
    except ImportError as error:
        raise Unavailable("Ray is not installed here; use another transport") from error
    if not ray.is_initialized():
        raise Unavailable("this process is not connected to Ray; call ray.init first or use another transport")
    return ray._private.worker.global_worker


def _handle(reference: Any) -> str:
    """Id and owner of an object as text."""
    _, owner, _ = _connected().core_worker.serialize_object_ref(reference)
    data = reference.binary() + owner
    return base64.b85encode(data + _checksum(data)).decode()


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2s(data, digest_size=_CHECKSUM_BYTES).digest()


def _check_owner(address: bytes) -> None:
    """Raises ``Malformed`` for what Ray would end the process over instead of raising."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from ray.core.generated.common_pb2 import Address

    try:
        owner = Address.FromString(address)
    except DecodeError as error:
        raise Malformed("the handle names no owner") from error
    ids = (owner.node_id, owner.worker_id)
    if any(len(part) != _WORKER_ID_BYTES or part in (_NIL, bytes(_WORKER_ID_BYTES)) for part in ids):
        raise Malformed("the handle names no owner")
    if not owner.ip_address or not 0 < owner.port < 1 << 16:
        raise Malformed("the handle names no owner")


def _reference(handle: str) -> Any:
    """Ray's reference for a handle; raises ``Malformed``."""
    worker = _connected()
    import ray

    try:
        whole = base64.b85decode(handle)
    except ValueError as error:
        raise Malformed("the handle is not that of a Ray object") from error
    # Ray remembers the first owner it is told of for an object: a damaged handle would spoil the good ones after it
    data = whole[:-_CHECKSUM_BYTES]
    if len(data) <= _OBJECT_ID_BYTES or whole[-_CHECKSUM_BYTES:] != _checksum(data):
        raise Malformed("the handle is not that of a Ray object")
    _check_owner(data[_OBJECT_ID_BYTES:])
    reference = ray.ObjectRef(data[:_OBJECT_ID_BYTES])
    worker.core_worker.deserialize_and_register_object_ref(
        data[:_OBJECT_ID_BYTES], ray.ObjectRef.nil(), data[_OBJECT_ID_BYTES:], b""
    )
    return reference


class _Objects:
    """The ``Memory`` of a store whose blocks are Ray objects: room is only counted, never touched."""

    def __init__(self, nbytes: int) -> None:
        count = granules(nbytes)
        self.data = memoryview(mmap.mmap(-1, count * GRANULE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.words: npt.NDArray[np.uint64] = np.zeros((count, 2), np.uint64)
        self.objects: dict[int, Any] = {}  # by offset

    def wipe(self, offset: int, nbytes: int) -> None:
        """There is nothing to zero."""

    def freed(self, offset: int) -> None:
        """Ray may free the object once nobody reads it."""
        self.objects.pop(offset, None)

    def close(self) -> None:
        """Let go of all objects."""
        self.objects.clear()


class RayProducer:
    """Offers block sets as Ray objects, ``nbytes`` of them at most; the least recently used go first."""

    kind: Kind = "ray_objects"

    def __init__(self, nbytes: int, limits: Limits | None = None) -> None:
        _connected()
        self._objects = _Objects(nbytes)
        self.store = Store(self._objects, limits)  # the books only: its views show nothing

    def offer(self, key: BlockKey, data: memoryview | Bytes, verify: Verify | None = None) -> Ref:
        """Copy ``data`` into the object store and lease it; raises ``Full``, ``TooLarge``, or what ``verify`` raises."""
        import ray

        _connected()
        source = np.frombuffer(data, np.uint8)
        if verify is not None:
            verify(source.data.toreadonly())
        with self.store.stage(source.nbytes, key.salt) as staged:
            self._objects.objects[staged.offset] = ray.put(source)
            self.store.publish(staged, key)
        return self.refer(key)

    def refer(self, key: BlockKey, lease_s: float | None = None) -> Ref:
        """A new lease on a block that is there; raises ``Missing``."""
        lease = self.store.lease(key, lease_s)
        return lease.ref(self.kind, _handle(self._objects.objects[lease.offset]))

    def release(self, ref: Ref) -> None:
        """End a lease early. Unknown and ended ones are no error."""
        self.store.release(ref.lease)

    def close(self) -> None:
        """Let Ray free everything."""
        self.store.close()


class RayReader:
    """Fetches Ray objects; without a copy where they are on this node already."""

    kind: Kind = "ray_objects"

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()

    def fetch(self, ref: Ref, deadline_s: float | None = None) -> Fetched:
        """A read-only view of the object, which stays whatever its producer does; counted by code.

        Raises ``Missing`` where Ray knows that it is gone, ``Late`` where it does not come in time, ``Malformed``, ``TooLarge``.
        """
        try:
            array = self._get(ref, self.limits.fetch_s if deadline_s is None else deadline_s)
        except BlockError as error:
            self.counts[error.code] += 1
            raise
        self.counts["hits"] += 1
        return Fetched(array.data, lambda: None)

    def _get(self, ref: Ref, deadline_s: float) -> Bytes:
        if ref.kind != self.kind:
            raise Malformed("not a reference to a Ray object")
        if ref.nbytes > self.limits.block_bytes:
            raise TooLarge(f"a block set of {ref.nbytes} bytes; at most {self.limits.block_bytes} are taken")
        reference = _reference(ref.handle)
        import ray

        try:
            array = ray.get(reference, timeout=deadline_s)
        except ray.exceptions.GetTimeoutError as error:
            raise Late("the object did not come by the deadline") from error
        except ray.exceptions.RayError as error:
            raise Missing(f"the object is gone ({type(error).__name__})") from error
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != (ref.nbytes,):
            raise Malformed("the object is not the block set that the reference names")
        return array

    def close(self) -> None:
        """Nothing is kept."""
