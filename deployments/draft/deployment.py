"""A draft as a Serve deployment: the engine, its socket, and the call by which targets find it and are let in."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve

from deployments.chain.faults import FaultPolicy
from deployments.channel.server import DraftServer
from deployments.config.models import DraftSpec
from deployments.draft.answers import Writing
from deployments.draft.build import build_engine
from deployments.draft.desk import Desk
from deployments.draft.leaving import linger
from deployments.draft.load import LoadMeter
from hw.providers import Tuning


class DraftDeployment:
    """One draft replica. Serve only carries control calls; rounds go over the socket."""

    def __init__(self, spec: dict[str, Any], faults: dict[str, Any], target_vocab_size: int) -> None:
        """``spec`` is a :class:`DraftSpec` and ``faults`` a :class:`FaultPolicy`, both as plain values."""
        self._spec = DraftSpec.model_validate(spec)
        self._faults = FaultPolicy(**faults)
        # unique to this start: a restarted replica is a new draft to its targets
        name = f"{self._spec.name}#{serve.get_replica_context().replica_id.unique_id}"
        tuning = Tuning(threads=self._spec.threads, cores=tuple(self._spec.cores or ()))
        self._engine = build_engine(
            Path(self._spec.model),
            provider=self._spec.provider,
            context=self._spec.context,
            slots=self._spec.slots,
            top_k=self._spec.top_k,
            tuning=tuning,  # pins this thread; the server's thread, started below, inherits it
            target_vocab_size=target_vocab_size,
            faults=self._faults,
            name=name,
            ahead=None if self._spec.predraft else 0,
            writing=Writing(
                share=self._spec.answers_share,
                diversity=self._spec.answers_diversity,
                waiting=self._spec.answers_waiting,
            ),
        )
        self._server = DraftServer(self._engine, ray.util.get_node_ip_address(), name, self._faults)
        self._server.start()
        self._desk = Desk(self._engine, self._server, self._faults)
        self._load = LoadMeter(self._spec.slots)
        self._left = False
        self._seen: dict[str, float] = {}  # target key: when it last asked

    def endpoint(self, client_key: str, kv_offer: dict[str, Any]) -> dict[str, Any]:
        """Let the target with this CURVE public key in, and tell it where to connect and how to send its KV."""
        self._revoke_absent()
        self._seen[client_key] = time.monotonic()
        self._server.authorize(client_key)
        endpoint: dict[str, Any] = msgspec.to_builtins(self._server.endpoint(self._engine.vocab_size))
        return endpoint | {"kv": self._engine.meet(kv_offer)}

    async def write_answers(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Write ``k`` answers to a prompt: one dict each, in order, when all have ended.

        ``request``: fields of :class:`~deployments.draft.answers.WriteRequest`; each answer: those of
        :class:`~deployments.draft.answers.Answer`. By the deadline there is what was written, with a reason. Raises ValueError
        for a request that cannot be honoured, RuntimeError when the drafting thread has died.
        """
        return await self._desk.write(request)

    async def stream_answers(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """As :meth:`write_answers`, each answer as it ends. What is not written yet when nobody listens any more never is."""
        async for answer in self._desk.stream(request):
            yield answer

    def _revoke_absent(self) -> None:
        """Targets ask every second; one that has not for a lease's time is gone."""
        oldest = time.monotonic() - self._faults.session_lease_s
        for key in [key for key, seen in self._seen.items() if seen < oldest]:
            del self._seen[key]
            self._server.revoke(key)

    def stats(self) -> dict[str, Any]:
        """Counters of the engine and the socket."""
        return {**self._engine.stats(), **self._server.stats()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this every few seconds where the draft scales; see :class:`~deployments.draft.load.LoadMeter`."""
        return self._load.read(self.stats())

    def wake(self) -> None:
        """Nothing: that a target waits for this call has Serve start the first replica."""

    def check_health(self) -> None:
        """Serve replaces the replica when the drafting thread died."""
        if not self._server.alive:
            raise RuntimeError(f"the drafting thread of {self._spec.name} died")

    def __del__(self) -> None:
        """Serve calls this after the last request for answers has ended; targets may still have rounds here."""
        server = getattr(self, "_server", None)
        if server is None or getattr(self, "_left", True):
            return
        self._left = True
        if server.alive:
            # Serve has waited for two seconds by now (graceful_shutdown_wait_loop_s); idle targets know, busy ones are seen
            limit_s = self._faults.drain_timeout_s / 2  # the other half is for requests that were still running
            linger(lambda: self._engine.stats().get("steps", 0.0), self._faults.draft_deadline_s, limit_s)
        server.stop()
