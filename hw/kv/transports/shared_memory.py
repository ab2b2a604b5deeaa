"""Block sets in shared memory: one arena file per producer, mapped read-only by every reader on the machine.

Layout of an arena, little-endian: one page of header, the words of every granule (``[granules, 2]`` u64: generation, bytes),
padded to a page, then the granules. A generation of 0 means that nothing readable starts there; it is set last when a block
is published and cleared first when its room is freed, so a reader that finds the generation it was promised before and after
reading has read one whole block. Loads and stores keep that order on x86; elsewhere the lease, which the producer honours, and
the digests of the record are what a reader has.

The producer holds ``flock`` on its arena for life. The system lets go of it however the process ends, and unlike a process id
it means the same in two containers that share ``/dev/shm``: an arena whose lock is free belongs to nobody and is removed.
"""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hw.kv.memory import GRANULE, granules
from hw.kv.transports.base import (
    Expired,
    Fetched,
    Kind,
    Limits,
    Malformed,
    Ref,
    Stale,
    Unavailable,
    Unreachable,
)

FOLDER = Path("/dev/shm")  # noqa: S108 - the names in it are random, the files private
PREFIX = "chain-kv-"
MAGIC = b"CHKVARN1"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{32}")
_HEADER = struct.Struct("<8sIIQQ")  # magic, bytes of a granule, 0, granules, process id (for people)
_WORD_BYTES = 16
_WORDS_AT = GRANULE
_POPULATE_READ = 22  # MADV_POPULATE_READ; mmap has no name for it


def _data_at(count: int) -> int:
    return _WORDS_AT + granules(count * _WORD_BYTES) * GRANULE


