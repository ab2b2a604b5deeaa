"""The keyed noise as one stream: uniform and without memory across positions, rows, seeds and tokens; and what a shared seed shares."""

import math

import numpy as np
import pytest
from scipy import stats

from deployments.chain.noise import log_exponential
from deployments.target.row_kernels import race

FALSE_ALARM = 1e-6  # of each test
N = 12_000


def uniforms(axis: str) -> np.ndarray:
    """``[N]`` of the noise along one axis of its key, the others fixed, as uniform numbers."""
    if axis == "token":
        noise = log_exponential(12, 34, np.arange(N))
    elif axis == "position":
        noise = np.asarray([log_exponential(12, position, np.array([56]))[0] for position in range(N)])
    elif axis == "seed":
        noise = np.asarray([log_exponential(seed, 34, np.array([56]))[0] for seed in range(N)])
    elif axis == "row":  # of a batch whose seeds are what vLLM gives to n samples, all at one position each
        noise = np.asarray([log_exponential(1000 + n % 8, 34 + n // 8, np.array([56]))[0] for n in range(N)])
    else:  # seeds that differ in high bits only
        noise = np.asarray([log_exponential(n << 40, 34, np.array([56]))[0] for n in range(N)])
    return -np.expm1(-np.exp(noise.astype(np.float64)))


@pytest.mark.parametrize("axis", ["token", "position", "seed", "row", "high bits of the seed"])
def test_uniform_and_without_memory(axis: str) -> None:
    u = uniforms(axis)
    assert stats.chisquare(np.histogram(u, 256, (0, 1))[0]).pvalue > FALSE_ALARM
    fine = np.floor(u * 2**16).astype(np.int64) % 64  # bits further down
    assert stats.chisquare(np.bincount(fine, minlength=64)).pvalue > FALSE_ALARM
    for lag in (1, 2, 8):  # neighbours, and the same row of the next step
        pairs = np.histogram2d(u[:-lag:2], u[lag::2][: len(u[:-lag:2])], 16, ((0, 1), (0, 1)))[0]
        assert stats.chisquare(pairs.ravel()).pvalue > FALSE_ALARM
    # the least of some hundred decide races: they must be spread as well
    least = u.reshape(-1, 100).min(axis=1)
    assert stats.kstest(1.0 - (1.0 - least) ** 100, "uniform").pvalue > FALSE_ALARM


def draws(chances: list[float], keys: list[tuple[int, int]]) -> np.ndarray:
    logits = np.log(np.asarray([chances] * len(keys), np.float32))
    return race(logits, keys)


CHANCES = [0.4, 0.3, 0.2, 0.1]


def contingency(left: np.ndarray, right: np.ndarray) -> float:
    table = np.zeros((4, 4))
    np.add.at(table, (left, right), 1)
    return float(stats.chi2_contingency(table).pvalue)


def test_rows_of_other_seeds_and_other_positions_are_independent() -> None:
    here = draws(CHANCES, [(seed, 9) for seed in range(N)])
    assert stats.chisquare(np.bincount(here, minlength=4), np.asarray(CHANCES) * N).pvalue > FALSE_ALARM
    for keys in (
        [(seed + 1, 9) for seed in range(N)],
        [(seed, 10) for seed in range(N)],
        [(seed ^ 1, 8) for seed in range(N)],
    ):
        assert contingency(here, draws(CHANCES, keys)) > FALSE_ALARM


def test_requests_that_share_a_seed_are_coupled_at_equal_positions_and_nowhere_else() -> None:
    """Two prompts with one seed draw with the same noise where their sequences are as long.

    Each is drawn from its own distribution. Together they agree as often as two samples can, which is what makes an answer to a
    slightly changed prompt comparable, and what a draft that knows the seed lives on; independent samples have different
    seeds, or none.
    """
    other = [0.1, 0.2, 0.3, 0.4]
    seeds = range(N)
    left, right = draws(CHANCES, [(s, 9) for s in seeds]), draws(other, [(s, 9) for s in seeds])
    for drawn, chances in ((left, CHANCES), (right, other)):
        assert stats.chisquare(np.bincount(drawn, minlength=4), np.asarray(chances) * N).pvalue > FALSE_ALARM
    apart = float(np.dot(CHANCES, other))
    assert (left == right).mean() > apart + 0.2
    shifted = draws(other, [(s, 10) for s in seeds])
    assert contingency(left, shifted) > FALSE_ALARM
    assert abs((left == shifted).mean() - apart) < 5 * math.sqrt(apart * (1 - apart) / N)
