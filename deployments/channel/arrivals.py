"""When messages came, while the thread that reads them was busy."""

import os
import select
import threading
import time
from collections.abc import Iterable


class ArrivalClock:
    """When the first unread message came, seen by a thread while the drafting thread computes.

    It only watches file descriptors, edge by edge: the sockets themselves belong to the drafting thread. Without epoll
    (Linux has it) nothing is seen and times are those of reading.
    """

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._at: dict[int, float] = {}
        self._stop = -1  # a descriptor that tells the thread to end
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        if self._poll is not None:
            self._stop = os.eventfd(0)
            self._poll.register(self._stop, select.EPOLLIN)
            for descriptor in descriptors:
                self._poll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._thread = threading.Thread(target=self._run, name="draft-arrivals", daemon=True)

    def start(self) -> None:
        if self._poll is not None:
            self._thread.start()

    def take(self) -> dict[int, float]:
        """Seconds of ``time.perf_counter`` by descriptor at which each was first signalled since the last call."""
        at, self._at = self._at, {}
        return at

    def stop(self) -> None:
        if self._poll is None:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._poll.close()
        os.close(self._stop)

    def _run(self) -> None:
        assert self._poll is not None
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._stop:
                    return
                self._at.setdefault(descriptor, time.perf_counter())
