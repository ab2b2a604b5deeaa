"""Requests for whole answers from asyncio callers to an engine in a real thread: deadlines, callers that leave, a thread that dies."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import DEADLINE, Sampling
from deployments.channel.server import DraftServer
from deployments.draft.answers import BUSY, Writing
from deployments.draft.desk import Desk
from tests.fakes import FakeDrafter, always
from tests.unit.answer_cases import PROMPT, reference, some_prompt
from tests.unit.draft_fakes import FakeModel, engine
from tests.unit.test_channel import until

FAULTS = FaultPolicy(answer_handover_s=0.2)


class Slow(FakeModel):
    """Calls take a little real time; ``held`` stops them."""

    def __init__(self) -> None:
        super().__init__(slots=8, context=512)
        self.held = threading.Event()
        self.dies = False

    def decode(self, *given: Any) -> Any:
        if self.dies:
            raise SystemExit  # not an Exception: the thread ends
        while self.held.is_set():
            time.sleep(0.005)
        time.sleep(0.002)
        return super().decode(*given)


class Draft:
    """An engine in a server's thread."""

    def __init__(self, faults: FaultPolicy = FAULTS) -> None:
        self.model = Slow()
        self.engine = engine(self.model, writing=Writing(waiting=8))
        self.server = DraftServer(self.engine, "127.0.0.1", "d", faults)
        self.server.start()
        self.desk = Desk(self.engine, self.server, faults)


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    draft = Draft()
    yield draft
    draft.model.held.clear()
    if not draft.model.dies:
        draft.server.stop()


async def test_many_callers_at_once_get_their_own_answers(draft: Draft) -> None:
    async def ask(seed: int) -> None:
        prompt = some_prompt(seed, 6 + seed)
        answers = await draft.desk.write(
            {"prompt": prompt, "k": 2, "length": 9, "temperature": 0.7, "seed": seed, "top_k": 3, "deadline_s": 20.0}
        )
        assert [answer["index"] for answer in answers] == [0, 1]
        for index, answer in enumerate(answers):
            assert answer["tokens"] == reference(prompt, 9, Sampling(0.7, seed + index))
            assert (len(answer["top_ids"]), len(answer["top_probs"])) == (9 * 3 * 4, 9 * 3 * 2)
            assert (answer["finished"], answer["reason"]) == (False, "")

    await asyncio.gather(*(ask(seed) for seed in range(8)))


async def test_a_quiet_draft_begins_at_once(draft: Draft) -> None:
    """Its thread waits 50 ms at a time for messages; a request that comes 20 ms into that wakes it."""
    took = []
    for _ in range(8):
        await asyncio.sleep(0.02)
        started = time.perf_counter()
        await draft.desk.write({"prompt": PROMPT, "length": 1})
        took.append(time.perf_counter() - started)
    assert sorted(took)[2] < 0.030  # what is left of the wait


async def test_answers_come_as_they_end(draft: Draft) -> None:
    texts = [reference(PROMPT, 40, Sampling(0.7, seed)) for seed in range(4)]
    stop = next(token for token in texts[1][:5] if token not in texts[0])
    order = []
    async for answer in draft.desk.stream(
        {"prompt": PROMPT, "k": 4, "length": 40, "temperature": 0.7, "stop": [stop], "deadline_s": 20.0}
    ):
        order.append(answer["index"])
        assert answer["tokens"] == texts[answer["index"]][: len(answer["tokens"])]
    lengths = [text.index(stop) if stop in text else 40 for text in texts]
    assert order == sorted(range(4), key=lambda index: lengths[index])


async def test_the_deadline_ends_the_wait_whatever_the_thread_does(draft: Draft) -> None:
    draft.model.held.set()
    started = time.perf_counter()
    answers = await draft.desk.write({"prompt": PROMPT, "k": 2, "length": 50, "deadline_s": 0.1})
    assert [answer["reason"] for answer in answers] == [DEADLINE, DEADLINE]
    assert time.perf_counter() - started >= 0.1
    draft.model.held.clear()
    assert until(lambda: draft.engine.stats()["answer_slots"] == 0)
    again = await draft.desk.write({"prompt": PROMPT, "length": 5})
    assert again[0]["tokens"] == reference(PROMPT, 5, Sampling(0.0, 0))


async def test_a_caller_that_leaves_takes_its_request_back(draft: Draft) -> None:
    task = asyncio.create_task(draft.desk.write({"prompt": PROMPT, "k": 3, "length": 400, "deadline_s": 60.0}))
    while draft.engine.stats()["answers_running"] == 0:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert until(lambda: draft.engine.stats()["slots_free"] == 8)
    listening = draft.desk.stream({"prompt": PROMPT, "k": 3, "length": 400, "deadline_s": 60.0})
    reading = asyncio.create_task(anext(listening))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await listening.aclose()
    assert until(lambda: draft.engine.stats()["slots_free"] == 8)


async def test_too_many_are_told_at_once(draft: Draft) -> None:
    draft.model.held.set()
    ask = {"prompt": PROMPT, "length": 20, "deadline_s": 20.0}
    taken = [asyncio.create_task(draft.desk.write(ask)) for _ in range(8)]
    await asyncio.sleep(0.05)
    answers = await draft.desk.write({**ask, "k": 2})
    assert [answer["reason"] for answer in answers] == [BUSY, BUSY]
    draft.model.held.clear()
    assert all(answers[0]["reason"] == "" for answers in await asyncio.gather(*taken))


async def test_a_dead_thread_is_an_error_within_the_deadline(draft: Draft) -> None:
    draft.model.dies = True
    request = {"prompt": PROMPT, "length": 20, "deadline_s": 0.3}
    for _ in range(2):  # it dies of the first one and is dead for the second
        with pytest.raises(RuntimeError, match="died"):
            await draft.desk.write(request)


async def test_what_cannot_be_honoured_is_an_error(draft: Draft) -> None:
    for wrong in ({"prompt": [1], "k": 99}, {"prompt": [10**6]}, {"prompt": [1], "tokens": 3}):
        with pytest.raises(ValueError, match="request for answers"):
            await draft.desk.write(wrong)


def test_waking_a_server_needs_no_idle_work_and_harms_no_messages() -> None:
    server = DraftServer(FakeDrafter(always(7)), "127.0.0.1", "d", FAULTS)
    server.start()
    for _ in range(100_000):
        server.wake()
    assert server.alive
    server.stop()
    server.wake()
