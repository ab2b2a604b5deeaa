"""The draft engine over a tiny model: whatever happened before, a draft is what the committed tokens alone determine."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import (
    CONTEXT_FULL,
    DEADLINE,
    ERROR,
    MAX_DRAFT_TOKENS,
    NO_SLOT,
    PROTOCOL_VERSION,
    STALE,
    UNKNOWN_SESSION,
    Commit,
    Sampling,
    Step,
)
from hw.onnx.costs import StepCosts
from tests.unit.draft_fakes import VOCAB, Clock, FakeModel, engine, fresh_draft, opening, step

SAMPLINGS = [None, Sampling(0.0, 0), Sampling(0.9, 17), Sampling(1.4, 2**62)]
COSTS = [StepCosts(), StepCosts(1.0, 0.1, 0.0, 5.0), StepCosts(1.0, 0.1, 1.0, 0.1)]  # either way of catching up


@settings(max_examples=150, deadline=None)
@given(data=st.data(), sampling=st.sampled_from(SAMPLINGS), costs=st.sampled_from(COSTS))
def test_draft_depends_on_committed_tokens_only(
    data: st.DataObject, sampling: Sampling | None, costs: StepCosts
) -> None:
    model = FakeModel(slots=3, context=512)
    model.costs = costs
    drafter = engine(model, prefill_wait_s=1e9, faults=FaultPolicy(prefill_budget_s=1e9))
    held: dict[str, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        commits, closed = [], []
        for name in ("a", "b", "c"):
            want = data.draw(st.integers(0, 5))
            tokens = held.get(name)
            act = data.draw(st.sampled_from(["commit", "commit", "commit", "rest", "close"])) if tokens else "open"
            if act == "open":
                tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30))
                commits.append(opening(name, tokens, want, sampling=sampling))
                held[name] = tokens
            elif act == "commit" and tokens:
                true = fresh_draft(tokens, 12, sampling)
                accepted = data.draw(st.integers(0, 11))
                last = data.draw(st.sampled_from([true[accepted], (true[accepted] + 1) % VOCAB]))
                new = [*true[:accepted], last]
                tokens.extend(new)
                overlap = data.draw(st.integers(0, 1))  # a resent token changes nothing
                sent = tokens[-len(new) - overlap :]
                commits.append(Commit(name, 0, len(tokens), list(sent), want))
            elif act == "close":
                closed.append(name)
                del held[name]
        answer = step(drafter, commits, closed, deadline_s=1e9)
        for commit, draft in zip(commits, answer.drafts, strict=True):
            assert (draft.session, draft.base, draft.reason) == (commit.session, commit.length, "")
            assert draft.tokens == (fresh_draft(held[commit.session], commit.want, sampling) if commit.want else [])
        looks = itertools.chain([False] * data.draw(st.integers(0, 8)), itertools.repeat(True))
        drafter.idle(1e9, looks.__next__)
        drafter.check_integrity()


def test_idle_time_makes_the_next_draft_free() -> None:
    model = FakeModel()
    drafter = engine(model)
    first = step(drafter, [opening("a", [1, 2, 3], 4)]).drafts[0].tokens
    assert not drafter.idle(1e9)
    calls = len(model.calls)
    known = fresh_draft([1, 2, 3], 9, None)
    draft = step(drafter, [Commit("a", 0, 8, known[:5], 4)]).drafts[0]
    assert first == known[:4]
    assert draft.tokens == known[5:9]
    assert len(model.calls) == calls
    assert drafter.stats()["ahead_full_rounds"] == 1


def test_sessions_step_together() -> None:
    model = FakeModel(slots=4)
    drafter = engine(model)
    names = "abcd"
    step(drafter, [opening(name, [index, 5], 0) for index, name in enumerate(names)])
    drafter.idle(1e9)
    model.calls.clear()
    step(drafter, [Commit(name, 0, 2, [], 3) for name in names])
    assert model.calls == [("decode", 4)] * 3


def test_ragged_wants_drop_out() -> None:
    model = FakeModel(slots=3)
    drafter = engine(model)
    answer = step(drafter, [opening("a", [1], 1), opening("b", [2], 4), opening("c", [3], 2)])
    assert [len(draft.tokens) for draft in answer.drafts] == [1, 4, 2]
    assert [rows for kind, rows in model.calls if kind == "decode"] == [3, 2, 1, 1]


def test_want_is_bounded() -> None:
    assert len(step(engine(), [opening("a", [1], 60)]).drafts[0].tokens) == MAX_DRAFT_TOKENS


def test_top_k_probabilities() -> None:
    draft = step(engine(top_k=3), [opening("a", [1, 2], 4)]).drafts[0]
    ids, probs = draft.top()
    assert ids.shape == probs.shape == (4, 3)
    assert (ids[:, 0] == draft.tokens).all()
    assert (np.diff(probs, axis=1) <= 0).all()
    assert (probs.sum(axis=1) <= 1).all()
    plain = step(engine(top_k=0), [opening("a", [1, 2], 4)]).drafts[0]
    assert plain.tokens == draft.tokens
    assert plain.top_ids == b""


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_never_beyond_the_targets_vocabulary(sampling: Sampling | None) -> None:
    drafter = engine(FakeModel(context=256), target_vocab_size=7)
    tokens = [1]
    for _ in range(40):
        drafted = step(drafter, [opening("a", tokens, 4, sampling=sampling)]).drafts[0]
        assert all(token < 7 for token in drafted.tokens)
        assert drafted.top()[0].max() < 7
        tokens = tokens + drafted.tokens


def test_changed_sampling_drops_the_guess() -> None:
    drafter = engine()
    step(drafter, [opening("a", [1, 2], 4)])
    drafter.idle(1e9)
    hot = Sampling(1.4, 5)
    assert step(drafter, [opening("a", [1, 2], 4, epoch=1, sampling=hot)]).drafts[0].tokens == fresh_draft(
        [1, 2], 4, hot
    )


# --- commits that do not fit ----------------------------------------------------------------------------------------


def reason(drafter: object, commit: Commit, **more: object) -> str:
    return step(drafter, [commit], **more).drafts[0].reason  # type: ignore[arg-type]


def test_unknown_stale_and_diverging_commits() -> None:
    drafter = engine()
    assert reason(drafter, Commit("a", 0, 5, [1], 2)) == UNKNOWN_SESSION
    assert reason(drafter, opening("a", [1, 2, 3], epoch=1)) == ""
    assert reason(drafter, Commit("a", 0, 4, [9], 2)) == STALE  # older epoch
    assert reason(drafter, Commit("a", 1, 2, [2], 2)) == STALE  # shorter
    assert reason(drafter, Commit("a", 1, 6, [9], 2)) == UNKNOWN_SESSION  # a hole
    assert reason(drafter, Commit("a", 1, 4, [7, 9], 2)) == UNKNOWN_SESSION  # another past
    assert reason(drafter, Commit("a", 2, 4, [9], 2)) == UNKNOWN_SESSION  # a new epoch must open
    assert reason(drafter, Commit("a", 1, 4, [9], 2)) == ""  # none of which did harm
    assert reason(drafter, opening("a", [1, 2], epoch=2)) == ""  # preempted, shorter
    assert reason(drafter, Commit("a", 2, 3, [3], 2), target="other") == UNKNOWN_SESSION
    assert drafter.stats()[UNKNOWN_SESSION] == 5


def test_reopening_keeps_shared_kv() -> None:
    model = FakeModel()
    drafter = engine(model)
    step(drafter, [opening("a", list(range(20)), 2)])
    model.calls.clear()
    answer = step(drafter, [opening("a", [*range(18), 30], 1, epoch=1)])
    assert model.calls == [("decode", 1)]
    assert answer.drafts[0].tokens == fresh_draft([*range(18), 30], 1, None)


def test_two_commits_of_a_session_in_one_step() -> None:
    answer = step(engine(), [opening("a", [1, 2], 2), Commit("a", 0, 3, [3], 2)])
    assert [draft.reason for draft in answer.drafts] == [STALE, ""]
    assert answer.drafts[1].tokens == fresh_draft([1, 2, 3], 2, None)


@pytest.mark.parametrize("commit", [Commit("a", 0, 1, [1, 2], 2), Commit("a", 0, 0, [], 2), Commit("a", 0, 1, [1], -1)])
def test_malformed_commits(commit: Commit) -> None:
    assert reason(engine(), commit) == ERROR


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_tokens_the_draft_has_no_embedding_for(token: int) -> None:
    drafter = engine()
    answer = step(drafter, [opening("a", [1, token]), opening("b", [1])])
    assert [draft.reason for draft in answer.drafts] == [ERROR, ""]
    assert reason(drafter, Commit("a", 0, 3, [1], 2)) == ERROR  # not asked for again
    assert drafter.stats()["sessions"] == 1


def test_other_protocol_version() -> None:
    drafter = engine()
    assert drafter.step(Step(PROTOCOL_VERSION + 1, "t", 1, 1.0, [opening("a", [1])], [])).drafts == []
    assert drafter.stats()["bad_version"] == 1


# --- slots ------------------------------------------------------------------------------------------------------------


def test_full_draft_evicts_only_past_the_lease() -> None:
    clock = Clock()
    drafter = engine(FakeModel(slots=2), clock=clock, faults=FaultPolicy(session_lease_s=60))
    step(drafter, [opening("a", [1])])
    clock.now += 50
    step(drafter, [opening("b", [1])])
    assert reason(drafter, opening("c", [1])) == NO_SLOT
    assert reason(drafter, Commit("c", 0, 2, [2], 1)) == NO_SLOT  # sending it whole would not help
    clock.now += 11
    assert reason(drafter, opening("c", [1])) == ""
    assert reason(drafter, Commit("a", 0, 2, [2], 1)) == NO_SLOT
    step(drafter, closed=["b"])
    assert reason(drafter, Commit("a", 0, 2, [2], 1)) == UNKNOWN_SESSION
    assert drafter.stats()["evicted"] == 1


def test_sessions_of_a_target_that_was_lost_end_with_their_lease_though_nobody_needs_their_slots() -> None:
    clock = Clock()
    drafter = engine(FakeModel(slots=4), clock=clock, faults=FaultPolicy(session_lease_s=60))
    step(drafter, [opening("a", [1])], target="lost")
    clock.now += 40
    step(drafter, [opening("b", [1])], target="there")
    drafter.idle(1e9)
    assert drafter.stats()["sessions"] == 2
    clock.now += 30
    drafter.idle(1e9)
    drafter.check_integrity()
    assert (drafter.stats()["sessions"], drafter.stats()["evicted"]) == (1, 1)
    assert step(drafter, [Commit("b", 0, 2, [2], 1)], target="there").drafts[0].reason == ""


def test_context_full_is_for_that_session_only() -> None:
    drafter = engine(FakeModel(context=16))
    assert reason(drafter, opening("long", [1] * 13, 4)) == CONTEXT_FULL
    assert reason(drafter, opening("a", [1] * 12, 4)) == ""
    answer = step(drafter, [Commit("a", 0, 14, [2, 3], 4), opening("b", [1], 4)])
    assert [draft.reason for draft in answer.drafts] == [CONTEXT_FULL, ""]
    assert drafter.stats()["sessions"] == 1
    assert reason(drafter, Commit("a", 0, 15, [2], 1)) == CONTEXT_FULL  # not asked for again
    assert reason(drafter, opening("a", [1], 4, epoch=1)) == ""


def test_running_ahead_stops_at_the_context() -> None:
    drafter = engine(FakeModel(context=16), ahead=100)
    step(drafter, [opening("a", [1] * 12, 4)])
    assert not drafter.idle(1e9)
    drafter.check_integrity()


def test_disconnect_forgets_one_target() -> None:
    drafter = engine()
    step(drafter, [opening("a", [1])], target="t")
    step(drafter, [opening("a", [2])], target="u")
    drafter.disconnect("t")
    drafter.check_integrity()
    assert drafter.stats()["sessions"] == 1
    assert reason(drafter, Commit("a", 0, 2, [2], 1), target="u") == ""


def test_slots_do_not_leak() -> None:
    rng = np.random.default_rng(3)
    clock = Clock()
    drafter = engine(FakeModel(slots=5, context=40), clock=clock, faults=FaultPolicy(session_lease_s=3), top_k=0)
    lengths: dict[tuple[str, str], int] = {}
    for number in range(3000):
        clock.now += 0.2
        target = f"t{rng.integers(2)}"
        commits, closed = [], []
        for name in {f"s{n}" for n in rng.integers(0, 12, 3)}:
            length = lengths.get((target, name), 0)
            if not length or rng.random() < 0.1:
                length = int(rng.integers(1, 45))
                commits.append(opening(name, [1] * length, 2, epoch=number))
            elif rng.random() < 0.2:
                closed.append(name)
                length = 0
            else:
                length += 1
                commits.append(Commit(name, number, length, [1] * length, 2))
            lengths[target, name] = length
        step(drafter, commits, closed, target=target)
        if rng.random() < 0.02:
            drafter.disconnect(target)
        if rng.random() < 0.2:
            drafter.idle(0.1)
        drafter.check_integrity()
    drafter.disconnect("t0")
    drafter.disconnect("t1")
    drafter.check_integrity()
    stats = drafter.stats()
    assert stats["slots_free"] == 5
    assert min(stats[name] for name in (NO_SLOT, CONTEXT_FULL, "evicted", "moves", "tokens")) > 0


# --- time -------------------------------------------------------------------------------------------------------------


def timed(**more: object) -> tuple[FakeModel, Clock, object]:
    clock = Clock()
    model = FakeModel(slots=3, context=512, clock=clock)
    model.costs = StepCosts(0.010, 0.001, 0.010, 0.002)
    return model, clock, engine(model, clock=clock, **more)


def test_draft_is_cut_at_the_deadline() -> None:
    _, clock, drafter = timed()
    before = clock.now
    answer = step(drafter, [opening("a", [1], 8)], deadline_s=0.04)  # type: ignore[arg-type]
    assert answer.drafts[0].tokens == fresh_draft([1], 3, None)
    assert clock.now - before == pytest.approx(answer.work_s)
    assert answer.work_s <= 0.04
    assert reason(drafter, Commit("a", 0, 2, [39], 8), deadline_s=0.001) == DEADLINE


def test_long_prompt_delays_no_other_and_is_read_between_messages() -> None:
    _, clock, drafter = timed(prefill_wait_s=0.05, prefill_slice_s=0.03)
    step(drafter, [opening("a", [1], 2)])  # type: ignore[arg-type]
    prompt = [index % VOCAB for index in range(100)]
    before = clock.now
    answer = step(drafter, [opening("b", prompt, 2), Commit("a", 0, 2, [2], 2)], deadline_s=0.25)  # type: ignore[arg-type]
    assert clock.now - before < 0.05
    assert [draft.reason for draft in answer.drafts] == [DEADLINE, ""]
    stop_after = iter([False] * 3)
    assert drafter.idle(10.0, lambda: next(stop_after, True))  # type: ignore[attr-defined]
    drafter.idle(10.0)  # type: ignore[attr-defined]
    answer = step(drafter, [Commit("b", 0, 100, [], 2)], deadline_s=0.001)  # type: ignore[arg-type]
    assert answer.drafts[0].tokens == fresh_draft(prompt, 2, None)


def test_long_prompt_is_read_even_without_idle_time() -> None:
    _, clock, drafter = timed()
    prompt = [index % VOCAB for index in range(100)]
    answer = step(drafter, [opening("b", prompt, 2)], deadline_s=0.06)  # type: ignore[arg-type]
    steps = 0
    while not answer.drafts[0].tokens:
        before = clock.now
        answer = step(drafter, [Commit("b", 0, 100, [], 2)], deadline_s=0.06)  # type: ignore[arg-type]
        assert clock.now - before <= 0.06
        steps += 1
    assert steps < 20
    assert answer.drafts[0].tokens == fresh_draft(prompt, 2, None)


def test_idle_keeps_to_its_budget() -> None:
    _, clock, drafter = timed()
    step(drafter, [opening("a", [1] * 300, 2)])  # type: ignore[arg-type]
    before = clock.now
    assert drafter.idle(0.1)  # type: ignore[attr-defined]
    assert clock.now - before <= 0.1 + 0.25  # and the call that was under way


def test_pace_leaves_short_gaps_alone() -> None:
    model, clock, drafter = timed(paced=True)
    tokens = [1]
    for _ in range(30):
        draft = step(
            drafter, [Commit("a", 0, len(tokens), tokens[-1:], 2) if len(tokens) > 1 else opening("a", [1], 2)]
        )  # type: ignore[arg-type]
        tokens.append((draft.drafts[0].tokens[0] + 1) % VOCAB)  # always wrong
        clock.now += 0.004
    calls = len(model.calls)
    assert not drafter.idle(1.0)  # type: ignore[attr-defined]
    assert len(model.calls) == calls


# --- failures ---------------------------------------------------------------------------------------------------------


def test_one_failing_session_harms_no_other() -> None:
    model = FakeModel(slots=3)
    drafter = engine(model)
    step(drafter, [opening(name, [index + 1], 2) for index, name in enumerate("abc")])
    model.bad_token = 33
    answer = step(drafter, [Commit("a", 0, 2, [4], 2), Commit("b", 0, 2, [33], 2), Commit("c", 0, 2, [5], 2)])
    assert [draft.reason for draft in answer.drafts] == ["", ERROR, ""]
    model.bad_token = -1
    assert answer.drafts[0].tokens == fresh_draft([1, 4], 2, None)
    assert answer.drafts[2].tokens == fresh_draft([3, 5], 2, None)
    assert reason(drafter, Commit("b", 0, 3, [1], 2)) == UNKNOWN_SESSION
    assert drafter.stats()["dropped"] == 1


@pytest.mark.parametrize("sampling", [None, Sampling(1.0, 3)])
@pytest.mark.parametrize("top_k", [0, 2])
def test_logits_that_are_not_finite(sampling: Sampling | None, top_k: int) -> None:
    model = FakeModel(slots=3)
    model.nan_token = 33
    drafter = engine(model, top_k=top_k)
    answer = step(drafter, [opening("a", [1, 33], 1, sampling=sampling), opening("b", [2], 1, sampling=sampling)])
    assert [draft.reason for draft in answer.drafts] == [ERROR, ""]


def test_failing_prefill() -> None:
    model = FakeModel(slots=3)
    model.bad_token = 33
    drafter = engine(model)
    answer = step(drafter, [opening("a", [33] * 30), opening("b", [1] * 30)])
    assert [draft.reason for draft in answer.drafts] == [ERROR, ""]


def test_targets_that_wait_together_share_model_calls() -> None:
    model = FakeModel(slots=4, context=128)
    drafter = engine(model)
    prompts = {"one": [1, 2, 3], "two": [4, 5, 6, 7], "three": [1, 2, 3]}
    for target, tokens in prompts.items():  # read one after the other
        drafter.step(Step(PROTOCOL_VERSION, target, 1, 1e9, [Commit("s", 1, len(tokens), tokens, 1)], []))
    committed = {target: [*tokens, 9] for target, tokens in prompts.items()}
    before = len(model.calls)
    steps = [
        Step(PROTOCOL_VERSION, target, 2, 1e9, [Commit("s", 1, len(tokens), [9], 3)], [])
        for target, tokens in committed.items()
    ]
    answers = drafter.step_together(steps)
    calls = [call for call in model.calls[before:] if call[0] != "move"]
    for (target, tokens), answer in zip(committed.items(), answers, strict=True):
        assert answer.number == 2
        assert answer.drafts[0].base == len(tokens), target
        assert answer.drafts[0].tokens == fresh_draft(tokens, 3, None)
    assert len(calls) <= 4  # three tokens of each, all targets at once; one more to catch up
