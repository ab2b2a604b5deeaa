"""The producer's end over a store: what it keeps can be referred to from elsewhere."""

from hw.kv.lease import Lease
from hw.kv.store import Store
from hw.kv.transports.base import BlockKey, Bytes, Kind, Ref, Verify


class StoreProducer:
    """Offers what is in ``store`` under references of one kind. ``store`` is also there to stage bytes in place: a block
    written there and published is offered by ``refer`` without having been copied."""

    def __init__(self, store: Store, kind: Kind, handle: str) -> None:
        self.store = store
        self.kind = kind
        self.handle = handle

    def offer(self, key: BlockKey, data: memoryview | Bytes, verify: Verify | None = None) -> Ref:
        """Keep a copy of ``data`` and lease it; raises ``Full``, ``TooLarge``, or what ``verify`` raises."""
        self.store.put(key, data, verify)
        return self.refer(key)

    def refer(self, key: BlockKey, lease_s: float | None = None) -> Ref:
        """A new lease on a block that is there; raises ``Missing``."""
        return self._ref(self.store.lease(key, lease_s))

    def release(self, ref: Ref) -> None:
        """End a lease early. Unknown and ended ones are no error: releases cross with expiry."""
        self.store.release(ref.lease)

    def close(self) -> None:
        """Give all memory back; later fetches fail."""
        self.store.close()

    def _ref(self, lease: Lease) -> Ref:
        return lease.ref(self.kind, self.handle)
