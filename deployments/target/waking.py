"""Draft pools that scaled to zero: a target with work asks for a replica, and takes the question back when it has none.

Rounds go over sockets, so Serve sees no demand for drafts. But a call through a handle of a deployment without replicas waits
in that handle, which reports it to Serve's autoscaler at once (``RouterMetricsManager.wrap_queued_request``), and the
autoscaler starts the first replica for it without any delay (``_get_cold_start_scale_up_replicas``).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from deployments.chain.faults import FaultPolicy

logger = logging.getLogger(__name__)

Call = Callable[[], Awaitable[object]]


class DraftWaker:
    """Keeps one call waiting at each sleeping draft deployment for as long as there is work it could help with."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        connected: Callable[[str], bool],
        running: Callable[[], int],
        faults: FaultPolicy,
    ) -> None:
        """``calls``: by draft, one that returns when a replica is there. ``running``: sequences in the engine."""
        self._calls = dict(calls)
        self._connected = connected
        self._running = running
        self._faults = faults
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._complained: dict[str, str] = {}

    @property
    def waiting(self) -> list[str]:
        """Drafts with a call on its way."""
        return sorted(name for name, task in self._waiting.items() if not task.done())

    async def run(self) -> None:
        """Look until cancelled; then take all calls back."""
        try:
            while True:
                self.look()
                await asyncio.sleep(self._faults.discovery_period_s)
        finally:
            for task in self._waiting.values():
                task.cancel()

    def look(self) -> None:
        """Call where there is work and no draft; take calls back where either has changed."""
        work = self._running() > 0
        for name, call in self._calls.items():
            task = self._waiting.get(name)
            needed = work and not self._connected(name)
            if task is not None and task.done():
                del self._waiting[name]
                task = None
            if needed and task is None:
                self._waiting[name] = asyncio.create_task(self._wake(name, call), name=f"wake {name}")
            elif not needed and task is not None:
                task.cancel()

    async def _wake(self, name: str, call: Call) -> None:
        """No failure is more than a line in the log: the target answers plainly."""
        try:
            async with asyncio.timeout(self._faults.start_timeout_s):
                await call()
            self._complained.pop(name, None)
        except Exception as error:
            if self._complained.get(name) != repr(error):  # once, not once a second
                logger.warning("draft %s could not be woken, will retry: %r", name, error)
            self._complained[name] = repr(error)
