"""The target's deployment where something of the application scales: it reports its KV usage, and wakes sleeping drafts."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from deployments.target.server import TargetServer
from deployments.target.waking import Call, DraftWaker


class KvUsage(StatLoggerBase):
    """Remembers how full the KV cache was at each engine's last step."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}  # by engine

    def record(
        self, scheduler_stats: Any, iteration_stats: Any = None, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """As vLLM calls it, after every step."""
        if scheduler_stats is not None:
            self._shares[engine_idx] = float(scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def share(self, running: int) -> float:
        """0..1 of the fullest engine; NaN before the first step of a running request. No step follows the last request."""
        if not running:
            return 0.0
        return max(self._shares.values(), default=math.nan)


class AutoscaledTarget(TargetServer):
    """One target replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, llm_config: LLMConfig, *, drafts: Mapping[str, DeploymentHandle], faults: dict[str, Any], wakes: list[str]
    ) -> None:
        """``wakes``: the drafts that may be at zero replicas."""
        self._wakes = list(wakes)
        self._kv_usage = KvUsage()
        await super().__init__(llm_config, drafts=drafts, faults=faults)

    async def start(self) -> None:
        """As the base class; then look after drafts that sleep."""
        await super().start()
        manager = self.engine._engine_client.logger_manager
        if manager is not None:  # None: statistics are off, and KV usage is not known
            manager.stat_loggers.append(self._kv_usage)
        if self._wakes:
            calls = {name: _wake(self._drafts[name]) for name in self._wakes}
            waker = DraftWaker(calls, self._is_connected, self._running, self._faults)
            self._background.append(asyncio.create_task(waker.run(), name="draft waker"))

    def _running(self) -> int:
        return int(self.engine._engine_client.output_processor.get_num_unfinished_requests())

    def _is_connected(self, draft: str) -> bool:
        connected = self._discovery.connected if self._discovery is not None else []
        return any(name.startswith(f"{draft}#") for name in connected)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this every few seconds; see :class:`deployments.config.autoscaling.TargetScaling`."""
        return {"kv_usage": self._kv_usage.share(self._running())}


def _wake(handle: DeploymentHandle) -> Call:
    async def call() -> None:
        response = handle.wake.remote()
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()  # or the call would wait on in the handle, and count as demand
            raise

    return call
