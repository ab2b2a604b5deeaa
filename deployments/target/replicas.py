"""Ask every running replica of a Serve deployment one question, each with its own time-out."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back, and how many replicas are there but did not answer in time."""

    results: list[Any] = field(default_factory=list)
    silent: int = 0


async def ask_every_replica(handle: DeploymentHandle, method: str, *args: Any, timeout_s: float) -> Answers:
    """Call ``method`` on every replica that Serve knows to run.

    A dead replica is left out; a silent one is counted. No replica at all is no answer, not an error.
    """
    response = handle.broadcast(method, *args)
    try:
        async with asyncio.timeout(timeout_s):
            # the public results_async() has one time-out for all: a single hung replica would hide the others
            pending = await response._fetch_replica_results_async()
    except (DeploymentUnavailableError, TimeoutError):
        return Answers()
    outcomes = await asyncio.gather(
        *(asyncio.wait_for(item.get_async(), timeout_s) for item in pending), return_exceptions=True
    )
    results = [item for item in outcomes if not isinstance(item, BaseException)]
    silent = sum(isinstance(item, TimeoutError) for item in outcomes)
    return Answers(results, silent)
