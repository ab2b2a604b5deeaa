"""Validation over both back-ends: the same contract for a queue in this process and for workers behind a real Redis."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.chain.faults import FaultPolicy
from deployments.config.validators import Validators
from deployments.evidence.deployment import EvidenceDeployment
from deployments.evidence.validators.base import ParameterError
from deployments.evidence.validators.embedded import EmbeddedQueue
from deployments.evidence.validators.redis_stream import RedisStream
from deployments.evidence.validators.redis_worker import RedisWorker
from deployments.evidence.validators.registry import Registry
from deployments.evidence.validators.validation import MAX_VALIDATORS, Validation
from tests.unit import redis_server

FAULTS = replace(FaultPolicy(), validator_limit_s=1.0, circuit_pause_s=0.3, circuit_failures=2)
PLENTY_S = 20.0
OWN = ("short", "judged", "printing", "hanging", "dying", "hungry", "leaving", "slow", "asked")
CONFIGURED: dict[str, dict[str, Any]] = {
    name: {"kind": "custom", "function": f"tests.unit.validator_functions:{name}"} for name in OWN
}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    try:
        with redis_server.running() as (url, _):
            yield url
    except RuntimeError as error:
        pytest.skip(str(error))


@asynccontextmanager
async def validation(
    kind: str,
    request: pytest.FixtureRequest,
    faults: FaultPolicy = FAULTS,
    configured: dict[str, Any] = CONFIGURED,
    queue: int = 64,
) -> AsyncIterator[Validation]:
    registry = Registry(configured)
    embedded = EmbeddedQueue(registry, faults, queue=queue)
    embedded.start()
    if kind == "embedded":
        front = Validation(registry, embedded, faults)
        yield front
        await front.close()
        return
    url, stream = request.getfixturevalue("redis_url"), f"test:{time.monotonic_ns()}"
    worker = RedisWorker(url, embedded, faults, stream=stream)
    stop = asyncio.Event()
    serving = asyncio.create_task(worker.serve(stop))
    front = Validation(registry, RedisStream(url, faults, stream=stream, queue=queue), faults)
    try:
        yield front
    finally:
        await front.close()
        stop.set()
        await asyncio.wait_for(serving, PLENTY_S)
        await embedded.close()


both = pytest.mark.parametrize("kind", ["embedded", "redis"])


async def one(front: Validation, text: str, name: str, budget_s: float = PLENTY_S, **context: Any) -> dict[str, str]:
    (((tag),),) = await front.validate([text], [{"name": name}], budget_s, context)
    return tag


@both
async def test_tags(kind: str, request: pytest.FixtureRequest) -> None:
    async with validation(kind, request) as front:
        specs = [{"name": "json_syntax"}, {"name": "python_syntax"}, {"name": "short"}, {"name": "nobody"}]
        found = await front.validate(["[1]", "x ="], specs, PLENTY_S)
        assert [[tag["tag"] for tag in row] for row in found] == [
            ["valid", "valid", "valid", "unknown"],
            ["invalid", "invalid", "valid", "unknown"],
        ]
        assert [tag["validator"] for tag in found[0]] == ["json_syntax", "python_syntax", "short", "nobody"]
        assert "known: python_syntax" in found[0][3]["why"]
        want = {"yes": "valid", "no": "invalid", "maybe": "unknown", "lie": "unknown", "odd": "unknown"}
        assert {text: (await one(front, text, "judged"))["tag"] for text in want} == want
        assert (await one(front, "pair", "judged"))["why"] == "rude"


async def test_who_counts_tags_hears_of_each_under_few_names() -> None:
    heard: list[tuple[str, str, str]] = []
    registry = Registry()
    queue = EmbeddedQueue(registry, FAULTS)
    front = Validation(registry, queue, FAULTS, tagged=lambda *tag: heard.append(tag))
    await front.validate(["[1]", "x ="], [{"name": "json_syntax"}, {"name": "nobody"}], PLENTY_S)
    await front.validate(["[1]"], [{"name": "json_syntax"}], 0.0)  # from the cache
    await front.validate(["[2]"], [{"name": "json_syntax"}], 0.0)
    assert heard == [
        ("json_syntax", "valid", ""),
        ("other", "unknown", "bad_parameters"),
        ("json_syntax", "invalid", ""),
        ("other", "unknown", "bad_parameters"),
        ("json_syntax", "valid", ""),
        ("json_syntax", "unknown", "late"),
    ]
    await front.close()


@both
async def test_misbehaviour_is_unknown_and_the_next_one_is_served(kind: str, request: pytest.FixtureRequest) -> None:
    async with validation(kind, request) as front:
        for name, text, why in [
            ("hanging", "hang", "took longer than 1 s"),
            ("dying", "die", "ended its process"),
            ("hungry", "x", "MemoryError"),
            ("leaving", "x", "ended its process"),
            ("judged", "lie", "TypeError"),
            ("judged", "other", "KeyError"),
        ]:
            tag = await one(front, text, name)
            assert (tag["tag"], why in tag["why"]) == ("unknown", True), tag
        assert (await one(front, "x", "printing"))["tag"] == "valid"  # what it prints is nobody's answer
        assert (await one(front, "fine", "hanging"))["tag"] == "valid"


@both
async def test_late_tags_are_unknown_and_there_the_next_time(kind: str, request: pytest.FixtureRequest) -> None:
    async with validation(kind, request) as front:
        assert (await one(front, "warm", "short"))["tag"] == "valid"
        began = time.monotonic()
        late = await one(front, "x", "slow", budget_s=0.05)
        assert time.monotonic() - began < 0.3
        assert late["tag"] == "unknown"
        assert late["why"] == "not there within 0.05 s"
        assert (await one(front, "x", "slow"))["tag"] == "valid"
        assert front.stats()["failure:late"] == 1


@both
async def test_results_are_kept_and_equal_jobs_run_once(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    counting = {
        "kind": "custom",
        "function": "tests.unit.validator_functions:counting",
        "parameters": {"file": str(marks)},
    }
    async with validation(kind, request, configured={"counting": counting}) as front:
        found = await asyncio.gather(*(one(front, "same", "counting") for _ in range(5)))
        found += [await one(front, "same", "counting")]
        assert {tag["tag"] for tag in found} == {"valid"}
        assert marks.read_text() == "x"
        await one(front, "same", "counting", tenant="a")
        await one(front, "same", "counting", tenant="b")
        assert marks.read_text() == "xxx"  # tenants do not learn from one another's


@both
async def test_context_arrives(kind: str, request: pytest.FixtureRequest) -> None:
    async with validation(kind, request) as front:
        assert (await one(front, "x", "asked", question="Why?", tenant="t"))["why"] == "Why? t"
        cut = await front.validate(
            ["x = (", "x = ("], [{"name": "python_syntax"}], PLENTY_S, {"finished": [True, False]}
        )
        assert [row[0]["tag"] for row in cut] == ["invalid", "unknown"]
        huge = await front.validate(["x"], [{"name": "asked"}], PLENTY_S, {"question": "q" * 100_000, "tenant": "t"})
        assert huge[0][0]["why"] == "None t"


@both
async def test_a_full_queue_is_unknown_at_once(kind: str, request: pytest.FixtureRequest) -> None:
    async with validation(kind, request, queue=2) as front:
        texts = [str(number) for number in range(8)]
        found = await front.validate(texts, [{"name": "slow"}], PLENTY_S)
        full = [row[0] for row in found if "are waiting already" in row[0]["why"]]
        assert full
        assert len(full) < len(texts)
        assert (await one(front, "x", "short"))["tag"] == "valid"


@both
async def test_what_keeps_failing_is_left_alone_for_a_while(kind: str, request: pytest.FixtureRequest) -> None:
    async with validation(kind, request) as front:
        for number in range(2):
            await one(front, "die", "dying", number=number)  # another context: not the same job
        assert "left alone" in (await one(front, "fine", "dying"))["why"]
        assert (await one(front, "fine", "short"))["tag"] == "valid"
        await asyncio.sleep(FAULTS.circuit_pause_s)
        assert (await one(front, "fine", "dying"))["tag"] == "valid"


async def test_bounds(request: pytest.FixtureRequest) -> None:
    async with validation("embedded", request) as front:
        found = await front.validate(["[]", "x" * 70_000, 7], [{"name": "json_syntax"}] * 9, PLENTY_S)  # type: ignore[list-item]
        assert [row[0]["tag"] for row in found] == ["valid", "unknown", "unknown"]
        assert found[0][MAX_VALIDATORS]["tag"] == "unknown"
        with pytest.raises(ParameterError, match="at most"):
            front.check([{"name": "json_syntax"}] * 9)
        with pytest.raises(ParameterError, match="known"):
            front.check([{"name": "nobody"}])
        assert (await one(front, "\ud800", "json_syntax"))["why"] == "not valid Unicode"
        assert (await one(front, "[]", "json_syntax", tenant="\ud800"))["tag"] in ("valid", "unknown")
        hostile = [None, 3, [], {}, {"name": 3}, {"name": "ranges", "numbers": object()}]
        rows = await front.validate(["x"], hostile, PLENTY_S)  # type: ignore[arg-type]
        assert {tag["tag"] for tag in rows[0]} == {"unknown"}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("tests.unit.nowhere:f", "bad: tests.unit.nowhere:f cannot be loaded: ModuleNotFoundError"),
        ("tests.unit.validator_functions:nothing", "bad: .*cannot be loaded: AttributeError"),
        ("tests.unit.validator_functions:signal", "bad: .* is not callable"),
    ],
)
async def test_functions_are_loaded_at_the_start(function: str, says: str) -> None:
    queue = EmbeddedQueue(Registry({"bad": {"kind": "custom", "function": function}}), FAULTS)
    with pytest.raises(ParameterError, match=says):
        queue.start()
    await queue.close()


async def test_stopping_ends_what_hangs() -> None:
    registry = Registry(CONFIGURED)
    queue = EmbeddedQueue(registry, replace(FAULTS, validator_limit_s=60.0))
    front = Validation(registry, queue, replace(FAULTS, validator_limit_s=60.0))
    late = asyncio.create_task(one(front, "hang", "hanging", budget_s=30.0))
    await asyncio.sleep(1.0)
    began = time.monotonic()
    await front.close()
    assert (await late)["tag"] == "unknown"
    assert time.monotonic() - began < 5.0


async def test_no_redis_is_unknown_and_soon_not_asked(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    registry = Registry()
    front = Validation(registry, RedisStream(f"unix://:hush-hush@{tmp_path}/none.sock", FAULTS), FAULTS)
    with caplog.at_level(logging.DEBUG):
        tags = [await one(front, text, "json_syntax") for text in ("1", "2", "3")]
    assert {tag["tag"] for tag in tags} == {"unknown"}
    assert "cannot be reached" in tags[0]["why"]
    assert "it failed a moment ago" in tags[2]["why"]
    assert "hush-hush" not in caplog.text + str(tags)
    await front.close()


async def test_the_evidence_deployment_validates() -> None:
    evidence = EvidenceDeployment.over([], "no tokenizer there", FAULTS)
    found = await evidence.validate(["[1]", "["], [{"name": "json_syntax"}], PLENTY_S, {"finished": [True, True]})
    assert [row[0]["tag"] for row in found] == ["valid", "invalid"]
    assert (await evidence.stats())["validation"]["tag:valid"] == 1


def test_configuration(tmp_path: Path) -> None:
    (tmp_path / "parts.csv").write_text("name,kind\nTX-20,part\n")
    section = Validators(configured={"parts": {"kind": "entities", "file": "parts.csv"}})
    assert "parts.csv: cannot be read" in section.problem()  # relative to nothing
    assert section.resolved(lambda path: tmp_path / path).problem() == ""
    wrong = Validators(configured={"parts": {"kind": "entity"}})
    assert wrong.problem().startswith("configured.parts.kind: no kind 'entity'; known: python_syntax")
