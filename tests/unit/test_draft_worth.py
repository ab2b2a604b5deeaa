"""Drafting while the target waits only where it pays, and whose turn it is when there is not enough for all."""

import itertools

import pytest

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import DEADLINE, NO_SLOT, UNKNOWN_SESSION, Commit, Draft
from deployments.draft.calibration import Calibration
from deployments.draft.engine import DraftEngine
from hw.onnx.costs import StepCosts
from tests.unit.draft_fakes import VOCAB, Clock, FakeModel, engine, fresh_draft, opening, step

MEAN = Calibration().mean(True)


def timed(slots: int = 4, **more: object) -> tuple[FakeModel, Clock, DraftEngine]:
    clock = Clock()
    model = FakeModel(slots=slots, context=512, clock=clock)
    model.costs = StepCosts(0.010, 0.001, 0.010, 0.002)
    return model, clock, engine(model, clock=clock, **more)


def confidences(draft: Draft) -> list[float]:
    values = draft.confidence()
    assert values is not None
    return [float(value) for value in values]


def test_drafts_as_long_as_the_next_token_is_worth_its_step() -> None:
    _, _, drafter = timed()
    worth_s = 0.05
    draft = step(drafter, [opening("a", [1, 2], 16)], worth_s=worth_s).drafts[0]
    assert 0 < len(draft.tokens) < 16
    assert draft.tokens == fresh_draft([1, 2], len(draft.tokens), None)
    reached = list(itertools.accumulate(confidences(draft), lambda a, b: a * b, initial=1.0))
    # reading two tokens and drafting one is one call; from then on each token takes a step of 11 ms
    assert all(path * MEAN * worth_s > 0.011 for path in reached[1:-1])
    assert reached[-1] * MEAN * worth_s <= 0.011 * 1.001


def test_what_does_not_pay_is_not_drafted_and_is_no_lack_of_time() -> None:
    model, clock, drafter = timed()
    before = clock.now
    draft = step(drafter, [opening("a", [1], 4)], worth_s=0.010).drafts[0]
    assert (draft.tokens, draft.reason) == ([], "")
    assert clock.now == before
    assert model.calls == []
    drafter.idle(1e9)
    draft = step(drafter, [Commit("a", 0, 1, [], 4)], worth_s=0.010).drafts[0]
    assert draft.tokens == fresh_draft([1], 4, None)  # drafted meanwhile, it is sent
    assert draft.ready == 4


def test_sessions_that_would_not_pay_alone_pay_together() -> None:
    _, _, drafter = timed()
    alone = step(drafter, [opening("a", [1], 4)], worth_s=0.012).drafts
    assert alone[0].tokens == []
    together = step(
        drafter, [Commit("a", 0, 1, [], 4), opening("b", [2], 4), opening("c", [3], 4)], worth_s=0.012
    ).drafts
    assert all(draft.tokens for draft in together)


def test_a_miss_of_one_session_does_not_hold_up_another() -> None:
    model, clock, drafter = timed(slots=2)
    step(drafter, [opening("a", [1], 4), opening("b", [2], 4)])
    drafter.idle(1e9)
    session = drafter._store.sessions["t", "b"]
    wrong = next(token for token in range(VOCAB) if token != session.guess[0].token)
    model.calls.clear()
    before = clock.now
    commits = [Commit("a", 0, 2, fresh_draft([1], 1, None), 4), Commit("b", 0, 3, [wrong, wrong], 4)]
    answer = step(drafter, commits, worth_s=0.008)
    assert len(answer.drafts[0].tokens) == 4
    assert answer.drafts[1].tokens == []
    assert (clock.now, model.calls) == (before, [])


def test_a_prompt_that_does_not_pay_is_read_in_idle_time() -> None:
    model, _, drafter = timed()
    prompt = [index % VOCAB for index in range(100)]
    draft = step(drafter, [opening("a", prompt, 2)], worth_s=0.010).drafts[0]
    assert (draft.tokens, draft.reason) == ([], DEADLINE)
    assert model.calls == []
    drafter.idle(1e9)
    draft = step(drafter, [Commit("a", 0, 100, [], 2)], worth_s=0.010).drafts[0]
    assert draft.tokens == fresh_draft(prompt, 2, None)


