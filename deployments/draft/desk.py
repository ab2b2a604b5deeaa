"""Where asyncio callers hand in requests for whole answers to an engine that works in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import DEADLINE
from deployments.draft.answer_job import AnswerJob
from deployments.draft.answers import Answer, Emit, WriteRequest, read_request


class WritesAnswers(Protocol):
    """:class:`deployments.draft.engine.DraftEngine` is one."""

    def write(self, request: WriteRequest, emit: Emit) -> AnswerJob: ...


class Thread(Protocol):
    """What the engine works in: :class:`deployments.channel.server.DraftServer` is one."""

    @property
    def alive(self) -> bool: ...

    def wake(self) -> None: ...


class Desk:
    """Many callers at once, each with its deadline. A caller that goes away takes its request back."""

    def __init__(self, engine: WritesAnswers, thread: Thread, faults: FaultPolicy) -> None:
        self._engine = engine
        self._thread = thread
        self._handover_s = faults.answer_handover_s

    async def write(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All answers to one request, in order. Raises as :meth:`stream`."""
        answers = [answer async for answer in self.stream(given)]
        return sorted(answers, key=lambda answer: int(answer["index"]))

    async def stream(self, given: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Each answer as it ends, as plain values.

        Where the thread is kept from handing over, an answer is empty with the reason at the deadline. Raises ValueError for a
        request that cannot be honoured, RuntimeError when the thread has died.
        """
        request = read_request(given)
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Answer] = asyncio.Queue()

        def emit(answer: Answer) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(ended.put_nowait, answer)

        until = loop.time() + request.deadline_s + self._handover_s
        job = self._engine.write(request, emit)
        self._thread.wake()
        left = set(range(request.k))
        try:
            while left:
                try:
                    answer = (
                        ended.get_nowait()
                        if ended.qsize()
                        else await asyncio.wait_for(ended.get(), until - loop.time())
                    )
                except TimeoutError:
                    break
                left.discard(answer.index)
                yield answer.plain()
            if left and not self._thread.alive:
                raise RuntimeError("the drafting thread has died")
            for index in sorted(left):
                yield Answer(index=index, tokens=[], reason=DEADLINE).plain()
        finally:
            job.cancel()
