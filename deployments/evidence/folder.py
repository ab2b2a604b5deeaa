"""A folder that one process at a time writes to, and files in it that are replaced whole."""

import fcntl
import os
import time
from pathlib import Path

_POLL_S = 0.1


class IndexLocked(Exception):
    """Another process writes to the folder; the text says which."""


class Folder:
    """Holds the folder's lock until closed. The kernel lets go of it when the process ends, however it ends."""

    def __init__(self, path: Path, wait_s: float = 0.0) -> None:
        """Make the folder, readable by nobody else, where it is missing, and wait at most ``wait_s`` for its lock.

        Raises:
            IndexLocked: it is still taken then.
            OSError: the folder cannot be made or written to.
        """
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        while not self._taken():
            if time.monotonic() >= deadline:
                holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip() or "unknown"
                os.close(self._lock)
                raise IndexLocked(
                    f"{path} is written to by process {holder}: an index has one writer; give each its own folder, or stop it"
                )
            time.sleep(_POLL_S)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def replace(self, name: str, content: bytes) -> None:
        """The file holds either what it held or all of ``content``, whenever the machine stops."""
        new = self.path / f"{name}.new"
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / name)
        self.sync()

    def sync(self) -> None:
        """Names in the folder outlive the machine's stop."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Let the next one write; closing twice is harmless."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
