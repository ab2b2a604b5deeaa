"""A worker on the other side of :mod:`.redis_stream`: takes jobs from the stream, runs them here, answers.

The tag and the acknowledgement go out in one transaction, so a job is either answered or still pending. Pending jobs of a worker
that died are taken over; one that has ended several workers is answered unknown instead.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from typing import Any

from redis.exceptions import RedisError, ResponseError

from deployments.chain.faults import FaultPolicy
from deployments.evidence.validators.base import Tag, unknown
from deployments.evidence.validators.jobs import Backend, Job
from deployments.evidence.validators.redis_client import (
    BLOCK_MS,
    FIELD,
    GROUP,
    MAX_DELIVERIES,
    MAX_REPLIES,
    Answer,
    Order,
    connect,
    decode_order,
    encode,
    reply_key,
    shown,
)

logger = logging.getLogger(__name__)

Entry = tuple[bytes, dict[bytes, bytes]]


class RedisWorker:
    """One consumer of the stream."""

    def __init__(self, url: str, backend: Backend, faults: FaultPolicy, *, stream: str, at_once: int = 1) -> None:
        """``backend`` runs the jobs, ``at_once`` of them together.

        Raises:
            ValueError: not a Redis URL.
        """
        self._redis = connect(url, faults)
        self._backend, self._faults, self._stream, self._at_once = backend, faults, stream, at_once
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._jobs: set[asyncio.Task[None]] = set()
        self._reclaimed = float("-inf")
        self.counts: Counter[str] = Counter()

    async def serve(self, stop: asyncio.Event) -> None:
        """Work until ``stop``; then finish what was taken. Lost connections are tried again, less and less often."""
        pause = self._faults.circuit_pause_s
        joined = False
        while not stop.is_set():
            try:
                if not joined:
                    await self._join()
                    joined = True
                    logger.info("serving %s as %s", self._stream, self._name)
                await self._take()
                pause = self._faults.circuit_pause_s
            except (RedisError, OSError) as error:
                joined = False
                logger.warning("%s: %s; trying again in %g s", type(error).__name__, shown(str(error)), pause)
                self.counts["lost"] += 1
                try:
                    await asyncio.wait_for(stop.wait(), pause)
                except TimeoutError:
                    pause = min(2 * pause, self._faults.circuit_pause_max_s)
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=self._faults.drain_timeout_s)
        with contextlib.suppress(RedisError, OSError):
            if not self._jobs:  # or its pending jobs would go with it
                await self._redis.xgroup_delconsumer(self._stream, GROUP, self._name)
        await self._redis.aclose()

    async def _join(self) -> None:
        try:
            await self._redis.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _take(self) -> None:
        """Take over what others left, then what is new, as much as there is room for."""
        if len(self._jobs) >= self._at_once:
            await asyncio.wait(self._jobs, return_when=asyncio.FIRST_COMPLETED)
        room = self._at_once - len(self._jobs)
        if time.monotonic() - self._reclaimed > self._faults.validator_reclaim_s / 2:
            self._reclaimed = time.monotonic()
            # never one that its worker can still be at
            idle_ms = int(1000 * max(self._faults.validator_reclaim_s, 2 * self._faults.validator_limit_s))
            _, entries, *_ = await self._redis.xautoclaim(
                self._stream, GROUP, self._name, min_idle_time=idle_ms, count=room
            )
            for key, fields in await self._current(entries):
                self.counts["reclaimed"] += 1
                self._begin(key, fields, await self._deliveries(key))
            room -= len(entries)
        if room > 0:
            found = await self._redis.xreadgroup(GROUP, self._name, {self._stream: ">"}, count=room, block=BLOCK_MS)
            for _, entries in found or ():
                for key, fields in await self._current(entries):
                    self._begin(key, fields, 1)

    async def _current(self, entries: list[Entry]) -> list[Entry]:
        """Without jobs that nobody waits for any more: Redis keeps the time, for entries and for us."""
        if not entries:
            return []
        seconds, micros = await self._redis.time()
        oldest_ms = seconds * 1000 + micros // 1000 - int(self._faults.validator_reply_s * 1000)
        current = [entry for entry in entries if int(entry[0].split(b"-")[0]) >= oldest_ms]
        for key, _ in entries:
            if all(key != kept for kept, _ in current):
                self.counts["expired"] += 1
                await self._settle(key, None, None)
        return current

    async def _deliveries(self, key: bytes) -> int:
        """How many workers have had this job, us included."""
        found = await self._redis.xpending_range(self._stream, GROUP, min=key, max=key, count=1)
        return int(found[0]["times_delivered"]) if found else 1

    def _begin(self, key: bytes, fields: dict[bytes, bytes], deliveries: int) -> None:
        task = asyncio.create_task(self._work(key, fields, deliveries))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _work(self, key: bytes, fields: dict[bytes, bytes], deliveries: int) -> None:
        try:
            order = decode_order(fields)
            if not order.reply.startswith(reply_key(self._stream, "")):
                raise ValueError("answers go to reply streams only")
        except ValueError as error:
            self.counts["bad_orders"] += 1
            logger.warning("dropped an entry that is no job: %s", error)
            await self._settle(key, None, None)
            return
        if deliveries > MAX_DELIVERIES:
            tag = unknown(f"{deliveries - 1} workers died with it", "died")
        else:
            job = order.job
            limit_s = min(job.limit_s, self._faults.validator_limit_s)  # what we allow, not what was asked
            tag = await self._backend.run(Job(spec=job.spec, text=job.text, context=job.context, limit_s=limit_s))
        await self._settle(key, order, tag)
        self.counts["answered"] += 1

    async def _settle(self, key: bytes, order: Order | None, tag: Tag | None) -> None:
        """Answer and acknowledge at once. If Redis is gone the job stays pending, for us or another."""
        try:
            async with self._redis.pipeline(transaction=True) as both:
                if order is not None and tag is not None:
                    answer: Any = {FIELD: encode(Answer(id=order.id, tag=tag))}
                    both.xadd(order.reply, answer, maxlen=MAX_REPLIES, approximate=True)
                    both.expire(order.reply, int(self._faults.validator_reply_s) or 1)
                both.xack(self._stream, GROUP, key)
                both.xdel(self._stream, key)
                await both.execute()
        except (RedisError, OSError) as error:
            self.counts["lost"] += 1
            logger.warning("an answer was lost: %s: %s", type(error).__name__, shown(str(error)))
