"""The answer chain with parts that answer, hang, raise and lie: there is always a decision, and it says why."""

import asyncio
import time
from typing import Any

import pytest

from deployments.api.answers import Sources
from deployments.config.answer import Answer
from deployments.router.answer_chain import Decision
from deployments.router.calls import Unavailable
from tests.unit.answer_fakes import FAULTS, FakeCalls, FakeMetrics, WordPrompts, chain, plan

ASK = [{"role": "user", "content": "what is it"}]
YES, NO, MAYBE = "it is so indeed", "never at all by anybody", "who could tell today"


class Run:
    """One request over fakes."""

    def __init__(self, **parts: Any) -> None:
        self.prompts, self.metrics = WordPrompts(), FakeMetrics()
        self.calls = FakeCalls(self.prompts, **parts)
        self.chain = chain(self.calls, self.prompts, self.metrics)
        self.events: list[tuple[str, dict[str, Any]]] = []

    async def decide(self, messages: Any = ASK, **changes: Any) -> Decision:
        said: dict[str, Any] = {"tenant": "t", "temperature": 0.0, "seed": 7, "max_tokens": 20}
        options = {name: changes.pop(name) for name in list(changes) if name in said or name == "template_kwargs"}
        tell = lambda name, details: self.events.append((name, details))  # noqa: E731
        decision = await self.chain.decide(messages, plan(**changes), tell=tell, **{**said, **options})
        assert sum(name == "decision" for name, _ in self.events) == 1
        return decision

    def asked(self, name: str) -> list[Any]:
        return [what for who, what in self.calls.asked if who == name]


class TestOutcomes:
    async def test_two_that_agree_are_given_to_the_target(self) -> None:
        run = Run(write=[NO, YES, YES])
        decision = await run.decide()
        assert (decision.outcome, decision.how, decision.chosen, decision.given) == ("consensus", "agreed", 1, [1, 2])
        assert decision.tokens() == [run.prompts.ids(YES)] * 2
        assert not run.asked("score")
        assert run.metrics.outcomes == ["consensus"]

    async def test_nobody_is_waited_for_once_two_agree(self) -> None:
        run = Run(write=5.0, draft={"rules": YES, "templates": YES, "retrieval": 5.0})
        began = time.monotonic()
        decision = await run.decide(sources=Sources(models=("a",), evidence=("rules", "templates", "retrieval")))
        assert decision.outcome == "consensus"
        assert time.monotonic() - began < FAULTS.answer_drafts_s
        assert decision.found.reasons == {"model:a": "not_needed", "retrieval": "not_needed"}
        await asyncio.sleep(0)
        assert set(run.calls.cancelled) == {"model:a", "retrieval"}
        assert not run.metrics.failures

    async def test_divergence_goes_to_the_likeliest(self) -> None:
        run = Run(write=[YES, NO, MAYBE])
        liked = run.prompts.ids(NO)
        run.calls._liking = lambda draft: -0.5 if draft == liked else -2.0
        decision = await run.decide()
        assert (decision.outcome, decision.how, decision.chosen, decision.given) == ("divergence", "likeliest", 1, [1])
        assert decision.standing == {0: -2.0, 1: -0.5, 2: -2.0}

    async def test_nothing_is_scored_where_nobody_would_know_the_difference(self) -> None:
        run = Run(write=[YES, NO])
        decision = await run.decide(k=2, judge=False)
        assert (decision.how, decision.given) == ("unscored", [0, 1])
        assert not run.asked("score")

    async def test_one_draft_is_given_as_it_is(self) -> None:
        run = Run(write=[YES])
        decision = await run.decide(k=1)
        assert (decision.outcome, decision.how, decision.given) == ("leaning", "only", [0])
        assert not run.asked("score")

    async def test_no_draft_is_a_plain_answer(self) -> None:
        decision = await Run(write=[]).decide()
        assert (decision.outcome, decision.how, decision.tokens()) == ("none", "plain", [])

    async def test_write_puts_the_drafts_before_the_target(self) -> None:
        decision = await Run(write=[YES, NO]).decide(k=2, resolve="write")
        assert decision.how == "written"
        assert decision.message is not None
        assert decision.message.startswith("what is it")
        assert YES in decision.message
        assert NO in decision.message

    async def test_what_does_not_fit_is_chosen_instead(self) -> None:
        run = Run(write=[YES, NO])
        run.chain = chain(run.calls, run.prompts, run.metrics, max_model_len=60)
        decision = await run.decide(k=2, resolve="write")
        assert (decision.how, decision.message) == ("likeliest", None)
        assert decision.found.reasons["write"] == "too_long"
        assert ("write", "too_long") in run.metrics.failures

    async def test_abstain(self) -> None:
        decision = await Run(write=[YES, NO]).decide(k=2, resolve="abstain")
        assert (decision.how, decision.given) == ("abstained", [])
        assert decision.told()["distances"] == [[0.0, 1.0], [1.0, 0.0]]
        assert (await Run(write=[YES, YES]).decide(k=2, resolve="abstain")).how == "agreed"

    async def test_a_second_round_asks_others_and_goes_on_from_there(self) -> None:
        run = Run(write=[YES, NO], draft={"rules": NO})
        decision = await run.decide(k=2, escalate=Sources(evidence=("rules",)))
        assert (decision.outcome, decision.given) == ("consensus", [1, 2])
        run = Run(write=[YES, YES], draft={"rules": NO})
        await run.decide(k=2, escalate=Sources(evidence=("rules",)))
        assert not run.asked("rules")

    async def test_a_second_round_of_the_same_model_draws_other_samples(self) -> None:
        run = Run(write=[YES, NO])
        decision = await run.decide(k=2, escalate=Sources(models=("a",)))
        first, second = run.asked("model:a")
        assert (first["seed"], second["seed"]) == (7, 9)
        assert [candidate.source for candidate in decision.found.candidates][:3] == [f"model:a#{n}" for n in range(3)]

    async def test_drafts_are_dealt_out_among_models(self) -> None:
        run = Run(write={"a": [YES, NO], "b": [MAYBE]})
        decision = await run.decide(sources=Sources(models=("a", "b")))
        assert [what["k"] for what in (*run.asked("model:a"), *run.asked("model:b"))] == [2, 1]
        assert len(decision.found.candidates) == 3

    async def test_what_is_asked_of_a_model(self) -> None:
        run = Run(write=[YES])
        await run.decide(k=1, max_tokens=5, temperature=0.4)
        (asked,) = run.asked("model:a")
        assert asked["length"] == 5
        assert asked["temperature"] == 0.4
        assert asked["stop"] == [0]
        assert asked["tenant"] == "t"
        assert asked["prompt"] == run.prompts.ids("what is it")

    async def test_drafts_that_the_request_brought_are_among_them(self) -> None:
        run = Run(write=5.0, draft={"rules": NO})
        decision = await run.decide(texts=(YES, f" {YES} "), sources=Sources(models=("a",), evidence=("rules",)))
        assert (decision.outcome, decision.given) == ("consensus", [0, 1])
        assert [candidate.source for candidate in decision.found.candidates] == ["given#0", "given#1"]

    async def test_a_draft_that_is_too_long_is_cut(self) -> None:
        run = Run(draft={"rules": "word " * 40})
        decision = await run.decide(sources=Sources(evidence=("rules",)))
        (draft,) = decision.found.candidates
        assert (len(draft.tokens), len(draft.ends), draft.text, draft.finished) == (16, 16, "word " * 16, False)


