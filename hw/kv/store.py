"""Bounded memory of block sets: staged, verified, published; leased to readers; the least recently used go first.

A block set lies in whole granules of one memory (private, or shared with readers in other processes). Two words a granule say
which generation starts there and how long it is; a reader that finds another generation than it was promised, before or
after reading, has read something else's bytes and knows it.
"""

import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hw.kv.integrity import check_books
from hw.kv.lease import Block, Lease, Staged
from hw.kv.memory import GRANULE, granules
from hw.kv.space import Space, longest
from hw.kv.transports.base import (
    BlockKey,
    Bytes,
    Expired,
    Fetched,
    Full,
    Limits,
    Missing,
    Ref,
    Stale,
    TooLarge,
    Unavailable,
    Verify,
)


class Memory(Protocol):
    """Where block sets lie."""

    data: memoryview  # writable bytes, page aligned, a multiple of GRANULE
    words: npt.NDArray[np.uint64]  # [granules, 2]: generation of the block that starts here (0 = none), its bytes

    def wipe(self, offset: int, nbytes: int) -> None:
        """Zero bytes."""
        ...

    def freed(self, offset: int) -> None:
        """The block that started here is gone; its room may be given out next."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Store:
    """Blocks by key in one memory. Safe to use from several threads."""

    def __init__(
        self, memory: Memory, limits: Limits | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.limits = limits or Limits()
        self.capacity = memory.data.nbytes
        self.counts: Counter[str] = Counter()
        self._memory = memory
        self._clock_ns = clock_ns
        self._space = Space(self.capacity // GRANULE)
        self._lock = threading.Lock()
        self._visible: OrderedDict[BlockKey, Block] = OrderedDict()  # least recently used first
        self._blocks: dict[int, Block] = {}  # by offset; also those replaced or dropped while leased
        self._staged: dict[int, Staged] = {}
        self._used: Counter[bytes] = Counter()  # granules by salt
        self._leases: dict[int, Block] = {}
        self._generation = 0
        self._closed = False

    # --- writing --------------------------------------------------------------------------------------------------

    def stage(self, nbytes: int, salt: bytes = b"") -> Staged:
        """Room for a block of ``nbytes`` of the tenant ``salt``; raises ``TooLarge``, or ``Full`` and nothing has changed.

        What others left in the memory is still in it: write every byte.
        """
        if nbytes < 1:
            raise ValueError(f"a block set has at least one byte, not {nbytes}")
        need = granules(nbytes)
        with self._lock:
            if self._closed:
                raise Unavailable("this store is closed")
            if nbytes > self.limits.block_bytes or need > self._space.total:
                self.counts["too_large"] += 1
                most = min(self.limits.block_bytes, self.capacity)
                raise TooLarge(f"a block set of {nbytes} bytes; this store takes at most {most}")
            start = self._make_room(need, salt)
            offset = start * GRANULE
            self._generation += 1
            staged = Staged(self, salt, offset, nbytes, self._generation, self._memory.data)
            self._used[salt] += need
            self._staged[offset] = staged
            return staged

    def publish(self, staged: Staged, key: BlockKey, verify: Verify | None = None) -> int:
        """Make staged bytes readable under ``key`` and return their generation, which no block had before.

        A block already there under that key is replaced: new readers see the new bytes, those that hold a lease keep theirs.
        If ``verify`` raises, the bytes are zeroed and the room is given back. ValueError, and nothing has changed, for a key
        of another tenant and while arrays over the bytes still live: they could write into a published block.
        """
        if key.salt != staged.salt:
            raise ValueError("the key has another salt than the bytes were staged for")
        if self._staged.get(staged.offset) is not staged or staged.discarded:
            raise ValueError("these bytes were published or discarded already")
        if staged.writable:
            raise ValueError("an array over the staged bytes is still alive; drop it before publishing")
        staged.memory = None
        if verify is not None:
            view = self._memory.data[staged.offset : staged.offset + staged.nbytes].toreadonly()
            try:
                verify(view)
            except BaseException:
                self.counts["refused_verify"] += 1
                self.discard(staged)
                raise
        with self._lock:
            del self._staged[staged.offset]
            self._hide(key, "replaced")
            block = Block(key, staged.offset, staged.nbytes, staged.generation)
            self._visible[key] = self._blocks[block.offset] = block
            words = self._memory.words[block.offset // GRANULE]
            words[1] = block.nbytes
            words[0] = block.generation  # last: from here on it can be read
            self.counts["published"] += 1
            return block.generation

    def discard(self, staged: Staged) -> None:
        """Zero staged bytes and free them. Nothing happens if they were published or discarded already.

        While arrays over them still live (in the traceback of what failed, say) the room is kept from everybody.
        """
        with self._lock:
            if self._staged.get(staged.offset) is staged and not staged.discarded:
                staged.discarded, staged.memory = True, None
                self.counts["discarded"] += 1
                self._take_back()

    def put(self, key: BlockKey, data: memoryview | Bytes, verify: Verify | None = None) -> int:
        """Stage, copy, publish; returns the generation."""
        source = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data.reshape(-1).view(np.uint8)
        with self.stage(source.nbytes, key.salt) as staged:
            np.copyto(staged.array, source)
            return self.publish(staged, key, verify)

    def drop(self, key: BlockKey) -> bool:
        """Forget a block; its room is free at once, or when its last lease ends. False if it was not there."""
        with self._lock:
            return self._hide(key, "dropped")

    # --- reading --------------------------------------------------------------------------------------------------

    def lease(self, key: BlockKey, lease_s: float | None = None) -> Lease:
        """Hold a block for ``lease_s`` seconds (at most ``lease_max_s``); raises ``Missing``, or ``Full`` of leases."""
        with self._lock:
            block = self._visible.get(key)
            if block is None:
                self.counts["misses"] += 1
                raise Missing("no such block in this store")
            if len(self._leases) >= self.limits.leases:
                self._reap()
                if len(self._leases) >= self.limits.leases:
                    self.counts["refused_leases"] += 1
                    raise Full(f"{len(self._leases)} leases are held, the most there may be", "refused_leases")
            self.counts["hits"] += 1
            self._visible.move_to_end(key)
            number = secrets.randbits(63)
            until = self._until(lease_s)
            block.leases[number] = until
            self._leases[number] = block
            return Lease(key, number, block.offset, block.nbytes, block.generation, until)

    def read(self, key: BlockKey, lease_s: float | None = None) -> Fetched:
        """A leased, read-only view of a block; raises as ``lease`` does."""
        lease = self.lease(key, lease_s)
        return self.view(lease, done=lambda: self.release(lease.number))

    def view(self, lease: Lease | Ref, done: Callable[[], None] | None = None) -> Fetched:
        """What a lease or a reference to this store stands for, whoever held it; counted and raised: ``Stale`` where other
        bytes are there now, ``Expired`` where they are still there but no longer promised."""
        with self._lock:
            self._check(lease.offset, lease.nbytes, lease.generation)
            block = self._blocks[lease.offset]
            if isinstance(lease, Ref) and (lease.manifest, lease.prefix) != (block.key.manifest, block.key.prefix):
                self.counts["foreign"] += 1
                raise Missing("the reference names another block than lies there")
            number = lease.lease if isinstance(lease, Ref) else lease.number
            if block.leases.get(number, 0) <= self._clock_ns():
                self.counts["lease_expired"] += 1
                raise Expired("this lease is over; ask for a new one")
            view = self._memory.data[block.offset : block.offset + block.nbytes]
        return Fetched(view, lambda: self.check(lease), done)

    def check(self, lease: Lease | Ref) -> None:
        """Raises ``Stale`` where the bytes of ``lease`` are no longer where they were."""
        with self._lock:
            self._check(lease.offset, lease.nbytes, lease.generation)

    def renew(self, number: int, lease_s: float | None = None) -> int:
        """Prolong a lease that is not over; its new deadline in ns. Raises ``Expired``."""
        with self._lock:
            block = self._leases.get(number)
            if block is None or block.leases[number] <= self._clock_ns():
                self.counts["lease_expired"] += 1
                raise Expired("this lease is over; ask for a new one")
            block.leases[number] = self._until(lease_s)
            return block.leases[number]

    def release(self, number: int) -> None:
        """End a lease. Unknown and ended ones are no error."""
        with self._lock:
            block = self._leases.pop(number, None)
            if block is not None:
                del block.leases[number]
                self._free_if_hidden(block)

    def reap(self) -> int:
        """End all leases whose time is over; how many. Also done whenever room is needed."""
        with self._lock:
            return self._reap()

    def __contains__(self, key: object) -> bool:
        return key in self._visible

    def __len__(self) -> int:
        return len(self._visible)

    # --- health ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counters by reason and gauges: blocks, leases, staged, bytes free and the part of them outside the longest run."""
        with self._lock:
            free, largest = self._space.free, self._space.largest
            gauges = {
                "blocks": len(self._visible),
                "leases": len(self._leases),
                "staged": len(self._staged),
                "free_bytes": free * GRANULE,
                "fragmentation": 1 - largest / free if free else 0.0,
            }
            return {**{name: float(count) for name, count in self.counts.items()}, **gauges}

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` where blocks overlap, room is lost, or words and leases disagree with the blocks."""
        with self._lock:
            check_books(
                self._space,
                self._memory.words,
                self._blocks,
                self._staged.values(),
                self._visible,
                self._leases,
                self._used,
            )

    def close(self) -> None:
        """Forget all blocks and give the memory back; readers in other processes find every reference stale."""
        with self._lock:
            self._closed = True
            self._memory.words[:, 0] = 0
            self._visible.clear()
            self._blocks.clear()
            self._staged.clear()
            self._leases.clear()
            self._used.clear()
            self._space = Space(self._space.total)
            self._memory.close()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _until(self, lease_s: float | None) -> int:
        seconds = self.limits.lease_s if lease_s is None else min(lease_s, self.limits.lease_max_s)
        return self._clock_ns() + int(seconds * 1e9)

    def _check(self, offset: int, nbytes: int, generation: int) -> None:
        block = self._blocks.get(offset)
        if block is None or block.generation != generation or block.nbytes != nbytes:
            self.counts["stale_generation"] += 1
            raise Stale("these bytes were given to another block; what was read is worthless")

    def _make_room(self, need: int, salt: bytes) -> int:
        """Start granule of ``need`` free ones, evicting as few of the least recently used blocks as order allows."""
        share = int(self.limits.tenant_share * self._space.total)
        start = self._space.take(need) if self._used[salt] + need <= share else None
        if start is not None:
            return start
        self._reap()
        self._take_back()
        idle = [block for block in self._visible.values() if not block.leases]
        own = [block for block in idle if block.key.salt == salt]
        if self._used[salt] - sum(len(block.granules) for block in own) + need > share:
            self.counts["refused_share"] += 1
            raise Full(f"the tenant would hold more than {self.limits.tenant_share:.0%} of the store", "refused_share")
        if longest([*self._space.runs, *((b.granules.start, len(b.granules)) for b in idle)]) < need:
            self.counts["refused_full"] += 1
            raise Full("what is not leased leaves no room for this block")
        while self._used[salt] + need > share:
            self._evict(own.pop(0))
        while (start := self._space.take(need)) is None:
            self._evict(next(block for block in self._visible.values() if not block.leases))
        return start

    def _evict(self, block: Block) -> None:
        self._hide(block.key, "evictions")

    def _hide(self, key: BlockKey, reason: str) -> bool:
        block = self._visible.pop(key, None)
        if block is None:
            return False
        self.counts[reason] += 1
        self._free_if_hidden(block)
        return True

    def _free_if_hidden(self, block: Block) -> None:
        if block.leases or self._visible.get(block.key) is block:
            return
        self._memory.words[block.offset // GRANULE, 0] = 0  # first: from here on readers know
        self._memory.freed(block.offset)
        del self._blocks[block.offset]
        self._give(block.offset, block.nbytes, block.key.salt)

    def _give(self, offset: int, nbytes: int, salt: bytes) -> None:
        count = granules(nbytes)
        self._space.give(offset // GRANULE, count)
        self._used[salt] -= count
        if not self._used[salt]:
            del self._used[salt]

    def _take_back(self) -> None:
        for staged in [staged for staged in self._staged.values() if staged.discarded and not staged.writable]:
            self._memory.wipe(staged.offset, staged.nbytes)
            del self._staged[staged.offset]
            self._give(staged.offset, staged.nbytes, staged.salt)

    def _reap(self) -> int:
        now = self._clock_ns()
        over = [number for number, block in self._leases.items() if block.leases[number] <= now]
        for number in over:
            block = self._leases.pop(number)
            del block.leases[number]
            self._free_if_hidden(block)
        self.counts["expired"] += len(over)
        return len(over)
