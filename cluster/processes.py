"""Every process that descends from this one, so that what we start is ended by its id and nothing else is touched."""

import contextlib
import ctypes
import os
import time

import psutil  # type: ignore[import-untyped]

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (Linux), so that none escapes :func:`descendants`."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Children, their children, and so on, right now."""
    return list(psutil.Process().children(recursive=True))


def end_descendants(before: set[int], grace_s: float) -> list[str]:
    """End what was started since ``before`` (pids): ask, wait, then kill. Returns what had to be killed."""
    for process in _started(before):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + grace_s
    while _started(before) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed = []
    for process in _started(before):
        with contextlib.suppress(psutil.NoSuchProcess):
            killed.append(f"{process.pid} {process.name()}")
            process.kill()
    deadline = time.monotonic() + grace_s
    while _started(before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return killed


def _started(before: set[int]) -> list[psutil.Process]:
    """Living descendants beyond ``before``; ended ones that we adopted are reaped on the way."""
    alive = []
    for process in descendants():
        if process.pid in before:
            continue
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return alive
