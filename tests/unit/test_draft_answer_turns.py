"""Whole answers beside the token chain: neither changes the other, no message waits for more than one call, shares hold."""

import random
from itertools import pairwise

import pytest

from deployments.chain.protocol import Commit, Sampling
from deployments.draft.answers import Writing
from deployments.draft.pace import Pace
from deployments.draft.share import Share
from hw.onnx.costs import StepCosts
from tests.unit.answer_cases import Asked, reference, some_prompt
from tests.unit.draft_fakes import VOCAB, Clock, FakeModel, engine, fresh_draft, opening, step

COSTS = (0.0166, 0.0028, 0.0150, 0.0028)  # the INT8 draft on one core


def timed(**more: object) -> tuple[Asked, Clock]:
    """An engine whose model takes its time, and its clock."""
    clock = Clock()
    model = FakeModel(slots=8, context=512, clock=clock)
    model.costs = StepCosts(*COSTS)
    return Asked(engine(model, clock=clock, **more)), clock


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_the_same_beside_answers_and_answers_beside_drafts(seed: int) -> None:
    """Rounds that accept, reject and branch; idle time of random length; requests that come and go meanwhile."""
    chance = random.Random(seed)
    desk = Asked(engine(FakeModel(slots=8, context=256)))
    known = {name: some_prompt(10 * seed + index, 6 + index) for index, name in enumerate("abc")}
    sampling = {"a": None, "b": Sampling(0.8, 11), "c": None}
    commits = [opening(name, tokens, sampling=sampling[name]) for name, tokens in known.items()]
    wanted = []
    for number in range(1, 16):
        answer = step(desk.drafter, commits, number=number)
        for draft in answer.drafts:
            assert draft.tokens == fresh_draft(known[draft.session], 4, sampling[draft.session]), number
        if chance.random() < 0.4:
            prompt, k, length = some_prompt(chance.randrange(99), 12), chance.randint(1, 3), chance.randint(3, 12)
            wanted.append((prompt, length, number, desk.ask(prompt, k=k, length=length, temperature=0.7, seed=number)))
        for _ in range(chance.randrange(8)):
            desk.drafter.idle(1e-9)
            desk.check()
        commits = []
        for draft in answer.drafts:
            new = [*draft.tokens[: chance.randint(0, 4)], chance.randrange(VOCAB)]
            known[draft.session] += new
            commits.append(Commit(draft.session, 0, len(known[draft.session]), new, 4))
    desk.run()
    assert wanted
    for prompt, length, number, answers in wanted:
        for index, written in answers.items():
            assert written.tokens == reference(prompt, length, Sampling(0.7, number + index))


def test_a_message_waits_for_one_call_at_most() -> None:
    desk, clock = timed()
    step(desk.drafter, [opening("a", some_prompt(1, 8))])
    desk.ask(some_prompt(2, 300), k=4, length=60)
    longest = 0.0
    while desk.drafter.stats()["answers_waiting"] + desk.drafter.stats()["answers_running"]:
        arrives = clock.now + 0.001
        while desk.drafter.idle(0.02, lambda at=arrives: clock.now >= at) and clock.now < arrives:
            pass
        longest = max(longest, clock.now - arrives)
    # the smallest slice of a prompt, or a token of each of four rows
    costs = StepCosts(*COSTS)
    assert 0.0 < longest <= max(costs.prefill(8), costs.decode(4))
    assert len(desk.answers[0]) == 4


def test_answers_get_their_share_while_the_token_chain_wants_all_the_time() -> None:
    """Prompts that are announced are read in idle time for as long as there are any; the rest of the time is the answers'."""
    for share in (0.1, 0.25, 0.5):
        desk, clock = timed(writing=Writing(share=share), ahead=0)
        names = [f"s{index}" for index in range(4)]
        step(desk.drafter, [opening(name, some_prompt(index, 480), 0) for index, name in enumerate(names)])
        answers = desk.ask(length=480)
        started = clock.now
        while any(session.pending > 1 for session in desk.drafter._store.sessions.values()):
            desk.drafter.idle(0.02)
        assert not answers
        written = desk.drafter.stats()["writing_s"] / (clock.now - started)
        assert share - 0.05 <= written <= share + 0.05


def test_answers_use_what_the_token_chain_leaves() -> None:
    """A target that thinks for 60 ms at a time: the answer's calls lie in its pauses, and its message finds the draft free."""
    desk, clock = timed(paced=True, ahead=0, writing=Writing(share=0.01))
    desk.ask(length=200)
    tokens = some_prompt(1, 8)
    commits, number, late, messages = [opening("a", tokens, 1)], 1, 0, 0
    while not desk.answers[0]:
        answer = step(desk.drafter, commits, number=number)
        arrives, number, messages = clock.now + 0.060, number + 1, messages + 1
        while clock.now < arrives:
            if not desk.drafter.idle(0.02, lambda at=arrives: clock.now >= at):
                clock.now = max(clock.now, min(arrives, clock.now + 0.005))
        late += clock.now > arrives
        new = answer.drafts[0].tokens
        tokens += new
        commits = [Commit("a", 0, len(tokens), new, 1)]
    assert desk.answers[0][0].tokens == reference([3, 14, 15, 9, 26, 5], 200, Sampling(0.0, 0))
    assert messages < 200 / 2  # several tokens in a pause
    assert late <= 0.1 * messages


def test_without_sessions_answers_have_all_the_time_and_long_slices() -> None:
    desk, clock = timed()
    desk.ask(some_prompt(3, 120), k=3, length=10)
    started = clock.now
    desk.run()
    calls = desk.drafter._model.calls
    assert [size for kind, size in calls if kind == "prefill"] == [83, 37]
    assert [size for kind, size in calls if kind == "decode"] == [3] * 9  # the prompt told the first token
    assert clock.now - started == pytest.approx(2 * COSTS[2] + 120 * COSTS[3] + 9 * (COSTS[0] + 3 * COSTS[1]))


def test_newcomers_and_those_who_write_take_turns() -> None:
    desk, _ = timed()
    first = desk.ask(some_prompt(1, 8), length=30)
    for _ in range(3):
        desk.drafter.idle(1e-9)
    desk.ask(some_prompt(2, 200), length=3)
    before = len(desk.drafter._model.calls)
    while not first:
        desk.drafter.idle(1e-9)
    kinds = [kind for kind, _ in desk.drafter._model.calls[before:]]
    assert "prefill" in kinds[:2]
    assert all(pair != ("prefill", "prefill") for pair in pairwise(kinds))


def test_time_at_work_on_messages_is_not_shared() -> None:
    share = Share(0.5)
    share.waits(0.0)
    assert not share.due
    share.skip(4.0)
    share.waits(4.0)
    assert not share.due
    share.waits(4.1)
    assert share.due
    share.spend(0.06)
    assert not share.due
    share.rest()
    share.waits(99.0)
    assert not share.due


def test_a_call_fits_before_the_next_message_or_when_none_is_expected() -> None:
    pace = Pace()
    assert pace.fits(0.0, 9.0)
    for at in (0.0, 0.1, 0.2):
        pace.received(at)
        pace.answered(at)
    assert pace.gap_s == pytest.approx(0.1)
    assert pace.fits(0.25, 0.04)
    assert not pace.fits(0.25, 0.06)
    assert not pace.fits(0.35, 0.01)  # overdue: it may come at any moment
    assert pace.fits(0.5, 0.01)  # it stays away
