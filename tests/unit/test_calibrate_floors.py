"""Which setting is recommended at a quality floor, and when none is."""

from dataclasses import replace

import pytest

from scripts.calibrate_lib.figures import NOTHING, Figures
from scripts.calibrate_lib.floors import Candidate, Floor, parse_floor, recommend
from scripts.calibrate_lib.intervals import Estimate, wilson
from scripts.calibrate_lib.report import advice_dict, sentence

FLOOR = Floor("changed", 0.01)


def figures(changed: int, n: int = 200, *, relaxed: float = 0.02, steps: float = 1.1) -> Figures:
    return replace(
        NOTHING,
        changed=wilson(changed, n),
        relaxed=Estimate(relaxed, None, None, n),
        step_gain=Estimate(steps, steps - 0.02, steps + 0.02, n),
        perplexity_ratio=Estimate(1.0 + changed / n, 1.0, 1.0 + 2 * changed / n, n),
    )


def candidate(
    name: str, changed: int, n: int = 200, speed: tuple[float, float] | None = (1.2, 1.1), **more: float
) -> Candidate:
    measured = Estimate(speed[0], speed[1], 2 * speed[0] - speed[1], 12) if speed else None
    return Candidate(name, figures(changed, n, **more), measured)


def test_the_most_steps_saved_wins_among_those_that_keep_the_floor() -> None:
    found = recommend(
        [candidate("a", 1, steps=1.05), candidate("b", 2, steps=1.2), candidate("c", 3, steps=1.5)], FLOOR
    )
    assert (found.outcome, found.choice.name) == ("found", "b")  # c changes 1.5 %
    assert not found.sure  # 2 of 200: up to 3.6 %
    assert "do not exclude 3.6%" in sentence(found)


def test_it_is_sure_with_enough_answers() -> None:
    found = recommend([candidate("a", 0, n=1000)], FLOOR)
    assert found.sure
    assert "whole interval" in sentence(found)
    assert recommend([candidate("a", 0, n=100)], FLOOR).sure is False


def test_nothing_keeps_the_floor() -> None:
    found = recommend([candidate("a", 60), candidate("b", 30), candidate("c", 90)], FLOOR)
    assert (found.outcome, found.choice, found.nearest.name) == ("none_keeps", None, "b")
    assert "use lossless" in sentence(found)
    assert advice_dict(found)["setting"] is None


def test_no_gain_is_no_recommendation() -> None:
    """Also where the figure is above 1 but chance explains it, or was measured too seldom to tell."""
    unsure = Candidate("c", figures(0), Estimate(1.3, None, None, 2))
    found = recommend([candidate("a", 0, speed=(1.02, 0.97)), candidate("b", 1, speed=(0.9, 0.8)), unsure], FLOOR)
    assert (found.outcome, found.choice) == ("no_gain", None)
    assert "use lossless" in sentence(found)


def test_without_a_speed_the_steps_decide() -> None:
    found = recommend([candidate("a", 0, speed=None, steps=1.1)], FLOOR)
    assert found.choice.name == "a"
    assert "speed was not measured" in sentence(found)
    assert recommend([candidate("a", 0, speed=None, steps=1.01)], FLOOR).outcome == "no_gain"


def test_what_lets_nothing_pass_is_not_recommended() -> None:
    """It keeps every floor, and may even look faster: it is lossless with noise."""
    found = recommend([candidate("a", 0, relaxed=0.0), candidate("b", 0, relaxed=0.0)], FLOOR)
    assert (found.outcome, found.choice) == ("no_effect", None)
    found = recommend([candidate("a", 0, relaxed=0.0), candidate("b", 60)], FLOOR)
    assert found.outcome == "none_keeps"


def test_of_equals_the_strictest_wins() -> None:
    same = [candidate(name, 1, relaxed=relaxed) for name, relaxed in (("c", 0.04), ("a", 0.01), ("b", 0.02))]
    assert recommend(same, FLOOR).choice.name == "a"


def test_too_few_answers_cannot_tell_one_per_cent() -> None:
    """One of 99 is more than 1 %, so only perfection would pass, which 99 answers do not show."""
    found = recommend([candidate("a", 0, n=99)], FLOOR)
    assert (found.outcome, found.choice) == ("too_few", None)
    assert "100 are needed" in sentence(found)
    assert recommend([candidate("a", 0, n=100)], FLOOR).outcome == "found"
    assert recommend([candidate("a", 0, n=9)], Floor("agreement", 0.9)).outcome == "unmeasured"
    assert Floor("agreement", 0.9).least_answers == 10
    assert Floor("changed", 0.0).least_answers == 1
    assert Floor("perplexity", 1.01).least_answers == 1


def test_what_was_not_measured_is_not_judged() -> None:
    assert recommend([], FLOOR).outcome == "unmeasured"
    found = recommend([candidate("a", 0)], Floor("similarity", 0.98))
    assert (found.outcome, found.choice) == ("unmeasured", None)
    assert "not measured" in sentence(found)
    assert advice_dict(found)["figure"] is None


def test_floors_of_both_directions() -> None:
    floor = Floor("perplexity", 1.02)
    found = recommend([candidate("a", 2, n=200, steps=1.1), candidate("b", 8, n=200, steps=1.3)], floor)
    assert found.choice.name == "a"
    assert found.sure
    score = Floor("score", -0.02)
    better, worse = (
        Candidate(
            name,
            replace(figures(0), score_change=Estimate(value, value - 0.1, value + 0.1, 60)),
            Estimate(1.2, 1.1, 1.3, 12),
        )
        for name, value in (("better", -0.01), ("worse", -0.03))
    )
    found = recommend([worse, better], score)
    assert found.choice.name == "better"
    assert not found.sure  # down to -11 %


@pytest.mark.parametrize(
    ("text", "floor", "says"),
    [
        ("changed<=1%", Floor("changed", 0.01), "answers changed ≤ 1 %"),
        ("changed <= 0.05", Floor("changed", 0.05), "answers changed ≤ 5 %"),
        ("agreement>=97.5%", Floor("agreement", 0.975), "≥ 97.5 %"),
        ("perplexity<=1.02", Floor("perplexity", 1.02), "≤ 1.02"),
        ("score>=-2%", Floor("score", -0.02), "≥ -2 %"),
        ("changed<=10%", Floor("changed", 0.1), "≤ 10 %"),
        ("changed<=0%", Floor("changed", 0.0), "≤ 0 %"),
    ],
)
def test_floors_are_read(text: str, floor: Floor, says: str) -> None:
    assert parse_floor(text) == floor
    assert says in floor.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("changed", "no quality floor"),
        ("speed>=2", "one is of changed"),
        ("changed>=1%", "less is better"),
        ("score<=1%", "more is better"),
        ("changed<=x", "no quality floor"),
        ("changed<=1%; rm", "no quality floor"),
    ],
)
def test_what_is_no_floor_says_what_is(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_floor(text)