@pytest.mark.parametrize(("worth_s", "runs"), [(0.001, False), (1.0, True)])
def test_idle_steps_that_would_overrun_start_only_for_what_they_save(worth_s: float, runs: bool) -> None:
    model, clock, drafter = timed(slots=1, paced=True)
    tokens = [1]
    step(drafter, [opening("a", tokens, 2)], worth_s=0.1)
    for _ in range(30):
        clock.now += 0.004  # the rhythm: a message 4 ms after an answer
        tokens.append(0)
        step(drafter, [Commit("a", 0, len(tokens), [0], 2)], worth_s=0.1)
    tokens.append(0)
    step(drafter, [Commit("a", 0, len(tokens), [0], 2)], worth_s=worth_s)
    model.calls.clear()
    drafter.idle(1e9, itertools.chain([False], itertools.repeat(True)).__next__)
    assert bool(model.calls) == runs


def test_confidence_learns_from_commits() -> None:
    _, _, drafter = timed(ahead=0)
    tokens = [1]
    first = step(drafter, [opening("a", tokens, 4)]).drafts[0]
    before = confidences(first)
    for _ in range(60):
        drafted = fresh_draft(tokens, 1, None)[0]
        tokens.append((drafted + 1) % VOCAB)  # never what was drafted
        step(drafter, [Commit("a", 0, len(tokens), tokens[-1:], 4, None)])
    after = confidences(step(drafter, [opening("b", [1], 4)]).drafts[0])
    assert all(late < early for late, early in zip(after, before, strict=True))


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_a_tenant_below_its_share_takes_the_longest_unused_of_who_holds_most() -> None:
    clock = Clock()
    drafter = engine(FakeModel(slots=4), clock=clock)
    for name in "abcd":
        clock.now += 1
        step(drafter, [opening(name, [1], 1, tenant="big")])
    clock.now += 1
    step(drafter, [Commit("a", 0, 2, [1], 1)])
    assert step(drafter, [opening("x", [1], 1, tenant="small")]).drafts[0].tokens
    assert ("t", "b") not in drafter._store.sessions
    assert step(drafter, [opening("y", [1], 1, tenant="small")]).drafts[0].tokens
    assert step(drafter, [opening("z", [1], 1, tenant="small")]).drafts[0].reason == NO_SLOT  # it holds its share
    assert step(drafter, [opening("e", [1], 1, tenant="big")]).drafts[0].reason == NO_SLOT
    assert drafter.stats()["preempted"] == 2
    step(drafter, closed=["x"])
    assert step(drafter, [Commit("b", 0, 3, [1], 1)]).drafts[0].reason == UNKNOWN_SESSION
    drafter.check_integrity()


def test_tenants_do_not_take_turns_closing_each_other() -> None:
    drafter = engine(FakeModel(slots=3))
    for name in "abc":
        step(drafter, [opening(name, [1], 1, tenant=f"t{ord(name) % 2}")])
    for turn in range(10):
        step(drafter, [opening(f"n{turn}", [1], 1, tenant=f"t{turn % 2}")])
    assert drafter.stats()["preempted"] == 0


def test_branches_go_before_sessions() -> None:
    drafter = engine(FakeModel(slots=4, context=128))
    step(drafter, [opening("a", [1, 5], 3, tenant="big"), opening("b", [2, 5], 3, tenant="big")])
    drafter.idle(1e9)
    assert drafter.stats()["slots_free"] == 0
    step(drafter, [opening("x", [3], 1, tenant="small"), opening("y", [3], 1, tenant="small")])
    assert (drafter.stats()["preempted"], drafter.stats()["sessions"]) == (0, 4)


def test_idle_reading_alternates_between_tenants() -> None:
    model, _, drafter = timed(slots=8, prefill_slice_s=0.030)
    prompt = [index % VOCAB for index in range(60)]
    openings = [opening(name, prompt, 0, tenant="big") for name in "abcde"]
    step(drafter, [*openings, opening("x", prompt, 0, tenant="small")])
    order = []
    sessions = drafter._store.sessions
    for _ in range(12):
        before = {key: session.computed for key, session in sessions.items()}
        drafter.idle(1e9, itertools.chain([False], itertools.repeat(True)).__next__)
        order += [session.tenant for key, session in sessions.items() if session.computed != before[key]]
    assert order.count("small") == 6
    assert all(left != right for left, right in itertools.pairwise(order))
    assert len(model.calls) == 12


def test_a_tenants_account_ends_with_its_sessions() -> None:
    drafter = engine(FakeModel(slots=2), faults=FaultPolicy(session_lease_s=60))
    for turn in range(20):
        step(drafter, [opening("a", [1, 2, 3], 1, tenant=f"t{turn}")])
        step(drafter, closed=["a"])
    assert drafter._store.read == {}
