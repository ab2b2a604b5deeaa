"""The back-end for validators elsewhere: jobs go into a Redis stream, answers come back through one of our own.

Workers (:mod:`.redis_worker`) share the stream as a consumer group. A worker that dies leaves its jobs pending, and another takes
them over. Whatever goes wrong with Redis is an unknown tag.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping

from redis.exceptions import RedisError

from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy
from deployments.evidence.validators.base import Tag, unknown
from deployments.evidence.validators.jobs import Job
from deployments.evidence.validators.redis_client import (
    BLOCK_MS,
    FIELD,
    Order,
    connect,
    decode_answer,
    encode,
    reply_key,
    shown,
)

logger = logging.getLogger(__name__)
READ_COUNT = 64


class RedisStream:
    """One asking process. Connects with the first job, on that job's event loop."""

    def __init__(self, url: str, faults: FaultPolicy, *, stream: str = "chain:validators", queue: int = 1024) -> None:
        """``queue``: jobs in the stream, of all askers; more are unknown at once.

        Raises:
            ValueError: not a Redis URL.
        """
        self._redis = connect(url, faults)
        self._faults, self._stream, self._queue = faults, stream, queue
        self._replies = reply_key(stream, uuid.uuid4().hex)
        self._last = b"0"
        self._waiting: dict[str, asyncio.Future[Tag]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._circuit = Circuit(faults)
        self._counts: Counter[str] = Counter()

    async def run(self, job: Job) -> Tag:
        if not self._circuit.allows(time.monotonic()):
            return self._unreachable("it failed a moment ago")
        order = Order(id=uuid.uuid4().hex, reply=self._replies, job=job)
        answer: asyncio.Future[Tag] = asyncio.get_running_loop().create_future()
        self._waiting[order.id] = answer
        try:
            # long enough for a second worker after a first that died
            async with asyncio.timeout(self._faults.validator_reply_s):
                if not await self._send(order):
                    self._counts["queue_full"] += 1
                    return unknown(f"{self._queue} validations are waiting already", "queue_full")
                return await answer
        except TimeoutError:
            return unknown(f"no worker answered within {self._faults.validator_reply_s:g} s", "no_worker")
        except (RedisError, OSError) as error:
            self._circuit.failure(time.monotonic())
            logger.warning("validators in Redis: %s: %s", type(error).__name__, shown(str(error)))
            return self._unreachable(type(error).__name__)
        finally:
            del self._waiting[order.id]

    async def _send(self, order: Order) -> bool:
        if len(self._waiting) > self._queue or await self._redis.xlen(self._stream) >= self._queue:
            return False
        # trimmed all the same, for many askers can pass the check at once; what is cut off is not answered
        await self._redis.xadd(self._stream, {FIELD: encode(order)}, maxlen=2 * self._queue, approximate=False)
        self._circuit.success()
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        return True

    async def _read(self) -> None:
        """Hand answers out for as long as anyone waits for one."""
        try:
            while self._waiting:
                found = await self._redis.xread({self._replies: self._last}, count=READ_COUNT, block=BLOCK_MS)
                for _, entries in found or ():
                    for key, fields in entries:
                        self._last = key
                        self._hand_out(fields)
        except (RedisError, OSError) as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError(shown(str(error))))

    def _hand_out(self, fields: dict[bytes, bytes]) -> None:
        try:
            answer = decode_answer(fields)
        except ValueError:
            self._counts["bad_answers"] += 1
            return
        future = self._waiting.get(answer.id)
        if future is None or future.done():
            self._counts["late_answers"] += 1
            return
        future.set_result(answer.tag)
        self._counts["answers"] += 1

    def _unreachable(self, why: str) -> Tag:
        self._counts["unreachable"] += 1
        return unknown(f"the validators' Redis cannot be reached: {why}", "unreachable")

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_result(unknown("validation has stopped", "stopped"))
        with contextlib.suppress(RedisError, OSError):  # what is left expires
            await self._redis.delete(self._replies)
        await self._redis.aclose()

    def stats(self) -> Mapping[str, int]:
        return {**self._counts, "waiting": len(self._waiting)}