def _words(mapped: mmap.mmap, count: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(mapped, np.dtype("<u8"), 2 * count, _WORDS_AT).reshape(count, 2)


def clean_stale(folder: Path = FOLDER) -> int:
    """Remove the arenas of producers that are gone; how many. Those of other users are left to them."""
    removed = 0
    for path in folder.glob(f"{PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                removed += 1
            finally:
                os.close(descriptor)
    return removed


def _create(folder: Path) -> tuple[Path, int]:
    """A new file that is ours; one that a cleaner took between creation and lock is given up."""
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs its parent's exit handlers too
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    os.close(descriptor)


class Arena:
    """A producer's memory that readers on the same machine can map: the ``Memory`` of a ``Store``.

    All of it is allocated at once, so that a full ``/dev/shm`` is found here and not by a signal while writing. Raises
    ``Unavailable``. The file goes with ``close``, with the object, or with the process; mapped views outlive it.
    """

    def __init__(self, nbytes: int, folder: Path = FOLDER) -> None:
        if nbytes < 1:
            raise ValueError(f"at least one byte of memory, not {nbytes}")
        count = granules(nbytes)
        size = _data_at(count) + count * GRANULE
        try:
            self.cleaned = clean_stale(folder)
            self.path, descriptor = _create(folder)
        except OSError as error:
            raise Unavailable(f"cannot create a file in {folder}: {error.strerror}; use another transport") from error
        self._finalize = weakref.finalize(self, _remove, self.path, descriptor, os.getpid())
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            free = os.statvfs(folder)
            self._finalize()
            raise Unavailable(
                f"{size} bytes in {folder} ({error.strerror}; {free.f_bavail * free.f_frsize} are free): give the store less"
                " memory or the container a larger /dev/shm"
            ) from error
        self.name = self.path.name
        mapped = mmap.mmap(
            descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        _HEADER.pack_into(mapped, 0, MAGIC, GRANULE, 0, count, os.getpid())
        self.words: npt.NDArray[np.uint64] = _words(mapped, count)
        self.data = memoryview(mapped)[_data_at(count) :]

    def wipe(self, offset: int, nbytes: int) -> None:
        """Zero bytes."""
        np.frombuffer(self.data, np.uint8, nbytes, offset).fill(0)

    def freed(self, offset: int) -> None:
        """The block that started here is gone; its generation said so already."""

    def close(self) -> None:
        """Remove the file. Readers that have it mapped keep what they have until they let go."""
        self._finalize()
        self.data = memoryview(b"")
        self.words = np.zeros((0, 2), np.uint64)


class _Mapping:
    """An arena as a reader sees it."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Unreachable(
                f"the producer's memory is not on this machine, or it is gone ({error.strerror})"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)
        facts = os.fstat(self._descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise Malformed("this arena belongs to another user or others may write to it; run both ends as one user")
        if facts.st_size < GRANULE:
            raise Malformed("this arena has no header")
        mapped = mmap.mmap(self._descriptor, facts.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        magic, granule, _, self.count, _ = _HEADER.unpack_from(mapped)
        if magic != MAGIC or granule != GRANULE:
            raise Malformed("another kind of arena; run the same version at both ends")
        if facts.st_size != _data_at(self.count) + self.count * GRANULE:
            raise Malformed("the arena's size is not what its header says")
        self.words = _words(mapped, self.count)
        self.data = memoryview(mapped)[_data_at(self.count) :]
        self._mapped = mapped

    def populate(self) -> None:
        """Map every page now."""
        with contextlib.suppress(OSError):  # kernels before 5.14: pages are mapped as they are read
            self._mapped.madvise(_POPULATE_READ)

    def abandoned(self) -> bool:
        """Has its producer closed it or died?"""
        if not os.fstat(self._descriptor).st_nlink:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True


class ArenaReader:
    """Fetches from arenas of this machine without copying. Keeps the mappings of the producers last read from."""

    kind: Kind = "shared_memory"

    def __init__(
        self,
        limits: Limits | None = None,
        folder: Path = FOLDER,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._clock_ns = clock_ns
        self._mappings: OrderedDict[str, _Mapping] = OrderedDict()

    def fetch(self, ref: Ref, deadline_s: float | None = None) -> Fetched:
        """A read-only view into the producer's memory; ``deadline_s`` is met by construction.

        Raises ``Malformed`` for a reference no arena wrote, ``Unreachable``, ``Expired``, ``Stale``; counts each. The producer's
        death between fetch and ``check`` is no error: what is mapped stays as it was.
        """
        try:
            return self._fetch(ref)
        except (Malformed, Unreachable, Expired, Stale) as error:
            self.counts[error.code] += 1
            raise

    def _fetch(self, ref: Ref) -> Fetched:
        if ref.kind != self.kind or not _NAME.fullmatch(ref.handle):
            raise Malformed("not a reference into shared memory")
        mapping = self._mapping(ref.handle)
        first = ref.offset // GRANULE
        if ref.offset % GRANULE or ref.nbytes < 1 or first + granules(ref.nbytes) > mapping.count:
            raise Malformed("the reference points outside the arena")
        if ref.lease_until_ns <= self._clock_ns():
            raise Expired("this lease is over; ask for a new one")

        words = mapping.words[first]

        def check() -> None:
            if words[0] != ref.generation or words[1] != ref.nbytes:
                self.counts["stale_generation"] += 1
                raise Stale("these bytes were given to another block; what was read is worthless")

        if words[0] != ref.generation or words[1] != ref.nbytes or ref.generation == 0:
            raise Stale("the block is no longer in the arena; ask for a new reference")
        self.counts["hits"] += 1
        return Fetched(mapping.data[ref.offset : ref.offset + ref.nbytes], check)

    def attach(self, name: str) -> None:
        """Map an arena and all its pages before it is needed: a first copy takes twice as long where that is left to it.

        About 0.1 ms a MiB. Raises ``Malformed`` and ``Unreachable``.
        """
        if not _NAME.fullmatch(name):
            raise Malformed("not the name of an arena")
        self._mapping(name).populate()

    def _mapping(self, name: str) -> _Mapping:
        mapping = self._mappings.get(name)
        if mapping is None:
            mapping = _Mapping(self._folder / name)
            self.forget_abandoned()
            while len(self._mappings) >= self.limits.arenas:
                self._mappings.popitem(last=False)
            self._mappings[name] = mapping
        self._mappings.move_to_end(name)
        return mapping

    def forget_abandoned(self) -> int:
        """Unmap arenas whose producer is gone, and how many; the memory is free once no view of them lives."""
        gone = [name for name, mapping in self._mappings.items() if mapping.abandoned()]
        for name in gone:
            del self._mappings[name]
        return len(gone)

    def close(self) -> None:
        """Unmap everything that no view holds."""
        self._mappings.clear()
