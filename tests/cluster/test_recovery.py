"""Drafts that die, hang or lose their clients while requests run: answers stay the target's own, and drafting comes back."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import App, wait_until
from tests.cluster.drafts import BACK_S, MODEL_ONLY, counter, draft_actor, stuck_draft, wait_for_acceptance

pytestmark = pytest.mark.cluster

PROMPTS = [f"Describe the number {number} in one sentence." for number in range(16)]


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def plain(app: App) -> list[str]:
    """Answers to ``PROMPTS`` without drafts."""
    return [content(answer) for answer in app.chat_all(PROMPTS, chain={"enabled": False})]


@pytest.fixture
def drafting(app: App) -> None:
    """Drafts are at work before the test."""
    wait_for_acceptance(app)


@dataclass
class Streams:
    """Streamed chats that are read together, and what has arrived of each."""

    app: App
    prompts: list[str]
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts = ["" for _ in self.prompts]
        self.reasons: list[str | None] = [None for _ in self.prompts]

    @property
    def unfinished(self) -> int:
        return self.reasons.count(None)

    async def read(self, client: httpx.AsyncClient, index: int) -> None:
        """One chat to its end."""
        body = self.app.body(self.prompts[index], stream=True, **self.changes)
        async with client.stream("POST", f"{self.app.url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                self.texts[index] += choice["delta"].get("content") or ""
                self.reasons[index] = choice["finish_reason"] or self.reasons[index]

    async def all_started(self) -> None:
        while not all(self.texts):
            await asyncio.sleep(0.005)


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))


@pytest.mark.usefixtures("drafting")
def test_draft_killed_while_requests_stream(app: App, plain: list[str]) -> None:
    import ray

    actor = draft_actor(app)
    before = app.stats()["connected"]
    streams = Streams(app, PROMPTS, {"chain": MODEL_ONLY})

    async def run() -> int:
        async with client() as http:
            reading = asyncio.gather(*(streams.read(http, index) for index in range(len(PROMPTS))))
            await streams.all_started()
            unfinished = streams.unfinished
            ray.kill(actor)
            await reading
            return unfinished

    assert asyncio.run(run()) > 0, "all had finished before the kill"
    assert streams.texts == plain
    assert set(streams.reasons) <= {"length", "stop"}
    # while there is no draft, requests are answered as before
    assert content(app.chat(PROMPTS[1])) == plain[1]
    wait_until(lambda: app.stats()["connected"] not in ([], before), timeout_s=BACK_S, every_s=1.0)
    wait_for_acceptance(app)


@pytest.mark.usefixtures("drafting")
def test_draft_alive_but_stuck(app: App, plain: list[str]) -> None:
    connected, skipped = app.stats()["connected"], counter(app, "miss:circuit_open")
    with stuck_draft(app):
        answers = app.chat_all(PROMPTS, chain=MODEL_ONLY)
        assert [content(answer) for answer in answers] == plain
        assert counter(app, "miss:circuit_open") > skipped
        assert counter(app, "drafts_usable") == 0
    wait_for_acceptance(app)
    assert app.stats()["connected"] == connected, "the replica was replaced: it was stopped for too long"


@pytest.mark.usefixtures("drafting")
def test_clients_that_leave_in_mid_stream_leave_nothing_behind(app: App) -> None:
    streams = Streams(app, [PROMPTS[index % 16] for index in range(40)], {"max_tokens": 1500, "ignore_eos": True})

    async def run() -> None:
        async with client() as http:
            reading = [asyncio.create_task(streams.read(http, index)) for index in range(40)]
            while sum(map(bool, streams.texts)) < 8:  # the engine runs 16 at once; the others wait in it
                await asyncio.sleep(0.005)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    asyncio.run(run())
    assert streams.unfinished == 40
    # requests that waited in the engine would show up as sessions once others left
    wait_until(lambda: counter(app, "sessions") == 0, timeout_s=20)
    time.sleep(2)
    assert counter(app, "sessions") == 0
    wait_until(lambda: app.draft().stats.remote().result(timeout_s=60)["sessions"] == 0, timeout_s=20)


def test_one_of_a_batch_leaves_and_the_others_finish(app: App, plain: list[str]) -> None:
    streams = Streams(app, PROMPTS[:6])

    async def run() -> None:
        async with client() as http:
            reading = [asyncio.create_task(streams.read(http, index)) for index in range(6)]
            await streams.all_started()
            reading[2].cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    asyncio.run(run())
    stayed = [0, 1, 3, 4, 5]
    assert [streams.texts[index] for index in stayed] == [plain[index] for index in stayed]
