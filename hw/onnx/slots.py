"""Preallocated KV: which slots are taken, and the memory behind them.

A slot is one row of every layer's buffer ``[slots, kv_heads, context, head_dim]``. A batched step binds consecutive rows,
so live slots are kept at low indices: the lowest free slot is given out first, and a slot can be moved.
"""

import heapq
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_STREAM_BYTES = 8 * 2**20  # of a slot: from here on stores past the caches are faster, 1.6 times at 24 MB


class SlotTable:
    """Which of ``slots`` slots are taken. Gives out the lowest free one."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, not {slots}")
        self.slots = slots
        self._free = list(range(slots))  # a heap; sorted lists are heaps
        self._taken: set[int] = set()

    @property
    def taken(self) -> frozenset[int]:
        """The slots in use."""
        return frozenset(self._taken)

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self) -> int | None:
        """The lowest free slot, now taken; None when all are."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """Free a taken slot; raises KeyError for one that is not taken."""
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    def claim(self, slot: int) -> None:
        """Take one slot out of turn; raises ValueError for one that is not free."""
        self._free.remove(slot)
        heapq.heapify(self._free)
        self._taken.add(slot)


class KVBuffer:
    """Keys and values of all slots and layers in one mapping, page aligned, committed by the system as it is touched.

    ``array``: ``[2 * layers, slots, kv_heads, context, head_dim]``; row ``2 * l`` holds layer ``l``'s keys, ``2 * l + 1`` its
    values. What lies past a sequence's length is never read, so nothing is cleared when a slot changes hands.
    """

    def __init__(
        self, layers: int, slots: int, kv_heads: int, context: int, head_dim: int, dtype: npt.DTypeLike = np.float32
    ) -> None:
        shape = (2 * layers, slots, kv_heads, context, head_dim)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array: npt.NDArray[np.floating] = np.frombuffer(self._memory, dtype=dtype).reshape(shape)
        self.nbytes = size
        if size >= _STREAM_BYTES and self.array.dtype == np.float32:
            from hw.onnx import widen  # compiled here, not in a step; small buffers never need it

            self._widen: Any = widen
        else:
            self._widen = None

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy positions ``[start, length)`` of one slot over another's, all layers."""
        self.array[:, target, :, start:length] = self.array[:, source, :, start:length]

    def write(self, slot: int, start: int, kv: npt.NDArray[Any]) -> None:
        """Copy ``kv`` ``[2 * layers, kv_heads, positions, head_dim]`` over a slot's positions from ``start`` on, converting.

        Raises ValueError when it has another shape or would pass the context.
        """
        place = self.array[:, slot, :, start : start + kv.shape[2]] if kv.ndim == 4 and start >= 0 else None
        if place is None or place.shape != kv.shape:
            raise ValueError(f"KV of shape {kv.shape} at {start} does not fit slots of {self.array.shape}")
        if self._widen is not None and place.nbytes >= _STREAM_BYTES and self._widen.fits(kv, place):
            self._widen.widen(kv, place)
        else:
            np.copyto(place, kv, casting="unsafe")

    def first(self, slot: int) -> npt.NDArray[np.floating]:
        """A copy of position 0 of a slot, ``[2 * layers, kv_heads, head_dim]``."""
        return self.array[:, slot, :, 0].copy()

    def restore_first(self, slot: int, saved: npt.NDArray[np.floating]) -> None:
        """Undo what a step wrote at position 0 of a slot."""
        self.array[:, slot, :, 0] = saved


def runs(slots: list[int], largest_gap: int) -> list[tuple[int, int]]:
    """Cover ascending ``slots`` by half-open ranges, bridging at most ``largest_gap`` unlisted slots between two."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and slot - found[-1][1] <= largest_gap:
            found[-1] = (found[-1][0], slot + 1)
        else:
            found.append((slot, slot + 1))
    return found
