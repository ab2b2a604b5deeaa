"""A few threads with a bounded queue, for work that may hang.

Python cannot stop a thread. What hangs keeps its thread, as many as there are and no more; the process can still exit.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Full, Queue
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class Busy(Exception):
    """The queue is full."""


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    future: "Future[Any]"
    deadline: float  # time.monotonic()


class Threads:
    """At most ``most`` daemon threads, started as they are needed, and at most ``queue`` calls waiting for them."""

    def __init__(self, name: str, most: int, queue: int) -> None:
        self._name = name
        self._most = most
        self._queue: Queue[_Call | None] = Queue(queue)
        self._threads: list[threading.Thread] = []
        self._working = 0  # calls begun and not ended, or waiting
        self._lock = threading.Lock()

    @property
    def working(self) -> int:
        """Calls that wait or run, hung ones included."""
        return self._working

    def submit(self, work: Callable[[], ResultT], deadline: float = float("inf")) -> "Future[ResultT]":
        """Run ``work`` on a thread; TimeoutError where ``deadline`` (``time.monotonic()``) is over before one is free.

        Raises:
            Busy: too many calls are waiting.
        """
        call = _Call(work, Future(), deadline)
        with self._lock:
            try:
                self._queue.put_nowait(call)
            except Full:
                raise Busy from None
            self._working += 1
            if self._working > len(self._threads) and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return call.future

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self._do(call)
            with self._lock:
                self._working -= 1

    @staticmethod
    def _do(call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            if time.monotonic() >= call.deadline:
                raise TimeoutError("no thread was free in time")
            result = call.work()
        except BaseException as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def close(self, wait_s: float = 0.0) -> None:
        """Let threads end once the queue is empty; wait at most ``wait_s`` for that."""
        deadline = time.monotonic() + wait_s
        for _ in self._threads:
            try:
                self._queue.put(None, timeout=max(deadline - time.monotonic(), 0.001))
            except Full:
                break  # they hang, and end with the process
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
