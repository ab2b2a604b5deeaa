"""Slots that answers are written in: borrowed, given back, kept for another request, and never a session's."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.chain.protocol import NO_SLOT, Commit, Sampling
from deployments.draft.answers import Writing
from deployments.draft.health import mend
from deployments.draft.loans import KeptPrompt, Loans
from hw.onnx.costs import StepCosts
from tests.unit.answer_cases import Asked, reference, some_prompt
from tests.unit.draft_fakes import VOCAB, Clock, FakeModel, engine, fresh_draft, opening, step

NAMES = st.sampled_from("abcdef")
ASK = st.tuples(
    st.just("ask"), st.integers(0, 3), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["", "x", "y"])
)
OPERATION = st.one_of(
    ASK,
    st.tuples(st.just("open"), NAMES),
    st.tuples(st.just("commit"), NAMES, st.integers(0, VOCAB - 1)),
    st.tuples(st.just("close"), NAMES),
    st.tuples(st.just("idle"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.floats(0.0, 3.0)),
    st.tuples(st.just("fail"), st.integers(0, VOCAB - 1)),
)


class Play:
    """Operations on a draft with few slots; books and KV checked after each."""

    def __init__(self, slots: int, kept: int) -> None:
        self.clock = Clock()
        self.model = FakeModel(slots=slots, context=64, clock=self.clock)
        self.model.costs = StepCosts(1e-3, 1e-4, 1e-3, 1e-4)
        self.desk = Asked(engine(self.model, clock=self.clock, writing=Writing(waiting=6, kept=kept)))
        self.wanted: list[tuple[list[int], int, int, bool]] = []
        self.known: dict[str, list[int]] = {}
        self.number = 0

    def play(self, what: str, *given: Any) -> None:
        getattr(self, what)(*given)
        self.desk.check()

    def ask(self, prompt: int, k: int, length: int, tenant: str) -> None:
        tokens = [1, 2, 3, *some_prompt(prompt, 8 + 4 * prompt)]
        self.wanted.append((tokens, length, len(self.wanted), self.model.bad_token >= 0))
        self.desk.ask(
            tokens, k=k, length=length, temperature=0.7, seed=len(self.wanted) - 1, tenant=tenant, deadline_s=4.0
        )

    def open(self, name: str) -> None:
        self._send(opening(name, some_prompt(ord(name), 5 + ord(name) % 5)), fresh=True)

    def commit(self, name: str, token: int) -> None:
        if name in self.known and len(self.known[name]) < 40:
            self._send(Commit(name, 0, len(self.known[name]) + 1, [token], 3))

    def close(self, name: str) -> None:
        self.known.pop(name, None)
        self.number += 1
        step(self.desk.drafter, closed=[name], number=self.number)

    def idle(self, calls: int) -> None:
        for _ in range(calls):
            self.desk.drafter.idle(1e-9)
            self.desk.check()

    def cancel(self, index: int) -> None:
        if index < len(self.desk.jobs):
            self.desk.jobs[index].cancel()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def fail(self, token: int) -> None:
        self.model.bad_token = token if self.model.bad_token < 0 else -1

    def _send(self, commit: Commit, fresh: bool = False) -> None:
        self.number += 1
        live = {key[1] for key in self.desk.drafter._store.sessions}
        if fresh and commit.session in live:
            return
        draft = step(self.desk.drafter, [commit], number=self.number).drafts[0]
        # what was live before stays so, unless it was this one that could not be kept
        left = {key[1] for key in self.desk.drafter._store.sessions}
        if self.model.bad_token < 0:
            assert live - left <= {commit.session}
        if commit.session not in left:
            self.known.pop(commit.session, None)
            return
        known = commit.tokens if fresh else self.known[commit.session] + commit.tokens
        self.known[commit.session] = list(known)
        if draft.tokens and self.model.bad_token < 0:
            assert draft.tokens == fresh_draft(list(known), commit.want, None)

    def finish(self) -> None:
        """Whoever waits for a slot gets one, and everything that ended without a reason is what it should be."""
        self.model.bad_token = -1
        for name in list(self.known):
            self.close(name)
        self.desk.run()
        stats = self.desk.drafter.stats()
        assert (stats["answers_running"], stats["answers_waiting"], stats["answer_slots"]) == (0, 0, 0)
        assert stats["slots_free"] + stats["prompts_kept"] == self.model.slots
        for job, answers, (prompt, length, seed, _) in zip(self.desk.jobs, self.desk.answers, self.wanted, strict=True):
            assert job.cancelled or len(answers) == job.request.k
            for index, answer in answers.items():
                expected = reference(prompt, length, Sampling(0.7, seed + index))
                assert answer.tokens == expected[: len(answer.tokens)]
                assert answer.reason or answer.tokens == expected


@settings(deadline=None, max_examples=60)
@example(1, 0, [("ask", 0, 1, 2, ""), ("idle", 1), ("open", "a")])  # an answer has the only slot
@given(st.integers(1, 6), st.integers(0, 2), st.lists(OPERATION, max_size=30))
def test_slots_are_accounted_for_whatever_happens(slots: int, kept: int, operations: list[tuple[Any, ...]]) -> None:
    play = Play(slots, kept)
    for operation in operations:
        play.play(*operation)
    play.finish()


def test_answers_take_high_slots_and_leave_half_to_sessions() -> None:
    desk = Asked(engine(FakeModel(slots=8), ahead=0))
    for seed in range(4):
        desk.ask(some_prompt(seed, 6), k=3, length=8)
    for _ in range(12):
        desk.drafter.idle(1e-9)
    assert desk.drafter._store.loans.writing == {4, 5, 6, 7}
    answer = step(desk.drafter, [opening(name, [3, ord(name) % VOCAB], 2) for name in "abcd"])
    assert [len(draft.tokens) for draft in answer.drafts] == [2, 2, 2, 2]
    refused = step(desk.drafter, [opening("e", [3, 4], 2)], number=2)
    assert refused.drafts[0].reason == NO_SLOT
    desk.run()
    assert step(desk.drafter, [opening("e", [3, 4], 2)], number=3).drafts[0].tokens


def test_branches_make_room_and_sessions_do_not() -> None:
    desk = Asked(engine(FakeModel(slots=4)))
    step(desk.drafter, [opening("a", some_prompt(1, 6)), opening("b", some_prompt(2, 6))])
    while desk.drafter.idle(1e9):
        pass
    assert desk.drafter.stats()["slots_free"] == 0
    assert desk.drafter.stats()["branches"]
    answers = desk.ask(k=2, length=5)
    desk.run()
    assert [answers[index].reason for index in range(2)] == ["", ""]
    assert desk.drafter.stats()["sessions"] == 2


# --- kept prompts -----------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_alike_is_not_read_again() -> None:
    desk = Asked(engine(FakeModel(slots=8, context=256)))
    system = some_prompt(1, 60)
    for number, (tail, tenant, read) in enumerate(
        [
            ([1, 2, 3], "x", 63),
            ([1, 2, 3], "x", 1),
            ([4, 5], "x", 2),
            ([4, 5], "y", 62),
            ([4, 5], "", 62),
            ([4, 5], "", 62),
        ]
    ):
        before = desk.drafter.stats().get("answer_tokens_read", 0)
        answers = desk.ask(system + tail, k=2, length=6, temperature=0.7, seed=number, tenant=tenant)
        desk.run()
        assert desk.drafter.stats()["answer_tokens_read"] - before == read, number
        for index in range(2):
            assert answers[index].tokens == reference(system + tail, 6, Sampling(0.7, number + index))
    assert desk.drafter.stats()["prompts_kept"] == 2  # one a tenant; without a name nothing is kept


def test_kept_prompts_go_first_and_with_time() -> None:
    clock = Clock()
    desk = Asked(engine(FakeModel(slots=2, clock=clock), clock=clock))
    desk.ask(some_prompt(1, 20), length=2, tenant="x")
    desk.run()
    assert (desk.drafter.stats()["prompts_kept"], desk.drafter.stats()["slots_free"]) == (1, 1)
    answer = step(desk.drafter, [opening("a", [1, 2], 2), opening("b", [1, 3], 2)])
    assert [len(draft.tokens) for draft in answer.drafts] == [2, 2]
    assert desk.drafter.stats()["prompts_kept"] == 0
    step(desk.drafter, closed=["a", "b"], number=2)
    desk.ask(some_prompt(1, 20), length=2, tenant="x")
    desk.run()
    clock.now += 61.0
    desk.run()
    assert (desk.drafter.stats()["prompts_kept"], desk.drafter.stats()["slots_free"]) == (0, 2)


def test_a_prompt_that_was_cut_short_is_read_on() -> None:
    desk = Asked(engine(FakeModel(slots=4, context=512)))
    prompt = some_prompt(1, 300)  # more than one call reads
    desk.ask(prompt, tenant="x")
    desk.drafter.idle(1e-9)
    read = desk.drafter.stats()["answer_tokens_read"]
    assert 0 < read < 300
    desk.jobs[0].cancel()
    desk.run()
    answers = desk.ask(prompt, length=3, tenant="x")
    desk.run()
    assert answers[0].tokens == reference(prompt, 3, Sampling(0.0, 0))
    assert desk.drafter.stats()["answer_tokens_read"] == 300
    assert desk.drafter.stats()["answer_tokens_reused"] == read


def test_of_kept_prompts_the_newest_stay_and_the_longest_match_is_taken() -> None:
    loans = Loans()
    for slot, tokens in enumerate([[1] * 10, [2] * 10, [1] * 10 + [3] * 5]):
        loans.writing.add(slot)
        freed = loans.keep(KeptPrompt(slot, "x", tokens, 0.0), 2)
        assert freed == ([0] if slot == 2 else [])  # what a longer one begins with goes
    loans.writing.add(3)
    assert loans.keep(KeptPrompt(3, "x", [4] * 9, 0.0), 2) == [1]
    assert loans.reuse("y", [1] * 20) is None
    assert loans.reuse("x", [1] * 7 + [9] * 20) is None  # too little
    assert loans.reuse("x", [1] * 10 + [3] * 2 + [7]) == (2, 12)
    assert loans.writing == {2}
    assert [kept.slot for kept in loans.kept] == [3]


# --- wrong books ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("break_it", ["leak", "shared", "lost"])
def test_wrong_books_are_mended_and_who_is_concerned_hears_of_it(break_it: str) -> None:
    desk = Asked(engine(FakeModel(slots=8, context=256), ahead=0))
    step(desk.drafter, [opening("a", [1, 2, 3], 2)])
    answers = desk.ask(k=2, length=100)
    for _ in range(6):
        desk.drafter.idle(1e-9)
    store, (job,) = desk.drafter._store, desk.drafter._writer._running
    if break_it == "leak":
        store.loans.writing.add(0 if 0 not in store.table.taken else store.table.take() or 0)
    elif break_it == "shared":
        store.sessions["t", "a"].slot = job.rows[0].slot
    else:
        store.loans.writing.discard(job.rows[0].slot)
    with pytest.raises(AssertionError):
        desk.drafter.check_integrity()
    mend(store, desk.drafter._counts)
    desk.drafter._writer.mend()
    desk.drafter.check_integrity()
    assert desk.drafter.stats()["integrity_violations"] >= 1
    if break_it == "shared":
        assert not store.sessions
    else:
        assert {answer.reason for answer in answers.values()} == {"error"}
    desk.run()
    assert desk.drafter.stats()["answer_slots"] == 0
