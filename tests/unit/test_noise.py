"""The sampling noise: the same in NumPy and torch, exponential, independent of everything but its key."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from deployments.chain.noise import key_words, log_exponential, race
from deployments.target.keyed_noise import KeyedNoise

VOCAB = 4096
seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**20)


def test_golden_values() -> None:
    """A draft and a target of different versions must draw alike: the stream never changes."""
    assert key_words(0, 0) == (1293516399, 2802244911)
    assert key_words(2**63 - 1, 8191) == (1531989403, 832704225)
    values = log_exponential(42, 17, np.array([0, 1, 2, 49151]))
    np.testing.assert_allclose(values, GOLDEN, rtol=1e-6)


GOLDEN = [-0.8607397079467773, -1.3435373306274414, -3.374788284301758, -3.2787187099456787]


@given(seeds, positions)
@settings(max_examples=30, deadline=None)
def test_torch_equals_numpy(seed: int, position: int) -> None:
    noise = KeyedNoise(VOCAB, torch.device("cpu")).log_exponential([(seed, position)])
    expected = log_exponential(seed, position, np.arange(VOCAB))
    np.testing.assert_allclose(noise[0].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    noise = KeyedNoise(VOCAB, torch.device("cpu"))
    keys = [(1, 0), (1, 1), (2, 0), (2**63 - 1, 10**6)]
    together = noise.log_exponential(keys)
    for row, key in enumerate(keys):
        assert torch.equal(together[row], noise.log_exponential([key])[0])


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_exponential_along_every_axis(axis: str) -> None:
    n = 20_000
    if axis == "token":
        sample = log_exponential(3, 5, np.arange(n))
    elif axis == "position":
        sample = np.array([log_exponential(3, p, np.array([77]))[0] for p in range(n)])
    else:
        sample = np.array([log_exponential(s, 5, np.array([77]))[0] for s in range(n)])
    assert stats.kstest(np.exp(sample), "expon").pvalue > 1e-3


def test_neighbouring_positions_and_seeds_are_uncorrelated() -> None:
    ids = np.arange(50_000)
    base = np.exp(log_exponential(9, 100, ids))
    for other in (log_exponential(9, 101, ids), log_exponential(10, 100, ids)):
        assert abs(np.corrcoef(base, np.exp(other))[0, 1]) < 0.02


def test_race_draws_from_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    ids = np.array([3, 900, 12_000, 40_000, 49_151])
    n = 20_000
    wins = np.bincount([race(np.log(probabilities), ids, seed, 11) for seed in range(n)], minlength=5)
    assert stats.chisquare(wins, probabilities * n).pvalue > 1e-3


def test_race_ignores_impossible_tokens() -> None:
    with np.errstate(divide="ignore"):
        logs = np.log(np.array([0.0, 1.0, 0.0]))
    assert all(race(logs, np.arange(3), seed, 0) == 1 for seed in range(200))
