"""Following draft replicas: every change reaches the engine once, and no failure ends the following."""

import asyncio
from typing import Any

import pytest

from deployments.chain.faults import FaultPolicy
from deployments.target.discovery import Ask, DraftDiscovery
from deployments.target.replicas import Answers


class Engine:
    """Answers control calls and remembers the sets of drafts it was told."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.fail = False
        self.offer: dict[str, Any] | None = {}

    async def rpc(self, method: str, timeout: float = 0.0, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.fail:
            raise RuntimeError("engine busy")
        if method == "client_key":
            return ["key"]
        if method == "kv_offer":
            return [self.offer]
        assert method == "connect_drafts"
        names = sorted(endpoint["name"] for endpoint in args[0])
        self.told.append(names)
        return [names]


class Draft:
    """A deployment with replicas that come, go and hang."""

    def __init__(self, *replicas: str) -> None:
        self.replicas = list(replicas)
        self.silent = 0
        self.error: Exception | None = None
        self.keys: list[str] = []
        self.offers: list[dict[str, Any]] = []

    def ask(self) -> Ask:
        async def ask(key: str, offer: dict[str, Any]) -> Answers:
            self.keys.append(key)
            self.offers.append(offer)
            if self.error is not None:
                raise self.error
            return Answers([{"name": name, "address": f"tcp://{name}"} for name in self.replicas], self.silent)

        return ask


@pytest.fixture
def engine() -> Engine:
    return Engine()


def discovery(engine: Engine, **drafts: Draft) -> DraftDiscovery:
    asks = {name: draft.ask() for name, draft in drafts.items()}
    return DraftDiscovery(asks, engine.rpc, FaultPolicy(discovery_period_s=0.001))


async def test_every_replica_of_every_draft_is_told_once(engine: Engine) -> None:
    a, b = Draft("a1", "a2"), Draft("b1")
    looking = discovery(engine, a=a, b=b)
    await looking.look()
    await looking.look()
    assert engine.told == [["a1", "a2", "b1"]]
    assert a.keys == ["key", "key"]


async def test_replicas_come_and_go(engine: Engine) -> None:
    draft = Draft()
    looking = discovery(engine, a=draft)
    await looking.look()
    assert engine.told == []
    for replicas in (["a1"], ["a1", "a2"], ["a2"], []):
        draft.replicas = replicas
        await looking.look()
    assert engine.told == [["a1"], ["a1", "a2"], ["a2"], []]


async def test_a_silent_replica_keeps_its_socket(engine: Engine) -> None:
    draft = Draft("a1", "a2")
    looking = discovery(engine, a=draft)
    await looking.look()
    draft.replicas, draft.silent = ["a1"], 1
    await looking.look()
    assert engine.told == [["a1", "a2"]]
    draft.silent = 0
    await looking.look()
    assert engine.told[-1] == ["a1"]


async def test_serve_in_trouble_disconnects_nothing(engine: Engine) -> None:
    draft = Draft("a1")
    looking = discovery(engine, a=draft)
    await looking.look()
    draft.error = ConnectionError("controller gone")
    await looking.look()
    assert looking.connected == ["a1"]


async def test_a_failed_control_call_is_retried(engine: Engine) -> None:
    draft = Draft("a1")
    looking = discovery(engine, a=draft)
    engine.fail = True
    task = asyncio.create_task(looking.run())
    await asyncio.sleep(0.01)
    engine.fail = False
    while not engine.told:
        await asyncio.sleep(0.001)
    task.cancel()
    assert engine.told == [["a1"]]


async def test_no_drafts_asks_nothing(engine: Engine) -> None:
    engine.fail = True
    await discovery(engine).look()


async def test_the_offer_of_kv_follows_once_it_is_known(engine: Engine) -> None:
    engine.offer = None
    draft = Draft("a1")
    looking = discovery(engine, a=draft)
    await looking.look()
    engine.offer = {"manifest": b"m", "arena": "x"}
    await looking.look()
    engine.offer = None  # asked no more
    await looking.look()
    assert draft.offers == [{}, {"manifest": b"m", "arena": "x"}, {"manifest": b"m", "arena": "x"}]
