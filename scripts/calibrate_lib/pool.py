"""Several processes that answer side by side, one a core: cells do not depend on one another, and no thread waits for another."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar

from scripts.calibrate_lib.knobs import LOSSLESS
from scripts.calibrate_lib.quality import Task
from scripts.calibrate_lib.store import Cell

MOST = 4  # processes by default: each holds both models


class Process(Protocol):
    """One of them. Failures are a ``RuntimeError``."""

    def stop(self) -> None: ...


P = TypeVar("P", bound=Process)


class Pool(Generic[P]):
    """``processes`` are started already, by a thread that outlives them; they end with :meth:`stop`."""

    def __init__(self, processes: Sequence[P]) -> None:
        self._processes = list(processes)
        self._threads = ThreadPoolExecutor(len(self._processes))
        self._ended = threading.Event()

    def each(self, action: Callable[[P], object]) -> None:
        """Do the same with all of them at once. Raises the first failure."""
        _joined([self._threads.submit(action, process) for process in self._processes])

    def run(
        self, tasks: Iterable[Task], measure: Callable[[Task, P], Cell], done: Callable[[Task, Cell], None]
    ) -> None:
        """Measure every task; ``done`` is called with one cell after the other. Raises the first failure, others finish.

        Lossless cells come first: the others are compared with them.
        """
        todo = list(tasks)
        lock = threading.Lock()
        for stage in (True, False):
            waiting = iter([task for task in todo if (task.setting.name == LOSSLESS) is stage])

            def work(process: P, waiting: Iterator[Task] = waiting) -> None:
                while not self._ended.is_set():
                    with lock:
                        task = next(waiting, None)
                    if task is None:
                        return
                    try:
                        cell = measure(task, process)
                    except BaseException:
                        self._ended.set()
                        raise
                    with lock:
                        done(task, cell)

            self.each(work)

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        self._ended.set()
        for process in self._processes:
            process.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)


def _joined(futures: Sequence[Future[object]]) -> None:
    wait(futures)
    for future in futures:
        future.result()
