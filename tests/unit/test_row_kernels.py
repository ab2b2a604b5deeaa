"""The compiled loops over rows of logits give what torch and NumPy give."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from deployments.chain.noise import log_exponential
from deployments.target.keyed_noise import KeyedNoise
from deployments.target.row_kernels import race, sums

seeds = st.integers(0, 2**63 - 1)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> np.ndarray:
    """``[R, V]``: flat and peaked, shifted, with excluded tokens, of sizes that fill no block."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([1, 7, 255, 256, 257, 3000]))
    scale, shift = draw(st.sampled_from([0.0, 0.1, 3.0, 40.0, 400.0])), draw(st.sampled_from([0.0, -200.0, 500.0]))
    logits = (rng.normal(size=(count, vocab)) * scale + shift).astype(np.float32)
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.5, 0.999]))] = -np.inf
    logits[np.arange(count), rng.integers(0, vocab, count)] = shift
    return logits


@given(rows_of_logits(), seeds, st.integers(0, 2**20))
@settings(deadline=None)
def test_the_race_is_won_by_whom_the_noise_says(logits: np.ndarray, seed: int, position: int) -> None:
    keys = [(seed, position + n) for n in range(len(logits))]
    ids = np.arange(logits.shape[1])
    winners = race(logits, keys)
    for row, (key, winner) in enumerate(zip(keys, winners, strict=True)):
        scores = logits[row].astype(np.float64) - log_exponential(*key, ids)
        assert scores[winner] >= scores.max() - 1e-5 * max(1.0, abs(scores.max()))


def test_it_is_the_race_torch_runs_elsewhere() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(64, 5000)) * 2).astype(np.float32)
    keys = [(n, 3 * n) for n in range(len(logits))]
    noise = KeyedNoise(logits.shape[1], torch.device("cpu")).log_exponential(keys)
    assert race(logits, keys).tolist() == (torch.from_numpy(logits) - noise).argmax(dim=1).tolist()


def test_it_draws_from_the_distribution() -> None:
    logits = np.full((1, 600), -np.inf, np.float32)
    tokens = [3, 255, 256, 511, 599]
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    logits[0, tokens] = np.log(probabilities)
    n = 20_000
    won = race(np.repeat(logits, 100, 0), [(seed, 11) for seed in range(100)])
    assert set(won.tolist()) <= set(tokens)
    wins = np.zeros(5)
    for start in range(0, n, 100):
        won = race(np.repeat(logits, 100, 0), [(seed, 11) for seed in range(start, start + 100)])
        wins += (won[:, None] == tokens).sum(axis=0)
    assert stats.chisquare(wins, probabilities * n).pvalue > 1e-3


def test_logits_without_sense_give_some_token() -> None:
    """A grammar that leaves nothing, and numbers that are none: the engine goes on, as it does with torch's argmax."""
    for value in (-np.inf, np.nan, np.inf, 1e30, -1e30):
        logits = np.full((1, 300), value, np.float32)
        assert 0 <= race(logits, [(1, 2)])[0] < 300
    logits = np.zeros((1, 300), np.float32)
    logits[0, 280] = 1e6  # beyond the bounds' range
    assert race(logits, [(1, 2)])[0] == 280


@given(rows_of_logits(), st.floats(-5, 50))
@settings(deadline=None)
def test_sums_are_those_of_float64(logits: np.ndarray, below: float) -> None:
    reference = (logits.max(axis=1) - below).astype(np.float32)
    rows = np.arange(len(logits))[::-1].copy()
    highest, log_sum = sums(logits, rows, reference[::-1].copy())
    wide = torch.from_numpy(logits[::-1].astype(np.float64))
    assert log_sum == pytest.approx(torch.logsumexp(wide, 1).numpy(), abs=3e-5)
    assert highest == pytest.approx(wide.amax(1).numpy(), abs=3e-5)


@pytest.mark.parametrize("high", [81.0, 500.0, 1e30])
def test_rows_far_above_their_reference_are_summed_as_well(high: float) -> None:
    logits = np.full((1, 100), -1.0, np.float32)
    logits[0, [70, 71]] = high
    highest, log_sum = sums(logits, np.zeros(1, np.int64), np.asarray([-1.0], np.float32))
    assert highest[0] == np.float32(high)
    assert log_sum[0] == pytest.approx(np.float32(high) + np.log(2.0))


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_rows_it_cannot_sum_are_told(bad: float) -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[1, 70] = bad
    highest, log_sum = sums(logits, np.arange(2), np.zeros(2, np.float32))
    assert np.isfinite([highest[0], log_sum[0]]).all()
    assert np.isnan([highest[1], log_sum[1]]).all()
