"""Intervals against exact values and simulation, and what two answers look like beside each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from scripts.calibrate_lib.answers import Answer, Pair, differing, first_difference
from scripts.calibrate_lib.figures import figures
from scripts.calibrate_lib.intervals import LEAST, bootstrap, paired_change, typical, wilson
from scripts.calibrate_lib.item_sets import Item

NUMBER = Item(id="n", set="s", prompt="?", max_tokens=8, check="number", gold="5")
PROSE = Item(id="p", set="s", prompt="?", max_tokens=8)


def made(tokens: list[int], text: str = "", **more: object) -> Answer:
    return Answer(id="n", tokens=tokens, text=text, finish="stop", steps=len(tokens), **more)  # type: ignore[arg-type]


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (1, 10), (37, 100), (100, 100), (1, 1)])
def test_wilson_is_wilson(hits: int, n: int) -> None:
    mine, theirs = wilson(hits, n), binomtest(hits, n).proportion_ci(method="wilson")
    assert mine is not None
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert mine.value == hits / n


def test_nothing_changed_in_few_answers_excludes_little() -> None:
    few, many = wilson(0, 20), wilson(0, 400)
    assert few is not None
    assert many is not None
    assert few.value == many.value == 0.0
    assert few.high > 0.1 > 0.01 > many.high
    assert wilson(0, 0) is None


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_a_paired_change_lies_in_its_interval(pairs: list[tuple[bool, bool]]) -> None:
    before, after = zip(*pairs, strict=True)
    change = paired_change(before, after)
    back = paired_change(after, before)
    assert change is not None
    assert back is not None
    assert -1.0 - 1e-9 <= change.low <= change.value <= change.high <= 1.0 + 1e-9
    assert change.value == pytest.approx(np.mean(after) - np.mean(before))
    assert (back.low, back.high) == pytest.approx((-change.high, -change.low))


def test_a_paired_change_is_never_certain() -> None:
    """Also where not one score changed: there may be items that would."""
    change = paired_change([True] * 30 + [False] * 30, [True] * 30 + [False] * 30)
    assert change is not None
    assert change.value == 0.0
    assert change.low < -0.02
    assert change.high > 0.02
    assert paired_change([], []) is None


def test_paired_intervals_cover() -> None:
    """In at least 93 % of runs, lost and gained being rare or not."""
    random = np.random.default_rng(3)
    for lost, gained in ((0.02, 0.02), (0.2, 0.05), (0.3, 0.3)):
        hits, runs = 0, 400
        for _ in range(runs):
            kind = random.choice(3, 60, p=[lost, gained, 1 - lost - gained])
            change = paired_change([bool(k == 0) for k in kind], [bool(k == 1) for k in kind])
            assert change is not None
            hits += change.low <= gained - lost <= change.high
        assert hits / runs > 0.93, (lost, gained)


def test_bootstrap_of_a_ratio_covers() -> None:
    random = np.random.default_rng(4)
    hits, runs = 0, 150
    for _ in range(runs):
        length = random.integers(5, 40, 50)
        estimate = bootstrap([random.binomial(length, 0.2), length], np.divide)
        assert estimate is not None
        hits += estimate.low <= 0.2 <= estimate.high
    assert hits / runs > 0.88


def test_bootstrap_says_nothing_where_nothing_can_be_said() -> None:
    none, same, few = bootstrap([[], []], np.divide), bootstrap([[1] * 9, [2] * 9], np.divide), [1.0] * (LEAST - 1)
    assert none is None
    assert same is not None
    assert (same.value, same.low, same.high) == (0.5, None, None)
    short = bootstrap([few, few], np.divide)
    assert short is not None
    assert short.low is None
    assert bootstrap([[1.0] * 9, [0.0] * 9], np.divide) is None  # nothing drafted: there is no acceptance
    again = bootstrap([[1, 2, 3, 4, 5, 6]], np.sqrt)
    assert again == bootstrap([[1, 2, 3, 4, 5, 6]], np.sqrt)


def test_typical_encloses_the_median_of_what_it_was_drawn_from() -> None:
    random = np.random.default_rng(5)
    for n in (6, 12, 25):
        hits, runs = 0, 500
        for _ in range(runs):
            estimate = typical([float(value) for value in random.lognormal(0.0, 0.5, n)])
            assert estimate is not None
            hits += estimate.low <= 1.0 <= estimate.high
        assert hits / runs > 0.93, n
    assert typical([]) is None
    few = typical([1.2, 1.1, 1.3])
    assert few is not None
    assert (few.value, few.low) == (1.2, None)


def test_typical_is_no_wider_than_it_has_to_be() -> None:
    """Of twelve values the third from either end: outside lie 2 · (1 + 12 + 66) / 4096 < 0.05, and one more would be too many."""
    estimate = typical([float(value) for value in range(12)])
    assert estimate is not None
    assert (estimate.low, estimate.high) == (2.0, 9.0)
    assert (
        2 * sum(math.comb(12, k) for k in range(3)) / 2**12 < 0.05 < 2 * sum(math.comb(12, k) for k in range(4)) / 2**12
    )


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "other", "first", "count"),
    [
        ([1, 2, 3], [1, 2, 3], None, 0),
        ([1, 2, 3], [1, 9, 3], 1, 1),
        ([1, 2, 3], [1, 2], 2, 1),
        ([1, 2], [1, 2, 3, 4], 2, 2),
        ([1, 2, 3], [9, 1, 2, 3], 0, 4),
        ([], [], None, 0),
    ],
)
def test_where_token_sequences_part(own: list[int], other: list[int], first: int | None, count: int) -> None:
    assert first_difference(own, other) == first
    assert differing(own, other) == differing(other, own) == count


def test_changed_is_what_a_client_sees() -> None:
    own = made([1, 2], "ab")
    assert not Pair(PROSE, own, made([3], "ab")).changed
    assert Pair(PROSE, own, made([1, 2], "a b")).changed
    cut = Answer(id="n", tokens=[1, 2], text="ab", finish="length", steps=2)
    assert Pair(PROSE, own, cut).changed


def test_figures_of_answers() -> None:
    own = made([1, 2, 3, 4], "It is 5", nll=4.0)
    same = made([1, 2, 3, 4], "It is 5", nll=4.0, drafted=4, accepted=3, similarity=1.0)
    worse = made([1, 2, 9, 9], "It is 6", nll=8.0, drafted=4, accepted=4, relaxed=[2, 3], similarity=0.5)
    found = figures([Pair(NUMBER, own, same)] * 3 + [Pair(NUMBER, own, worse)])
    assert found.changed is not None
    assert found.changed.value == 0.25
    values = {
        "differing": 2 / 16,
        "relaxed": 2 / 16,
        "agreement": 0.75,
        "similarity": 0.875,
        "perplexity": math.exp(20 / 16),
        "perplexity_ratio": math.exp(20 / 16 - 1),
        "score": 0.75,
        "score_change": -0.25,
        "acceptance": 13 / 16,
        "step_gain": 1.0,
    }
    for name, value in values.items():
        assert getattr(found, name).value == pytest.approx(value), name
    assert found.first_difference == 2


def test_what_was_not_measured_is_not_made_up() -> None:
    own, other = made([1, 2], "a"), made([1, 3], "b")
    found = figures([Pair(PROSE, own, other)] * 6)
    assert found.score is None
    assert found.score_change is None
    assert found.similarity is None
    assert found.perplexity is None
    assert found.acceptance is None
    assert figures([]).changed is None