class TestTags:
    async def test_an_invalid_draft_takes_no_part(self) -> None:
        run = Run(write=[YES, YES, NO], tags=lambda text: "invalid" if text.strip() == YES else "valid")
        decision = await run.decide(validators=({"name": "json"},))
        assert (decision.outcome, decision.chosen, decision.how) == ("leaning", 2, "only")
        assert decision.told()["drafts"][0]["tags"] == [{"validator": "json", "tag": "invalid", "why": ""}]

    @pytest.mark.parametrize(
        ("tags", "reason"),
        [
            (5.0, "deadline_missed"),
            (RuntimeError("no"), "raised"),
            ([[{}]], "bad_answer"),
            ([], "bad_answer"),
            (Unavailable(), "no_replica"),
        ],
    )
    async def test_a_validator_that_fails_is_unknown(self, tags: Any, reason: str) -> None:
        run = Run(write=[YES, YES], tags=tags)
        decision = await run.decide(k=2, validators=({"name": "json"},))
        assert decision.outcome == "consensus"
        assert decision.found.tags[0] == [{"validator": "json", "tag": "unknown", "why": reason}]
        assert ("validators", reason) in run.metrics.failures


class TestFailures:
    @pytest.mark.parametrize(
        ("write", "reason"),
        [
            (5.0, "deadline_missed"),
            (RuntimeError("no"), "raised"),
            (Unavailable(), "no_replica"),
            ("nonsense", "bad_answer"),
            (None, "raised"),
            ([{"tokens": [1]}], "bad_answer"),
            ([{"tokens": [10**6], "top_ids": b"", "top_probs": b"", "finished": True}], "bad_answer"),
            ([{"tokens": [1], "top_ids": b"123", "top_probs": b"", "finished": True}], "bad_answer"),
            ([{"tokens": [1] * 17, "top_ids": b"", "top_probs": b"", "finished": True}], "bad_answer"),
        ],
    )
    async def test_a_model_that_fails_is_left_out(self, write: Any, reason: str) -> None:
        run = Run(write=write, draft={"rules": YES})
        decision = await run.decide(sources=Sources(models=("a",), evidence=("rules",)))
        assert decision.found.reasons == {"model:a": reason}
        assert (decision.how, decision.chosen) == ("only", 0)
        assert ("model", reason) in run.metrics.failures

    @pytest.mark.parametrize("said", [5.0, ValueError("no"), [], [{"text": 5}], [{"text": "x" * 20_000}], 7])
    async def test_a_source_that_fails_is_left_out(self, said: Any) -> None:
        run = Run(write=[YES, YES, NO], draft={"rules": said})
        decision = await run.decide(sources=Sources(models=("a",), evidence=("rules",)))
        assert (decision.outcome, decision.given) == ("consensus", [0, 1])

    async def test_nothing_to_say_is_no_failure(self) -> None:
        run = Run(draft={"rules": "  "})
        decision = await run.decide(sources=Sources(evidence=("rules",)))
        assert decision.found.reasons == {"rules": "no_match"}
        assert not run.metrics.failures

    async def test_who_hangs_again_and_again_is_not_asked(self) -> None:
        run = Run(write=5.0)
        for _ in range(FAULTS.circuit_failures):
            await run.decide()
            run.events.clear()
        began = time.monotonic()
        decision = await run.decide()
        assert decision.found.reasons == {"model:a": "circuit_open"}
        assert time.monotonic() - began < FAULTS.answer_drafts_s

    async def test_part_of_an_answer_counts_with_its_reason(self) -> None:
        run = Run()
        run.calls._write = [run.calls.written(YES, finished=False, reason="deadline"), run.calls.written("")]
        decision = await run.decide(k=2)
        assert decision.found.reasons == {"model:a#0": "deadline", "model:a#1": "empty"}
        assert not decision.found.candidates[0].finished

    @pytest.mark.parametrize(
        ("liking", "reason"),
        [
            (5.0, "deadline_missed"),
            (RuntimeError("no"), "raised"),
            ("the prompt is empty", "the prompt is empty"),
            (lambda draft: float("nan"), "bad_answer"),
        ],
    )
    async def test_without_scores_all_drafts_are_given(self, liking: Any, reason: str) -> None:
        run = Run(write=[YES, NO])
        run.calls._liking = [liking] if False else liking
        if liking == 5.0:
            run.calls.score = _hang  # type: ignore[method-assign]
        decision = await run.decide(k=2)
        assert (decision.how, decision.given, decision.chosen) == ("unscored", [0, 1], None)
        assert decision.found.reasons["score"] == reason

    @pytest.mark.parametrize(
        "messages",
        [
            [{"role": "assistant", "content": "hello"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [],
        ],
    )
    async def test_a_conversation_that_is_no_question_is_answered_plainly(self, messages: Any) -> None:
        run = Run(write=[YES])
        decision = await run.decide(messages)
        assert (decision.outcome, decision.how) == ("failed", "plain")
        assert decision.found.reasons["chain"].startswith("failed: ")
        assert run.metrics.failures == {("chain", "other")}

    async def test_a_template_that_raises_is_answered_plainly(self) -> None:
        run = Run(write=[YES])
        run.prompts.prompt = _raise  # type: ignore[method-assign]
        assert (await run.decide()).told()["reasons"] == {"chain": "failed"}


class TestTokenMode:
    async def test_evidence_speeds_it_up_or_stays_out(self) -> None:
        run = Run(draft={"rules": YES, "retrieval": RuntimeError("no"), "templates": 5.0})
        given = await run.chain.given_by_evidence(ASK, ["rules", "retrieval", "templates"], "t")
        assert given == [run.prompts.ids(YES)]
        assert run.metrics.failures == {("retrieval", "raised"), ("templates", "deadline_missed")}
        assert await run.chain.given_by_evidence([], ["rules"], "t") == []


async def test_events_tell_what_happens_in_order() -> None:
    run = Run(write=[YES, NO])
    await run.decide(k=2, validators=({"name": "json"},))
    assert [(name, details.get("index")) for name, details in run.events] == [
        ("draft", 0),
        ("draft", 1),
        ("tags", 0),
        ("tags", 1),
        ("decision", None),
    ]


def test_settings_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="agree"):
        Answer(agree=0.3, diverge=0.2)
    with pytest.raises(ValueError, match="drafts is missing"):
        Answer(template="$question")


async def _hang(*_: Any) -> Any:
    await asyncio.sleep(0)
    raise TimeoutError


def _raise(*_: Any) -> Any:
    raise KeyError("no template")
