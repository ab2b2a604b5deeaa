"""The evidence deployment: each source under its deadline, and what sources should not do."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.faults import FaultPolicy
from deployments.evidence.deployment import EvidenceDeployment
from deployments.evidence.source import MAX_ANSWER_CHARS, MAX_QUESTION_CHARS
from tests.unit.evidence_fakes import Fake, ask, says, wire

FAULTS = FaultPolicy(evidence_threads=2, evidence_queue=2, circuit_pause_s=0.2, drain_timeout_s=1.0)
DEADLINE_S = 0.15


def over(*sources: Fake, faults: FaultPolicy = FAULTS) -> EvidenceDeployment:
    return EvidenceDeployment.over(sources, "no tokenizer there", faults)


async def drafts(evidence: EvidenceDeployment, question: Question, *names: str, **kwargs: Any) -> list[dict[str, Any]]:
    return await evidence.draft(wire(question), list(names) or None, kwargs.get("deadline_s", DEADLINE_S))


def fail(_: Question) -> None:
    raise RuntimeError("no")


@pytest.fixture
def hang() -> Iterator[Callable[[Question], None]]:
    end = threading.Event()
    yield lambda _: (end.wait(30), None)[1]
    end.set()


async def test_every_source_answers_or_says_why_not() -> None:
    evidence = over(Fake("one", says("First.", note="page 1")), Fake("two", lambda _: None), Fake("three", fail))
    assert await drafts(evidence, ask("q")) == [
        {"source": "one", "text": "First.", "tokens": [], "finished": True, "note": "page 1", "reason": ""},
        {"source": "two", "text": "", "tokens": [], "finished": False, "note": "", "reason": "no_match"},
        {"source": "three", "text": "", "tokens": [], "finished": False, "note": "", "reason": "raised"},
    ]
    answers = await drafts(evidence, ask("q"), "two", "nobody", "two")
    assert [(answer["source"], answer["reason"]) for answer in answers] == [
        ("two", "no_match"),
        ("nobody", "unknown_source"),
    ]
    stats = await evidence.stats()
    assert stats["one"]["drafts"] == 1
    assert stats["two"]["miss:no_match"] == 2
    assert stats["three"]["miss:raised"] == 1


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("just text", "wrong_type"),
        ({"text": "a"}, "wrong_type"),
        (Candidate(source="s", text=b"bytes"), "wrong_type"),  # type: ignore[arg-type]
        (Candidate(source="s", text="a", note=None), "wrong_type"),  # type: ignore[arg-type]
        (Candidate(source="s", text="a", finished="yes"), "wrong_type"),  # type: ignore[arg-type]
        (Candidate(source="s", text="a" * (MAX_ANSWER_CHARS + 1)), "too_long"),
        (Candidate(source="s", text="half \ud800"), "not_text"),
        (Candidate(source="s", text="nul \0"), "not_text"),
        (Candidate(source="s", text=" \n"), "no_match"),
    ],
)
async def test_what_is_no_draft_is_refused_and_counted(said: Any, reason: str) -> None:
    evidence = over(Fake("liar", lambda _: said), Fake("honest", says("Yes.")))
    liar, honest = await drafts(evidence, ask("q"))
    assert (liar["text"], liar["reason"]) == ("", reason)
    assert honest["text"] == "Yes."
    assert (await evidence.stats())["liar"][f"miss:{reason}"] == 1


async def test_a_source_cannot_speak_for_another_or_claim_tokens() -> None:
    evidence = over(Fake("rules", says("Yes.", tokens=(1, 2), note="n" * 500)))
    (answer,) = await drafts(evidence, ask("q"))
    assert (answer["source"], answer["tokens"], len(answer["note"])) == ("rules", [], 200)


async def test_drafts_are_cut_between_sentences_to_the_length_asked_for() -> None:
    evidence = over(Fake("one", says("A first sentence. A second one. A third one.")))
    (answer,) = await drafts(evidence, ask("q", length=12))
    assert (answer["text"], answer["finished"]) == ("A first sentence. A second one.", False)
    (answer,) = await drafts(evidence, ask("q", length=64))
    assert (answer["text"], answer["finished"]) == ("A first sentence. A second one. A third one.", True)


async def test_a_source_that_hangs_costs_its_threads_and_nothing_else(hang: Callable[[Question], None]) -> None:
    evidence = over(Fake("stuck", hang), Fake("fine", says("Yes.")))
    before = threading.active_count()
    reasons = []
    for _ in range(8):
        stuck, fine = await drafts(evidence, ask("q"))
        assert fine["text"] == "Yes."
        reasons.append(stuck["reason"])
    assert reasons[: FAULTS.circuit_failures] == ["deadline_missed"] * FAULTS.circuit_failures
    assert "circuit_open" in reasons
    # two threads for the one that hangs, at most two for the other
    assert threading.active_count() - before <= 2 * FAULTS.evidence_threads
    assert (await evidence.stats())["stuck"]["circuit_open"] == 1


async def test_the_circuit_closes_again_when_the_source_is_back() -> None:
    answers = [fail] * FAULTS.circuit_failures
    evidence = over(Fake("s", lambda question: answers.pop()(question) if answers else says("Back.")(question)))
    for _ in range(FAULTS.circuit_failures):
        await drafts(evidence, ask("q"))
    assert (await drafts(evidence, ask("q")))[0]["reason"] == "circuit_open"
    await asyncio.sleep(FAULTS.circuit_pause_s * 1.2)
    assert (await drafts(evidence, ask("q")))[0]["text"] == "Back."
    assert (await evidence.stats())["s"]["circuit_open"] == 0


async def test_more_calls_than_may_wait_are_refused_at_once(hang: Callable[[Question], None]) -> None:
    evidence = over(Fake("stuck", hang), faults=replace(FAULTS, circuit_failures=100))
    answers = await asyncio.gather(*(drafts(evidence, ask("q")) for _ in range(8)))
    reasons = sorted(answer[0]["reason"] for answer in answers)
    # two run, two wait; a thread may take one from the queue before all eight are there
    assert set(reasons) == {"busy", "deadline_missed"}
    assert 2 <= reasons.count("busy") <= 6


async def test_a_caller_that_leaves_is_no_fault_of_the_source() -> None:
    release = threading.Event()
    evidence = over(Fake("slow", lambda question: (release.wait(10), says("Yes.")(question))[1]))
    for _ in range(FAULTS.circuit_failures):
        call = asyncio.ensure_future(drafts(evidence, ask("q"), deadline_s=2.0))
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    release.set()
    assert (await drafts(evidence, ask("q"), deadline_s=2.0))[0]["text"] == "Yes."


async def test_no_deadline_of_a_caller_exceeds_ours(hang: Callable[[Question], None]) -> None:
    evidence = over(Fake("stuck", hang), faults=replace(FAULTS, evidence_deadline_s=0.1))
    began = time.monotonic()
    (answer,) = await drafts(evidence, ask("q"), deadline_s=25.0)
    assert answer["reason"] == "deadline_missed"
    assert time.monotonic() - began < 20
    assert (await drafts(evidence, ask("q"), deadline_s=0.0))[0]["reason"] == "deadline_missed"


@pytest.mark.parametrize(
    "change",
    [{"text": 3}, {"messages": [["user"]]}, {"length": 0}, {"length": "many"}, {"tenant": None}, {"text": "\ud800"}],
)
async def test_what_is_no_question_is_refused(change: dict[str, Any]) -> None:
    evidence = over(Fake("one", says("Yes.")))
    with pytest.raises(ValueError):
        await evidence.draft(wire(ask("q")) | change, None, DEADLINE_S)


async def test_sources_see_bounded_questions() -> None:
    seen: list[Question] = []
    evidence = over(Fake("one", seen.append))
    long = "x" * (2 * MAX_QUESTION_CHARS)
    await drafts(evidence, ask(long, before=[("user", long)] * 100))
    assert len(seen[0].text) == MAX_QUESTION_CHARS
    assert len(seen[0].messages) == 64
    assert all(len(text) == MAX_QUESTION_CHARS for _, text in seen[0].messages)


async def test_learning_waits_for_nobody_and_needs_a_tenant() -> None:
    source = Fake("one", says("Yes."))
    evidence = over(source)
    await evidence.learn(wire(ask("q", tenant="")), "a")
    await evidence.learn(wire(ask("q")), " ")
    await evidence.learn(wire(ask("q")), "x" * (MAX_ANSWER_CHARS + 1))
    await evidence.learn(wire(ask("q")), "a")
    evidence.close()
    assert source.learned == [("q", "a")]
    assert source.closed.is_set()


async def test_what_cannot_be_learned_is_forgotten_and_counted() -> None:
    source = Fake("one", says("Yes."))
    source.learn = lambda question, answer: fail(question)  # type: ignore[method-assign]
    evidence = over(source)
    await evidence.learn(wire(ask("q")), "a")
    evidence.close()
    assert (await evidence.stats())["one"]["forgotten:raised"] == 1
