"""Predicted rounds against simulated ones."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.select_lib import predict
from scripts.select_lib.predict import DraftCosts, Line

STEPS = [(0, 12.0), (1, 13.0), (2, 14.5), (4, 17.0), (8, 24.0)]
COSTS = DraftCosts(base=4.0, row=1.0, unread=1.5)
CHANCES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)
ROUNDS = 20_000


@given(st.floats(0.0, 0.99), st.integers(1, 8))
def test_equal_chances_have_the_closed_form(chance: float, tokens: int) -> None:
    assert predict.expected_committed([chance] * tokens) == pytest.approx((1 - chance ** (tokens + 1)) / (1 - chance))


def test_steps_lie_on_straight_lines_between_those_measured() -> None:
    assert predict.step_ms(STEPS, 4) == 17.0
    assert predict.step_ms(STEPS, 3) == pytest.approx(15.75)
    assert predict.step_ms(STEPS, 10) == pytest.approx(27.5)
    assert predict.step_ms([(0, 5.0)], 3) == 5.0
    assert predict.mean_step_ms(STEPS, [0.5, 0.0, 0.5]) == pytest.approx(13.25)


def accepted(chances: list[float], dice: random.Random) -> int:
    found = 0
    while found < len(chances) and dice.random() < chances[found]:
        found += 1
    return found


@pytest.mark.parametrize("reads_again", [False, True])
@pytest.mark.parametrize("chances", [[0.9, 0.8, 0.7, 0.6], [0.3], [1.0, 1.0]])
def test_synchronous_rounds_against_a_simulation(chances: list[float], reads_again: bool) -> None:
    dice, ms, tokens, unread = random.Random(1), 0.0, 0, 0
    for _ in range(ROUNDS):
        ms += len(chances) * COSTS.call(1) + unread * COSTS.unread + predict.step_ms(STEPS, len(chances)) + 0.5
        right = accepted(chances, dice)
        unread = right if reads_again else int(right == len(chances))
        tokens += right + 1
    found = predict.synchronous(STEPS, COSTS, chances, 1, 0.5, reads_again=reads_again)
    assert found.tokens_per_s == pytest.approx(1e3 * tokens / ms, rel=0.02)
    assert found.round_ms == pytest.approx(ms / ROUNDS, rel=0.02)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("runners", [[], [0.5, 0.2]])
@pytest.mark.parametrize("chances", [[0.9, 0.8, 0.7], [0.4, 0.3]])
def test_overlapped_rounds_against_a_simulation(batch: int, runners: list[float], chances: list[float]) -> None:
    """The target's outcomes are drawn; a draft that lacks tokens makes calls until every sequence has its whole draft."""
    dice, total = random.Random(2), len(chances)
    beyond, verify = 0.6, predict.step_ms(STEPS, len(chances))
    main, *branches = lines = predict.lines_ahead(chances, beyond, runners)
    predict.work_ahead(lines, COSTS, batch, verify)
    ready = {
        (at, rank): line.done for (at, rank), line in zip(outcomes(chances, beyond, runners), branches, strict=True)
    }
    ms, tokens = 0.0, 0
    for _ in range(ROUNDS):
        lacking = []
        unread = 0
        for _ in range(batch):
            right = accepted(chances, dice)
            tokens += right + 1
            if right == total and not main.done:
                unread += 1
            if right == total and dice.random() < beyond:
                lacking.append(total - max(0, main.done - 1))
                continue
            drawn, rank = dice.random(), 0
            while rank < len(runners) and drawn >= runners[rank]:
                drawn, rank = drawn - runners[rank], rank + 1
            lacking.append(total - ready.get((right, rank), 0))
        ms += verify + 0.5 + unread * COSTS.unread
        for call in range(total):
            ms += COSTS.call(sum(count > call for count in lacking))
    found = predict.overlapped(STEPS, COSTS, chances, beyond, runners, batch, 0.5)
    assert found.round_ms == pytest.approx(ms / ROUNDS, rel=0.02)
    assert found.tokens_per_s == pytest.approx(1e3 * tokens / ms, rel=0.02)
    assert 0.0 <= found.hidden <= 1.0
    if batch == 1:
        assert found.hidden > 0.0


