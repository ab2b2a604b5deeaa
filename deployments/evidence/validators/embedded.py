"""The default back-end: a bounded queue in this process. What is cheap runs in a thread, what may hang in a process."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from deployments.chain.faults import FaultPolicy
from deployments.evidence.validators.base import ParameterError, Tag, judge, unknown
from deployments.evidence.validators.frames import Failed
from deployments.evidence.validators.jobs import Job
from deployments.evidence.validators.process import ValidatorProcess
from deployments.evidence.validators.registry import Registry


class EmbeddedQueue:
    """Jobs in their order, ``workers`` isolated ones at a time."""

    def __init__(
        self, registry: Registry, faults: FaultPolicy, *, workers: int = 1, queue: int = 256, memory_mib: int = 1024
    ) -> None:
        """``queue``: jobs waiting or running; more are unknown. ``memory_mib``: address space of one process."""
        self._registry, self._faults, self._bound = registry, faults, queue
        self._processes = [ValidatorProcess(registry.configured, faults, memory_mib) for _ in range(workers)]
        self._free: SimpleQueue[ValidatorProcess] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._isolated = ThreadPoolExecutor(workers, thread_name_prefix="validator-process")
        self._inline = ThreadPoolExecutor(1, thread_name_prefix="validator")
        self._jobs = 0
        self._counts: Counter[str] = Counter()
        self._closed = False

    def start(self) -> None:
        """Start a process and load the operator's functions, so that the first request need not wait for either.

        Raises:
            ParameterError: naming the validator that cannot be loaded.
        """
        try:
            # in the pool: the process ends with the thread that started it
            self._isolated.submit(self._processes[0].start).result()
        except Failed as error:
            names = ", ".join(f"{name} ({path})" for name, path in self._registry.functions.items())
            raise ParameterError(f"loading validators {error.failure}: one of {names or 'ours'}") from None

    async def run(self, job: Job) -> Tag:
        if self._closed:
            return unknown("validation has stopped", "stopped")
        if self._jobs >= self._bound:
            self._counts["queue_full"] += 1
            return unknown(f"{self._jobs} validations are waiting already", "queue_full")
        try:
            validator = self._registry.resolve(job.spec)
        except ParameterError as error:
            return unknown(str(error), "bad_parameters")
        until = time.monotonic() + job.limit_s
        self._jobs += 1
        try:
            if validator.isolated:
                return await self._in(self._isolated, until, lambda: self._isolate(job))
            return await self._in(self._inline, until, lambda: judge(validator, job.text, job.context))
        finally:
            self._jobs -= 1
            self._counts["isolated" if validator.isolated else "inline"] += 1

    async def _in(self, pool: ThreadPoolExecutor, until: float, work: Callable[[], Tag]) -> Tag:
        def timely() -> Tag:
            if time.monotonic() > until:
                return unknown("others took all the time", "waited")
            return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(pool, timely)
        except RuntimeError:  # the pool was shut down in between
            return unknown("validation has stopped", "stopped")

    def _isolate(self, job: Job) -> Tag:
        process = self._free.get()  # as many as threads, so there is one
        try:
            return process.run(job)
        finally:
            self._free.put(process)

    async def close(self) -> None:
        self._closed = True
        self._isolated.shutdown(wait=False, cancel_futures=True)
        self._inline.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()

    def stats(self) -> Mapping[str, int]:
        return {**self._counts, "waiting": self._jobs, "process_starts": sum(p.starts for p in self._processes)}
