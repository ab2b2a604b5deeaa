"""Threads of one ONNX Runtime session and where they run."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Threads of one session.

    ``threads``: intra-op threads, the calling thread included. ``cores``: processor numbers, one a thread, or empty to
    leave placement to the system. The first one is the calling thread's.
    """

    threads: int = 1
    cores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if self.cores and len(self.cores) != self.threads:
            raise ValueError(f"{self.threads} threads need {self.threads} cores or none, not {list(self.cores)}")
        if len(set(self.cores)) != len(self.cores) or any(core < 0 for core in self.cores):
            raise ValueError(f"cores must be distinct processor numbers, not {list(self.cores)}")

    def session_entries(self) -> dict[str, str]:
        """Session config entries that place the pool's threads; the caller's own thread is pinned by :meth:`pin`."""
        # A spinning thread that shares its core with something else takes that core's time for nothing.
        entries = {"session.intra_op.allow_spinning": "1" if self.cores and self.threads > 1 else "0"}
        if len(self.cores) > 1:
            # ONNX Runtime numbers processors from 1 and leaves out the calling thread.
            entries["session.intra_op_thread_affinities"] = ";".join(str(core + 1) for core in self.cores[1:])
        return entries

    def pin(self) -> None:
        """Pin the calling thread to the first core. Raises OSError for a core this process may not use."""
        if self.cores:
            # 0 is the calling thread on Linux, not the whole process. Elsewhere the call does not exist: not pinned.
            set_affinity = getattr(os, "sched_setaffinity", None)
            if set_affinity is not None:
                set_affinity(0, {self.cores[0]})
