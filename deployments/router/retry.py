"""Requests whose target replica is lost: asked again while nothing was sent, ended with an error event after that.

Serve itself asks another replica only while a request has not been accepted by one. What a replica had accepted when its
process, its node or its engine ended comes back as an error, whatever was said until then.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.api import errors
from deployments.chain.faults import FaultPolicy
from deployments.target.metrics import Counter

logger = logging.getLogger(__name__)

Answer = AsyncGenerator[Any, None]  # of a stream: SSE packets as text; otherwise one response

# Its process or node ended, what it said was lost with the node, or its engine's process ended: it then leaves, too
# (deployments/target/leaving.py).
LOST = (RayActorError, WorkerCrashedError, ObjectLostError, EngineDeadError)

LOST_METRIC = (
    "chain_target_lost_total",
    "Requests whose target replica was lost, by what became of them",
    ("outcome",),
)
ASKED_AGAIN, CUT_OFF, GIVEN_UP = "asked_again", "cut_off", "given_up"

DATA = "data: "
_SAYS_ERROR = DATA + '{"error"'


class Retries:
    """One router replica's; requests share nothing but the counter."""

    def __init__(self, faults: FaultPolicy, retry_after_s: int, counter: Counter | None = None) -> None:
        """``counter``: of :data:`LOST_METRIC`; None: Serve's, which there is inside a replica only."""
        self._faults = faults
        self._retry_after_s = retry_after_s
        self._counter = _counter_of_replica() if counter is None else counter

    async def answer(self, ask: Callable[[], Answer], *, stream: bool) -> Answer:
        """What ``ask`` yields, asked anew while it has yielded nothing and a replica was lost.

        An answer without a seed may be another one then; nobody has seen the first. Of a stream that is lost later the last
        packet is an error in vLLM's form, so that a client can tell it from one that is complete.

        Raises:
            RequestError: 503, when the retries were used up.
        """
        pause_s = self._faults.target_retry_pause_s
        for left in range(self._faults.target_retries, -1, -1):
            began = False
            try:
                async with contextlib.aclosing(ask()) as items:
                    async for item in items:
                        if not began and left and _engine_failed(item):
                            break
                        began = True
                        yield item
                    else:
                        return
            except LOST as error:
                if began and stream:
                    logger.warning("a target replica was lost in mid-stream: %s", _line(error))
                    self._counter.inc(1, {"outcome": CUT_OFF})
                    message = "The target replica was lost before it finished the answer; try again."
                    yield f"{DATA}{json.dumps(errors.body(message, 503))}\n\n"
                    return
                if not left:
                    break
                logger.warning("a target replica was lost before it answered, asking again: %s", _line(error))
            self._counter.inc(1, {"outcome": ASKED_AGAIN})
            await asyncio.sleep(pause_s)
            pause_s *= 2
        self._counter.inc(1, {"outcome": GIVEN_UP})
        message = "Target replicas were lost before they answered; try again shortly."
        raise errors.RequestError(message, status=503, retry_after_s=self._retry_after_s)


def _engine_failed(item: Any) -> bool:
    """Is a stream's first packet vLLM's error of a kind that no client caused?"""
    if not isinstance(item, str) or not item.startswith(_SAYS_ERROR):
        return False
    try:
        code = json.loads(item.removeprefix(DATA))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(code, int) and code >= 500


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)


def _counter_of_replica() -> Counter:
    from ray.serve import metrics

    counter: Counter = metrics.Counter(*LOST_METRIC)
    return counter
