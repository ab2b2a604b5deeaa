"""Branches: a commit that leaves the guess where a branch does finds exactly the draft that starting anew would give."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import NO_SLOT, PROTOCOL_VERSION, UNKNOWN_SESSION, Commit, Sampling, Step
from deployments.draft.engine import DraftEngine
from deployments.draft.lines import Session
from hw.onnx.costs import StepCosts
from hw.onnx.slots import KVBuffer
from tests.unit.draft_fakes import VOCAB, Clock, FakeModel, check_kv, engine, fresh_draft, opening, step

SAMPLINGS = [None, Sampling(0.9, 17), Sampling(1.2, 2**62, 5, 0.8)]
COSTS = [StepCosts(), StepCosts(1.0, 0.1, 0.0, 5.0), StepCosts(1.0, 0.1, 1.0, 0.1)]


def session_of(drafter: DraftEngine, name: str = "a") -> Session:
    return drafter._store.sessions["t", name]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), sampling=st.sampled_from(SAMPLINGS), costs=st.sampled_from(COSTS), slots=st.integers(3, 9))
def test_whatever_happened_a_draft_is_what_the_committed_tokens_determine(
    data: st.DataObject, sampling: Sampling | None, costs: StepCosts, slots: int
) -> None:
    """Commits follow the main line, branches, or neither; are lost and repeated; epochs reopen; other sources interfere."""
    model = FakeModel(slots=slots, context=512)
    model.costs = replace(costs)
    ahead = data.draw(st.sampled_from([None, 3, 6]))
    drafter = engine(model, clock=Clock(), prefill_wait_s=1e9, faults=FaultPolicy(prefill_budget_s=1e9), ahead=ahead)
    held: dict[str, list[int]] = {}
    hints: dict[str, list[int]] = {}  # tokens of another source that the draft still guesses
    sent: dict[str, int] = {}  # committed tokens the draft knows of
    epochs: dict[str, int] = {}
    token = st.integers(0, VOCAB - 1)
    for _ in range(data.draw(st.integers(1, 10))):
        commits, closed = [], []
        for name in ("a", "b", "c"):
            acts = ["main", "branch", "branch", "other", "lost", "repeat", "rest", "reopen", "hint", "close"]
            act = data.draw(st.sampled_from(acts)) if name in held else "open"
            want = data.draw(st.integers(1, 5)) if act != "hint" else 0
            tokens = held.get(name, [])
            new: list[int] = []
            if act == "open":
                held[name] = data.draw(st.lists(token, min_size=1, max_size=20))
                hints[name], epochs[name], sent[name] = [], 0, len(held[name])
                commits.append(opening(name, held[name], want, sampling=sampling))
                continue
            session = session_of(drafter, name)
            guess = [choice.token for choice in session.guess]
            if act == "close":
                closed.append(name)
                del held[name]
            elif act == "reopen":
                kept = data.draw(st.integers(1, len(tokens)))
                known = tokens[: sent[name]]
                held[name] = tokens = tokens[:kept] + data.draw(st.lists(token, max_size=4))
                shared = tokens[: len(known)] == known
                rest = tokens[len(known) :] if shared else []
                hints[name] = left_of(hints[name], rest) if shared else []
                epochs[name] += 1
                sent[name] = len(tokens)
                commits.append(opening(name, tokens, want, epoch=epochs[name], sampling=sampling))
            elif act in ("main", "hint"):
                new = guess[: data.draw(st.integers(0, len(guess)))]
            elif act == "branch" and session.branches:
                branch = data.draw(st.sampled_from(session.branches))
                own = [choice.token for choice in branch.guess]
                new = [*guess[: branch.start - len(session.tokens)], branch.token]
                new += own[: data.draw(st.integers(0, len(own)))]
            elif act in ("other", "branch"):
                new = [*guess[: data.draw(st.integers(0, len(guess)))], data.draw(token)]
            elif act == "lost":
                tokens += data.draw(st.lists(token, max_size=3))  # the draft hears of them with the next commit
            if act in ("main", "branch", "other", "repeat", "hint"):
                tokens += new
                hints[name] = left_of(hints[name], tokens[sent[name] :])
                overlap = data.draw(st.integers(0, min(2, sent[name] - 1)))
                part = tokens[sent[name] - overlap :]
                sent[name] = len(tokens)
                verifying = []
                if act == "hint":
                    verifying = data.draw(st.lists(token, max_size=4))
                    if data.draw(st.booleans()):
                        verifying = fresh_draft(tokens + hints[name], 3, sampling) + verifying
                    if not starts_with(hints[name], verifying):
                        agreed = fresh_draft(tokens, 12, sampling) if not hints[name] else []
                        hints[name] = hints[name] if agreed[: len(verifying)] == verifying else verifying
                commits.append(Commit(name, epochs[name], len(tokens), part, want, None, "", verifying))
        answer = step(drafter, commits, closed, deadline_s=1e9)
        for commit, draft in zip(commits, answer.drafts, strict=True):
            assert draft.reason == ""
            expected: list[int] = []
            if commit.want:
                before = hints[commit.session]
                expected = (before + fresh_draft(held[commit.session] + before, commit.want, sampling))[: commit.want]
            assert draft.tokens == expected
            assert 0 <= draft.ready <= len(draft.tokens)
            assert len(draft.confidence() if draft.tokens else []) == len(draft.tokens)  # type: ignore[arg-type]
        looks = itertools.chain([False] * data.draw(st.integers(0, 12)), itertools.repeat(True))
        drafter.idle(1e9, looks.__next__)
        drafter.check_integrity()
        check_kv(drafter)


def starts_with(tokens: list[int], beginning: list[int]) -> bool:
    return tokens[: len(beginning)] == beginning


def left_of(hints: list[int], new: list[int]) -> list[int]:
    """What is left of guessed tokens after a commit: what lies behind it when it follows them, else nothing."""
    return hints[len(new) :] if starts_with(hints, new) else []


def busy(**more: object) -> tuple[FakeModel, DraftEngine]:
    """An engine with branches under way."""
    model = FakeModel(slots=8, context=128)
    drafter = engine(model, **more)
    step(drafter, [opening("a", [1, 2, 3], 4)])
    assert not drafter.idle(1e9)
    assert session_of(drafter).branches
    return model, drafter


def test_a_commit_that_takes_a_branch_finds_its_draft_waiting() -> None:
    model, drafter = busy()
    session = session_of(drafter)
    branch = max(session.branches, key=lambda branch: len(branch.guess))
    new = [choice.token for choice in session.guess[: branch.start - 3]] + [branch.token]
    model.calls.clear()
    draft = step(drafter, [Commit("a", 0, 3 + len(new), new, 4)]).drafts[0]
    assert draft.tokens == fresh_draft([1, 2, 3, *new], 4, None)
    assert draft.ready == 4
    assert model.calls == []
    stats = drafter.stats()
    assert (stats["cache_hits"], stats["branch_hits"], stats["cache_misses"], stats["mainline_hits"]) == (1, 1, 0, 0)
    assert stats["ready_tokens"] == 4


def test_the_main_line_and_a_miss_are_counted() -> None:
    _, drafter = busy()
    session = session_of(drafter)
    deep = {(branch.start, branch.token) for branch in session.branches if branch.start >= 5}
    guess = [choice.token for choice in session.guess]
    step(drafter, [Commit("a", 0, 5, guess[:2], 4)])
    assert {(branch.start, branch.token) for branch in session.branches} == deep  # they go on being possible
    taken = {guess[2], *(branch.token for branch in session.branches)}
    step(drafter, [Commit("a", 0, 6, [next(t for t in range(VOCAB) if t not in taken)], 4)])
    assert session.branches == []
    stats = drafter.stats()
    assert (stats["mainline_hits"], stats["cache_misses"], stats["cache_hits"]) == (1, 1, 0)
    assert stats["branches"] == 0


def test_branches_go_no_deeper_than_wanted() -> None:
    _, drafter = busy()
    session = session_of(drafter)
    assert len(session.guess) == 4 + 1 + 4
    assert all(len(branch.guess) <= 4 and branch.start <= 3 + 4 for branch in session.branches)


def test_a_fork_copies_only_what_its_slot_does_not_hold() -> None:
    model = FakeModel(slots=2, context=128)
    drafter = engine(model)
    step(drafter, [opening("a", list(range(20)), 2)])
    drafter.idle(1e9)
    session = session_of(drafter)
    assert [kind for kind, _ in model.calls].count("move") == 1
    branch = session.branches[0]
    new = [*(choice.token for choice in session.guess[: branch.start - 20]), branch.token]
    step(drafter, [Commit("a", 0, 20 + len(new), new, 2)])
    model.calls.clear()
    drafter.idle(1e9)
    copied = [count for kind, count in model.calls if kind == "move"]
    assert len(copied) == 1
    assert copied[0] <= session.branches[0].start - branch.start


def test_idle_time_without_looking_ahead_only_reads() -> None:
    model = FakeModel(slots=8, context=128)
    drafter = engine(model, ahead=0)
    step(drafter, [opening("a", [1, 2, 3], 4)])
    model.calls.clear()
    assert not drafter.idle(1e9)
    step(drafter, [Commit("a", 0, 4, [7], 0, None, "", [1, 2, 3])])
    assert not drafter.idle(1e9)
    assert model.calls == []
    assert drafter.stats()["hinted_tokens"] == 0
    step(drafter, [opening("b", list(range(30)), 0)])
    drafter.idle(1e9)
    assert [kind for kind, _ in model.calls] == ["prefill"]


# --- slots ------------------------------------------------------------------------------------------------------------


def test_sessions_take_the_slots_of_branches() -> None:
    model = FakeModel(slots=4, context=128)
    drafter = engine(model)
    names = "abcd"
    for index, name in enumerate(names):
        draft = step(drafter, [opening(name, [index + 1, 5], 3)]).drafts[0]
        assert draft.reason == ""
        drafter.idle(1e9)
        check_kv(drafter)
        assert drafter.stats()["slots_free"] == 0
    assert step(drafter, [opening("e", [1], 3)]).drafts[0].reason == NO_SLOT
    assert drafter.stats()["evicted"] == 0
    step(drafter, closed=names)
    assert drafter.stats()["slots_free"] == 4


def test_a_session_sent_in_part_is_asked_for_whole_while_branches_could_make_room() -> None:
    drafter = engine(FakeModel(slots=2, context=128))
    step(drafter, [opening("a", [1, 5], 3)])
    drafter.idle(1e9)
    assert drafter.stats()["slots_free"] == 0
    assert step(drafter, [Commit("b", 0, 5, [1], 3)]).drafts[0].reason == UNKNOWN_SESSION


def test_branches_of_a_silent_session_are_freed_before_itself() -> None:
    clock = Clock()
    drafter = engine(FakeModel(slots=4, context=128), clock=clock, faults=FaultPolicy(session_lease_s=60))
    step(drafter, [opening("a", [1, 5], 3)])
    drafter.idle(1e9)
    clock.now += 30
    drafter.idle(1e9)
    drafter.check_integrity()
    assert drafter.stats()["sessions"] == 1
    assert drafter.stats()["slots_free"] == 3


def test_a_failing_branch_harms_nothing_else() -> None:
    model = FakeModel(slots=8, context=128)
    drafter = engine(model)
    draft = step(drafter, [opening("a", [1, 2, 3], 4)]).drafts[0]
    session = session_of(drafter)
    runners = [choice.runners[0] for choice in session.guess]
    model.bad_token = next(token for token in runners if token not in fresh_draft([1, 2, 3], 9, None))
    drafter.idle(1e9, itertools.chain([False] * 40, itertools.repeat(True)).__next__)
    check_kv(drafter)
    assert drafter.stats()["branches_failed"] > 0
    assert session.live
    assert [choice.token for choice in session.guess[:4]] == draft.tokens


def test_thousands_of_short_sessions_leave_nothing() -> None:
    rng = np.random.default_rng(4)
    clock = Clock()
    drafter = engine(FakeModel(slots=6, context=48), clock=clock, faults=FaultPolicy(session_lease_s=2), top_k=0)
    started = 0
    sizes = []
    while started < 10_000:
        clock.now += 0.05
        batch = [f"s{started + index}" for index in range(4)]
        started += len(batch)
        commits = [
            opening(name, [1] * int(rng.integers(1, 60)), 2, tenant=f"t{rng.integers(50)}", verifying=[3] * (index % 2))
            for index, name in enumerate(batch)
        ]
        answer = drafter.step(step_of(commits))
        if rng.random() < 0.1:
            drafter.idle(1e9, itertools.chain([False] * 3, itertools.repeat(True)).__next__)
            drafter.check_integrity()
        refused = {draft.session for draft in answer.drafts if draft.reason}
        drafter.step(step_of([], [name for name in batch if name not in refused or rng.random() < 0.9]))
        sizes.append(sum(len(part) for part in vars(drafter._store).values() if hasattr(part, "__len__")))
    drafter.disconnect("t")
    drafter.check_integrity()
    store = drafter._store
    assert (len(store.sessions), len(store._refused), len(store._held), len(store.read)) == (0, 0, 0, 0)
    assert store.table.free == 6
    assert max(sizes) < 10_000 / 2  # those refused and never closed are bounded too
    assert drafter.stats()["branches_started"] > 0


def step_of(commits: list[Commit], closed: Sequence[str] = ()) -> Step:
    return Step(PROTOCOL_VERSION, "t", 1, 10.0, commits, list(closed))


def test_kv_of_a_range_is_copied_and_no_more() -> None:
    kv = KVBuffer(layers=2, slots=3, kv_heads=2, context=8, head_dim=4)
    kv.array[:] = np.random.default_rng(0).normal(size=kv.array.shape)
    before = kv.array.copy()
    kv.move(2, 0, 6, 3)
    assert np.array_equal(kv.array[:, 0, :, 3:6], before[:, 2, :, 3:6])
    kv.array[:, 0, :, 3:6] = before[:, 0, :, 3:6]
    assert np.array_equal(kv.array, before)


# --- what another source proposed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", COSTS)
def test_hints_are_read_in_idle_time_and_continued(costs: StepCosts) -> None:
    model = FakeModel(slots=1, context=128)
    model.costs = replace(costs)
    drafter = engine(model, clock=Clock())
    step(drafter, [opening("a", [1, 2, 3], 4)])
    hints = [9, 8, 7, 6]
    answer = step(drafter, [Commit("a", 0, 4, [5], 0, None, "", hints)])
    assert (answer.drafts[0].tokens, answer.drafts[0].reason) == ([], "")
    assert not drafter.idle(1e9)
    check_kv(drafter)
    model.calls.clear()
    bonus = fresh_draft([1, 2, 3, 5, *hints], 1, None)
    answer = step(drafter, [Commit("a", 0, 9, [*hints, *bonus], 3)])
    assert answer.drafts[0].tokens == fresh_draft([1, 2, 3, 5, *hints, *bonus], 3, None)
    assert answer.drafts[0].ready == 3
    assert model.calls == []
    assert drafter.stats()["hinted_tokens"] == 4


def test_hints_that_were_guessed_change_nothing() -> None:
    _, drafter = busy()
    session = session_of(drafter)
    guess = list(session.guess)
    step(drafter, [Commit("a", 0, 3, [], 0, None, "", [choice.token for choice in guess[:3]])])
    assert session.guess == guess
    assert drafter.stats()["hinted_tokens"] == 0


def test_hints_along_a_branch_promote_it() -> None:
    _, drafter = busy()
    session = session_of(drafter)
    branch = session.branches[0]
    along = [choice.token for choice in session.guess[: branch.start - 3]] + [branch.token]
    tokens = [choice.token for choice in branch.guess]
    step(drafter, [Commit("a", 0, 3, [], 0, None, "", along)])
    assert [choice.token for choice in session.guess] == along + tokens
    assert session.slot == branch.slot


def test_hints_no_embedding_exists_for_and_too_many() -> None:
    drafter = engine(FakeModel(slots=1, context=64), target_vocab_size=30)
    step(drafter, [opening("a", [1], 2)])
    step(drafter, [Commit("a", 0, 2, [2], 0, None, "", [3, 4, 35, 5])])
    assert [choice.token for choice in session_of(drafter).guess] == [3, 4]
    step(drafter, [Commit("a", 0, 2, [], 0, None, "", [7] * 50)])
    assert len(session_of(drafter).guess) == 32
    assert not drafter.idle(1e9)
    drafter.check_integrity()


def test_an_answer_with_hints_has_probabilities_that_say_nothing() -> None:
    drafter = engine(FakeModel(slots=1), top_k=3)
    step(drafter, [opening("a", [1], 2)])
    draft = step(drafter, [Commit("a", 0, 2, [2], 3, None, "", [3, 4])]).drafts[0]
    assert draft.tokens[:2] == [3, 4]
    ids, probs = draft.top()
    assert ids.shape == (3, 3)
    assert (probs[:2] == 0).all()
    assert (probs[2] > 0).any()


def test_a_resting_session_costs_no_idle_time() -> None:
    model, drafter = busy()
    model.calls.clear()
    step(drafter, [Commit("a", 0, 4, [VOCAB - 1], 0)])
    step(drafter, [Commit("a", 0, 5, [VOCAB - 2], 0)])
    assert not drafter.idle(1e9)
    assert model.calls == []
