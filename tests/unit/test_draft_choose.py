"""Choosing draft tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.noise import log_exponential
from deployments.chain.protocol import Sampling
from deployments.draft.choose import CANDIDATES, choose, most_likely


@given(st.integers(0, 2**32 - 1), st.integers(1, 5000), st.integers(1, 40), st.booleans())
def test_most_likely_is_a_sort(seed: int, size: int, k: int, ties: bool) -> None:
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    if ties:
        logits = np.round(logits)
    assert most_likely(logits, k).tolist() == np.argsort(-logits, kind="stable")[:k].tolist()


def test_race_is_the_targets_race_over_the_likely_tokens() -> None:
    rng = np.random.default_rng(1)
    agreed = 0
    for position in range(200):
        logits = (rng.normal(size=3000) * 4).astype(np.float32)
        choice = choose(logits, Sampling(0.8, 42), position, 0)
        everything = np.argmax(logits / 0.8 - log_exponential(42, position, np.arange(3000)))
        agreed += choice.token == everything
        assert choice.token in most_likely(logits, CANDIDATES)
    assert agreed > 180


def test_probabilities_match_the_temperature() -> None:
    logits = (np.random.default_rng(2).normal(size=1000) * 3).astype(np.float32)
    for temperature, scale in ((0.0, 1.0), (0.5, 2.0), (2.0, 0.5)):
        choice = choose(logits, Sampling(temperature, 1), 0, 5)
        full = np.exp(logits.astype(np.float64) * scale)
        full /= full.sum()
        assert choice.probs.astype(np.float64) == pytest.approx(full[choice.ids], rel=2e-3)
        assert choice.probs.astype(np.float32).sum() <= 1.0


def test_certainty_sums_to_at_most_one() -> None:
    logits = np.zeros(300, np.float32)
    logits[7] = 100.0
    choice = choose(logits, Sampling(0.0, 1), 0, 4)
    assert choice.token == 7
    assert choice.probs.astype(np.float32).sum() <= 1.0
