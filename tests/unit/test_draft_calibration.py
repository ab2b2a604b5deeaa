"""How margins become confidence."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.draft.calibration import EDGES, RANKS, Calibration, prior

MARGINS = [0.01, *(edge * 1.01 for edge in EDGES)]  # one in each bin


def test_prior_curve() -> None:
    calibration = Calibration()
    confidences = [calibration.confidence(True, margin) for margin in MARGINS]
    assert prior(0.0) == 0.5
    assert confidences == sorted(confidences)
    assert 0.5 <= confidences[0] < 0.55
    assert calibration.confidence(True, 4.1) > 0.985
    assert calibration.confidence(False, float("inf")) > 0.99
    assert calibration.mean(True) == pytest.approx(0.7)


@given(st.sampled_from(MARGINS), st.floats(0.05, 0.95), st.booleans())
def test_confidence_follows_what_happens_at_that_margin_and_kind_only(margin: float, rate: float, greedy: bool) -> None:
    calibration, untouched = Calibration(), Calibration()
    owed = 0.0
    for _ in range(1500):  # evenly spread agreement of that rate
        owed += rate
        agreed = owed >= 1.0
        owed -= agreed
        calibration.observe(greedy, margin, agreed)
    assert calibration.confidence(greedy, margin) == pytest.approx(rate, abs=0.06)
    assert calibration.mean(greedy) == pytest.approx(rate, abs=0.06)
    for kind, other in itertools.product((True, False), MARGINS):
        if (kind, other) != (greedy, margin):
            assert calibration.confidence(kind, other) == untouched.confidence(kind, other)


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans(), st.integers(-1, RANKS - 1)), max_size=300))
def test_probabilities_stay_probabilities(seen: list[tuple[float, bool, int]]) -> None:
    calibration = Calibration()
    for margin, agreed, rank in seen:
        calibration.observe(True, margin, agreed, rank)
    assert all(0.0 < calibration.confidence(True, margin) < 1.0 for margin in MARGINS)
    assert all(0.0 <= share <= 1.0 for share in calibration.shares(True))
    assert sum(calibration.shares(True)) <= 1.0 + 1e-9


def test_shares_follow_where_the_targets_token_was() -> None:
    calibration = Calibration()
    for rank in [1, 1, 1, -1] * 300:
        calibration.observe(False, 1.0, False, rank)
        calibration.observe(False, 1.0, True)
    assert calibration.shares(False) == pytest.approx([0.04, 0.7, 0.01], abs=0.06)
    assert calibration.shares(True) == Calibration().shares(True)
