"""Requests whose target replica is lost: retried while nothing was sent, cut off with an error after that."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.api.errors import RequestError
from deployments.chain.faults import FaultPolicy
from deployments.router.retry import Retries
from deployments.target.leaving import leave_with_engine

FAULTS = FaultPolicy(target_retries=2, target_retry_pause_s=0.001)
LOST = [
    ActorDiedError(),
    ActorUnavailableError("gone", b"\0" * 16),
    ObjectLostError("00" * 28, "", ""),
    EngineDeadError(),
]
SERVER_ERROR = 'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n'
CLIENT_ERROR = 'data: {"error": {"message": "too long", "code": 400}}\n\n'


class Target:
    """Answers one attempt after the other with what is in it; an exception is raised."""

    def __init__(self, *attempts: list[Any]) -> None:
        self.attempts = list(attempts)
        self.asked = 0
        self.closed = 0

    async def ask(self) -> AsyncGenerator[Any, None]:
        attempt = self.attempts[self.asked]
        self.asked += 1
        try:
            for item in attempt:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


class Count:
    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.outcomes[tags["outcome"]] += int(value)


async def answer(target: Target, *, stream: bool = True) -> tuple[list[Any], dict[str, int]]:
    count = Count()
    retries = Retries(FAULTS, 7, count)
    items = [item async for item in retries.answer(target.ask, stream=stream)]
    assert target.closed == target.asked
    return items, dict(count.outcomes)


async def test_what_goes_well_is_passed_on() -> None:
    assert await answer(Target(["a", "b"])) == (["a", "b"], {})


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stream", [True, False])
async def test_lost_before_the_first_word_is_asked_again(lost: Exception, stream: bool) -> None:
    target = Target([lost], [lost], ["a"])
    assert await answer(target, stream=stream) == (["a"], {"asked_again": 2})


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
async def test_lost_in_mid_stream_ends_with_an_error_event(lost: Exception) -> None:
    target = Target(["a", "b", lost], ["never"])
    items, outcomes = await answer(target)
    assert items[:2] == ["a", "b"]
    (event,) = items[2:]
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert (outcomes, target.asked) == ({"cut_off": 1}, 1)


async def test_retries_end_with_a_503_that_says_when_to_come_back() -> None:
    target = Target(*([ActorDiedError()] for _ in range(5)))
    with pytest.raises(RequestError) as caught:
        await answer(target)
    assert (caught.value.status, caught.value.retry_after_s, target.asked) == (503, 7, 3)


async def test_a_stream_that_begins_with_the_engines_failure_is_asked_again() -> None:
    assert await answer(Target([SERVER_ERROR, "data: [DONE]\n\n"], ["a"])) == (["a"], {"asked_again": 1})
    always = Target(*([SERVER_ERROR] for _ in range(3)))
    assert await answer(always) == ([SERVER_ERROR], {"asked_again": 2})  # the client hears what the engine says


@pytest.mark.parametrize("first", [CLIENT_ERROR, 'data: {"error"', "data: {}\n\n", {"error": {"code": 500}}])
async def test_whatever_else_comes_first_is_an_answer(first: Any) -> None:
    assert await answer(Target([first])) == ([first], {})


async def test_other_failures_are_not_ours() -> None:
    for attempt in ([ValueError("x")], ["a", ValueError("x")]):
        target = Target(attempt)
        with pytest.raises(ValueError, match="x"):
            await answer(target)
        assert target.asked == 1


async def test_a_client_that_leaves_ends_the_request() -> None:
    target = Target(["a", "b"])
    items = Retries(FAULTS, 7, Count()).answer(target.ask, stream=True)
    assert await anext(items) == "a"
    await items.aclose()
    assert target.closed == 1


async def test_a_replica_leaves_with_its_engine() -> None:
    dead, left = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(leave_with_engine(dead.is_set, left.set, 0.01))
    await asyncio.sleep(0.05)
    assert not left.is_set()
    dead.set()
    async with asyncio.timeout(10):
        await left.wait()
        await task
