"""Granules and the memory of a store that is shared with nobody."""

import mmap

import numpy as np
import numpy.typing as npt

GRANULE = 4096  # bytes; a page, so that blocks are aligned for every device and instruction


def granules(nbytes: int) -> int:
    """Granules that hold ``nbytes``."""
    return -(-nbytes // GRANULE)


class PrivateMemory:
    """``nbytes`` (rounded up to granules) of anonymous memory, committed as it is touched."""

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"at least one byte of memory, not {nbytes}")
        count = granules(nbytes)
        self._map = mmap.mmap(-1, count * GRANULE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = memoryview(self._map)
        self.words: npt.NDArray[np.uint64] = np.zeros((count, 2), np.uint64)

    def wipe(self, offset: int, nbytes: int) -> None:
        """Zero bytes."""
        np.frombuffer(self.data, np.uint8, nbytes, offset).fill(0)

    def freed(self, offset: int) -> None:
        """The block that started here is gone."""

    def close(self) -> None:
        """Drop the reference; the pages go when the last view over them does."""
        self.data = memoryview(b"")