def outcomes(chances: list[float], beyond: float, runners: list[float]) -> list[tuple[int, int]]:
    """(accepted tokens, place of the target's own among the runner-ups) of the branches, in their order."""
    found, reached = [], 1.0
    for at, chance in enumerate([*chances, beyond]):
        for rank, share in enumerate(runners):
            if reached * (1 - chance) * share >= predict.LEAST_BRANCH:
                found.append((at, rank))
        reached *= chance
    return found


@given(CHANCES, st.floats(0.0, 1.0), st.floats(0.0, 200.0), st.integers(1, 8))
def test_work_ahead_helps_never_hurts_and_fits_its_time(
    chances: list[float], beyond: float, time_ms: float, batch: int
) -> None:
    def waiting(time: float) -> float:
        lines = predict.lines_ahead(chances, beyond, [0.4, 0.15])
        predict.work_ahead(lines, COSTS, batch, time)
        assert all(line.done <= line.needs for line in lines)
        assert sum(line.done for line in lines) * batch * COSTS.row <= time
        return predict.waiting_ms(lines, len(chances), COSTS, batch)

    some = waiting(time_ms)
    assert -1e-9 <= some <= waiting(0.0) + 1e-9
    everything = len(chances) * COSTS.call(batch) + predict._product(chances) * batch * COSTS.unread
    assert waiting(0.0) == pytest.approx(everything)  # no time ahead: synchronous


def test_with_all_the_time_in_the_world_only_surprises_wait() -> None:
    lines = predict.lines_ahead([0.8, 0.8], 0.8, [0.5])
    predict.work_ahead(lines, COSTS, 1, 1e6)
    surprise = (1 - 0.8**3) * 0.5  # neither the guess nor its runner-up
    assert predict.waiting_ms(lines, 2, COSTS, 1) == pytest.approx(surprise * 2 * COSTS.call(1))


def test_the_likeliest_outcome_is_worked_on_first() -> None:
    lines = [Line(0.2, 2), Line(0.7, 2)]
    predict.work_ahead(lines, DraftCosts(0.0, 1.0), 1, 2.5)
    assert [line.done for line in lines] == [0, 2]


@given(CHANCES.filter(lambda chances: sum(chances) > 0.5), st.floats(0.0, 3.0))
def test_a_draft_at_the_affordable_cost_is_as_fast_as_none(chances: list[float], overhead_ms: float) -> None:
    choices = [chances[:tokens] for tokens in range(1, len(chances) + 1)]
    cost, tokens = predict.affordable_ms(STEPS, choices, overhead_ms)
    if cost <= 0.0:
        free = [predict.synchronous(STEPS, DraftCosts(0.0, 0.0), each, 1, overhead_ms) for each in choices]
        assert predict.best(free).tokens_per_s <= predict.plain(STEPS, 1) * (1 + 1e-9)
        return
    speed = predict.synchronous(STEPS, DraftCosts(cost, 0.0), choices[tokens - 1], 1, overhead_ms).tokens_per_s
    assert speed == pytest.approx(predict.plain(STEPS, 1))
    others = [predict.synchronous(STEPS, DraftCosts(cost, 0.0), each, 1, overhead_ms) for each in choices]
    assert predict.best(others).tokens_per_s == pytest.approx(speed)


def test_break_even_is_where_the_speeds_meet() -> None:
    def fastest(acceptance: float) -> float:
        each = [predict.synchronous(STEPS, COSTS, [acceptance] * tokens, 1, 1.0) for tokens in range(1, 9)]
        return predict.best(each).tokens_per_s

    share = predict.break_even(fastest, predict.plain(STEPS, 1))
    assert share is not None
    assert 0.0 < share < 1.0
    assert fastest(share) == pytest.approx(predict.plain(STEPS, 1), rel=0.01)
    assert predict.break_even(fastest, 1e6) is None


def test_a_source_that_seldom_proposes_costs_seldom() -> None:
    seldom = predict.without_model(STEPS, [0.9, 0.0, 0.1], [0.1, 0.5], 1)
    assert seldom.round_ms == pytest.approx(0.9 * 12.0 + 0.1 * 14.5)
    assert seldom.tokens_per_s == pytest.approx(1e3 * 1.15 / seldom.round_ms)
