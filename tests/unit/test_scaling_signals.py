"""What replicas report to the autoscaler, how a target wakes a draft pool at zero, and how a draft leaves."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from deployments.chain.faults import FaultPolicy
from deployments.draft.deployment import DraftDeployment
from deployments.draft.leaving import linger
from deployments.draft.load import LoadMeter
from deployments.target.autoscaled import KvUsage
from deployments.target.waking import DraftWaker

STATS = {"sessions": 4.0, "answers_waiting": 1.0, "answers_running": 2.0}


class TestLoadMeter:
    def test_shares_are_of_the_time_and_rounds_since_the_last_call(self) -> None:
        now = [100.0]
        meter = LoadMeter(slots=16, clock=lambda: now[0])
        now[0] = 110.0
        first = meter.read({**STATS, "busy_s": 4.0, "rounds": 90.0, "deadline": 5.0, "no_slot": 4.0})
        assert first == {"busy": 0.4, "late": 0.1, "sessions": 0.25, "answers": 3.0}
        now[0] = 120.0
        second = meter.read(
            {**STATS, "busy_s": 4.0, "rounds": 90.0, "deadline": 5.0, "no_slot": 4.0, "dropped:superseded": 2.0}
        )
        assert (second["busy"], second["late"]) == (0.0, 1.0)

    def test_nothing_done_and_counters_reset(self) -> None:
        meter = LoadMeter(slots=1)
        assert meter.read(STATS)["late"] == 0.0
        meter.read({**STATS, "rounds": 10.0, "busy_s": 3.0})
        assert meter.read({**STATS, "rounds": 1.0, "busy_s": 0.0})["busy"] == 0.0


def test_kv_usage_of_the_fullest_engine_and_none_without_requests() -> None:
    usage = KvUsage()
    assert math.isnan(usage.share(1))
    usage.record(scheduler_stats=SimpleNamespace(kv_cache_usage=0.25), iteration_stats=None)
    usage.record(scheduler_stats=SimpleNamespace(kv_cache_usage=0.75), iteration_stats=None, engine_idx=1)
    usage.record(scheduler_stats=None, iteration_stats=None)
    assert usage.share(3) == 0.75
    assert usage.share(0) == 0.0


class Pool:
    """A draft deployment at zero whose calls wait until it is there."""

    def __init__(self) -> None:
        self.calls = 0
        self.taken_back = 0
        self.there = asyncio.Event()
        self.connected = False
        self.error: Exception | None = None

    async def call(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        try:
            await self.there.wait()
        except asyncio.CancelledError:
            self.taken_back += 1
            raise


class TestWaker:
    @pytest.fixture
    def pool(self) -> Pool:
        return Pool()

    def waker(self, pool: Pool, running: list[int]) -> DraftWaker:
        return DraftWaker(
            {"a": pool.call}, lambda _: pool.connected, lambda: running[0], FaultPolicy(discovery_period_s=0.01)
        )

    async def test_one_call_waits_while_there_is_work(self, pool: Pool) -> None:
        running = [0]
        waker = self.waker(pool, running)
        waker.look()
        await asyncio.sleep(0)
        assert pool.calls == 0
        running[0] = 3
        for _ in range(3):
            waker.look()
            await asyncio.sleep(0)
        assert pool.calls == 1
        assert waker.waiting == ["a"]
        running[0] = 0
        waker.look()
        await asyncio.sleep(0.01)
        assert pool.taken_back == 1
        assert waker.waiting == []

    async def test_a_draft_that_is_there_is_not_called(self, pool: Pool) -> None:
        waker = self.waker(pool, [1])
        waker.look()
        await asyncio.sleep(0)
        pool.there.set()
        pool.connected = True
        await asyncio.sleep(0.01)
        waker.look()
        await asyncio.sleep(0)
        assert (pool.calls, pool.taken_back) == (1, 0)
        pool.connected = False  # gone again
        waker.look()
        await asyncio.sleep(0)
        assert pool.calls == 2

    async def test_failures_are_retried_and_logged_once(self, pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
        pool.error = RuntimeError("deployment is unavailable")
        task = asyncio.create_task(self.waker(pool, [1]).run())
        while pool.calls < 3:
            await asyncio.sleep(0.01)
        assert sum("could not be woken" in record.message for record in caplog.records) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_ending_takes_the_call_back(self, pool: Pool) -> None:
        task = asyncio.create_task(self.waker(pool, [1]).run())
        while not pool.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert pool.taken_back == 1


class Ending:
    """A draft replica that Serve ends while a target sends a number of messages more, 5 ms apart."""

    def __init__(self, messages: int, alive: bool = True) -> None:
        self.answered = self.stops = 0
        self._messages, self.alive = messages, alive
        self.replica = DraftDeployment.__new__(DraftDeployment)
        self.replica._faults = FaultPolicy(draft_deadline_s=0.1, drain_timeout_s=2.0)
        self.replica._engine = self  # type: ignore[assignment]
        self.replica._server = self  # type: ignore[assignment]
        self.replica._left = False

    def stats(self) -> dict[str, float]:
        assert not self.stops
        self.answered = min(self.answered + 1, self._messages)
        return {"steps": float(self.answered)}

    def stop(self) -> None:
        self.stops += 1


class TestEnd:
    def test_rounds_are_answered_until_none_comes(self) -> None:
        ending = Ending(messages=6)
        ending.replica.__del__()
        assert ending.answered == 6
        ending.replica.__del__()  # the interpreter calls it again
        assert ending.stops == 1

    def test_a_dead_drafting_thread_is_not_waited_for(self) -> None:
        ending = Ending(messages=6, alive=False)
        ending.replica.__del__()
        assert (ending.answered, ending.stops) == (0, 1)

    def test_a_replica_that_never_started(self) -> None:
        DraftDeployment.__new__(DraftDeployment).__del__()


class TestLinger:
    def run(self, until: float, limit_s: float = 5.0) -> tuple[bool, float]:
        """A draft that gets messages up to a time; whether it was quiet, and when it stopped."""
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        quiet = linger(lambda: min(now[0], until), 1.0, limit_s, clock=lambda: now[0], sleep=sleep)
        return quiet, now[0]

    def test_answers_until_nobody_asks(self) -> None:
        quiet, stopped = self.run(until=2.0)
        assert quiet
        assert 3.0 <= stopped < 3.2

    def test_but_not_for_ever(self) -> None:
        quiet, stopped = self.run(until=math.inf)
        assert not quiet
        assert 5.0 <= stopped < 5.1
