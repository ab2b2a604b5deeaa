"""Rows of float32 in a file, mapped into memory."""

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deployments.evidence.log import write_all

Floats = npt.NDArray[np.float32]

_GROW_ROWS = 4_096  # the file grows by so many rows at once; what is not written yet takes no room on the disk


class Matrix:
    """``[capacity, dimensions]``, little-endian, of which the first ``end`` rows are in use. One thread writes."""

    def __init__(self, path: Path, dimensions: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._dimensions = dimensions
        self.row_bytes = 4 * dimensions
        self.end = 0  # set by whoever knows which rows mean something
        self._view = self._map()

    def _map(self) -> Floats:
        capacity = os.fstat(self._file).st_size // self.row_bytes
        if not capacity:
            return np.empty((0, self._dimensions), np.float32)
        mapped = mmap.mmap(
            self._file, capacity * self.row_bytes, prot=mmap.PROT_READ
        )  # lives as long as arrays over it
        return np.frombuffer(mapped, "<f4").reshape(capacity, self._dimensions)

    def rows(self, first: int, count: int) -> Floats:
        """Rows of the mapped file; fewer than asked for where it is shorter."""
        return self._view[first : first + count]

    def view(self) -> Floats:
        """All rows in use."""
        return self._view[: self.end]

    def write(self, first: int, vectors: Floats, sync: bool = True) -> None:
        """Store rows; with ``sync`` they are on the disk when this returns. ``end`` stays."""
        if not len(vectors):
            return
        needed = first + len(vectors)
        if needed > len(self._view):
            capacity = -(-needed // _GROW_ROWS) * _GROW_ROWS
            os.ftruncate(self._file, capacity * self.row_bytes)
            self._view = self._map()
        write_all(self._file, np.ascontiguousarray(vectors, "<f4").tobytes(), first * self.row_bytes)
        if sync:
            self.sync()

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)
