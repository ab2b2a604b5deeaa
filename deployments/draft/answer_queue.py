"""Requests for answers that wait for their turn, and how many there are of each tenant. No model, no clock, no slots."""

from __future__ import annotations

import threading
from collections import Counter, deque

from deployments.draft.answer_job import AnswerJob


class AnswerQueue:
    """First come, first served. At most ``most`` requests are held, waiting or worked on, and of one tenant at most half.

    Callable from any thread. A request without a tenant is its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[AnswerJob] = deque()
        self._held: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def put(self, job: AnswerJob) -> bool:
        """Let a request wait; False when there are too many."""
        tenant = job.request.tenant
        with self._lock:
            crowded = tenant and self._held[tenant] >= max(1, self._most // 2)
            if crowded or self._held.total() >= self._most:
                return False
            self._held[tenant] += 1
            self._waiting.append(job)
        return True

    def first(self) -> AnswerJob | None:
        """Whose turn it is; it goes on waiting."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def take(self) -> AnswerJob:
        """Whose turn it is; it no longer waits, but counts until :meth:`leave`."""
        with self._lock:
            return self._waiting.popleft()

    def leave(self, job: AnswerJob) -> None:
        """A request that was taken is over."""
        with self._lock:
            self._leave(job)

    def over(self, now: float) -> list[AnswerJob]:
        """Take out those at their deadline and those nobody waits for."""
        with self._lock:
            found = [job for job in self._waiting if job.cancelled or job.until <= now]
            for job in found:
                self._waiting.remove(job)
                self._leave(job)
        return found

    def check(self, running: list[AnswerJob]) -> None:
        """Assert that exactly those that wait and those that are ``running`` are counted."""
        with self._lock:
            tenants = Counter(job.request.tenant for job in (*running, *self._waiting))
            assert +self._held == tenants, (self._held, tenants)

    def _leave(self, job: AnswerJob) -> None:
        tenant = job.request.tenant
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
