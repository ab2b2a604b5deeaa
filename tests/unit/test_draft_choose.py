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


def kept_by_vllm(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """Top-k, then top-p over what it left: a token stays iff those strictly more likely hold less than top-p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[scaled[order] >= scaled[order[min(sampling.top_k, len(order)) - 1]]]
    mass = np.exp(scaled[order] - scaled[order[0]])
    mass /= mass.sum()
    return {int(token) for token, before in zip(order, np.cumsum(mass) - mass, strict=True) if before < sampling.top_p}


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 5, 32]),
    st.sampled_from([0.05, 0.3, 0.9, 0.999, 1.0]),
    st.floats(0.3, 2.0),
    st.sampled_from([3, 40, 2000]),
)
def test_only_what_the_target_can_draw_races(seed: int, top_k: int, top_p: float, heat: float, size: int) -> None:
    logits = (np.random.default_rng(seed).normal(size=size) * 3).astype(np.float32)
    sampling = Sampling(heat, seed, top_k, top_p)
    choice = choose(logits, sampling, 7, 0)
    kept = kept_by_vllm(logits, sampling)
    racing = [token for token in most_likely(logits, CANDIDATES).tolist() if token in kept]
    scores = logits[racing] / np.float32(heat) - log_exponential(seed, 7, np.array(racing))
    order = np.argsort(-scores, kind="stable")
    assert choice.token == racing[order[0]]
    assert list(choice.runners) == [racing[place] for place in order[1:4]]
    if len(racing) > 1:
        assert choice.margin == pytest.approx(float(scores[order[0]] - scores[order[1]]), abs=1e-3)
    else:
        assert choice.margin == float("inf")


def test_greedy_runners_are_the_next_most_likely() -> None:
    logits = np.array([0.0, 5.0, 3.0, 4.5, 1.0], np.float32)
    choice = choose(logits, Sampling(0.0, 1), 0, 0)
    assert (choice.token, choice.runners) == (1, (3, 2, 4))
    assert choice.margin == pytest.approx(0.5)
    assert choose(logits[:1], Sampling(0.0, 1), 0, 0).margin == float("inf")


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 2.0), st.sampled_from([0, 5, 40]), st.sampled_from([1.0, 0.7]))
def test_a_trimmed_vocabulary_is_the_whole_one_without_the_rest(seed: int, heat: float, k: int, top_p: float) -> None:
    """The same choice, noise and probabilities as from logits that rule out every token without one."""
    rng = np.random.default_rng(seed)
    kept = np.sort(rng.choice(900, 300, replace=False)).astype(np.int32)
    logits = (rng.normal(size=300) * 3).astype(np.float32)
    whole = np.full(900, -np.inf, np.float32)
    whole[kept] = logits
    sampling = Sampling(0.0 if heat < 0.1 else heat, seed, k, top_p)
    trimmed, full = choose(logits, sampling, 9, 4, token_ids=kept), choose(whole, sampling, 9, 4)
    assert (trimmed.token, trimmed.runners, trimmed.margin) == (full.token, full.runners, full.margin)
    assert trimmed.ids.tolist() == full.ids.tolist()
    assert trimmed.ids.dtype == full.ids.dtype
    np.testing.assert_allclose(trimmed.probs.astype(np.float32), full.probs.astype(np.float32), atol=2e-3)
