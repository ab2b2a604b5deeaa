"""NKL from a draft's top-k: against the whole distributions, its bound, and where it is not defined."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deployments.chain.acceptance import nkl
from deployments.chain.acceptance.policy import Policy


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Draft probabilities and target logits over one vocabulary, from near to far apart, and a ``k``."""
    vocab = draw(st.integers(2, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sharpness, distance = draw(st.floats(0.1, 6.0)), draw(st.floats(0.0, 4.0))
    target = rng.normal(size=vocab) * sharpness
    draft = softmax(target + rng.normal(size=vocab) * distance)
    return draft, target, draw(st.integers(1, vocab))


def top(draft: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-draft)[:k]
    return ids, draft[ids]


@given(pairs())
def test_the_exact_value_lies_within_the_bound(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    draft, target, k = pair
    ids, probs = top(draft, k)
    assume(nkl.usable(ids, probs, len(draft)))
    exact = float(np.sum(draft * np.log(draft / softmax(target)))) / math.log(len(draft))
    value, _ = nkl.nkl(ids, probs, target)
    bound = float(nkl.error_bound(ids, probs, target))
    assert bound >= 0.0
    rounding = 1e-6
    if value < 1.0:
        assert value <= exact + rounding
        assert exact <= value + bound + rounding
    else:
        assert exact >= 1.0 - rounding


@given(pairs())
def test_with_all_tokens_it_is_exact(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    draft, target, _ = pair
    ids, probs = top(draft, len(draft))
    assume(nkl.usable(ids, probs, len(draft)))
    exact = float(np.sum(draft * np.log(draft / softmax(target)))) / math.log(len(draft))
    assert float(nkl.nkl(ids, probs, target)[0]) == pytest.approx(min(max(exact, 0.0), 1.0), abs=1e-6)
    assert float(nkl.error_bound(ids, probs, target)) == 0.0


@given(pairs())
def test_more_probabilities_never_make_it_less(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    draft, target, k = pair
    ids, probs = top(draft, k)
    assume(nkl.usable(ids, probs, len(draft)) and k < len(draft))
    assert nkl.nkl(ids, probs, target)[0] <= nkl.nkl(*top(draft, k + 1), target)[0] + 1e-6


@given(pairs())
def test_equal_distributions_have_none(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    _, target, k = pair
    ids, probs = top(softmax(target), k)
    assume(nkl.usable(ids, probs, len(target)))
    assert float(nkl.nkl(ids, probs, target)[0]) == pytest.approx(0.0, abs=1e-6)


@given(pairs())
def test_float16_on_the_wire_moves_it_little(pair: tuple[np.ndarray, np.ndarray, int]) -> None:
    """Rounding down moves at most 2**-10 of the mass, into the tail; KL is convex, so its gradients bound the change."""
    draft, target, k = pair
    ids, probs = top(draft, k)
    sent = probs.astype(np.float16)
    sent = np.where(sent > probs, np.nextafter(sent, np.float16(0)), sent).astype(np.float32)
    assume(nkl.usable(ids, probs, len(draft)) and nkl.usable(ids, sent, len(draft)) and (sent > 0).all())
    q = softmax(target)
    rest = max(1.0 - q[ids].sum(), nkl.REST)
    slopes = []
    for p in (probs, sent.astype(np.float64)):
        tail = max(1.0 - p.sum(), 1e-12)
        slopes.append(np.abs(math.log(tail / rest) - np.log(p / q[ids])).max())
    allowed = (2.0**-10 + k * 2.0**-24) * max(slopes) / math.log(len(draft))
    assert abs(float(nkl.nkl(ids, sent, target)[0] - nkl.nkl(ids, probs, target)[0])) <= allowed + 1e-6


IDS, PROBS, LOGITS = [3, 1, 0], [0.5, 0.3, 0.1], [1.0, 0.5, 0.0, 1.5, 0.2]


@pytest.mark.parametrize(
    ("ids", "probs", "logits"),
    [
        ([], [], LOGITS),
        (IDS, [0.0, 0.0, 0.0], LOGITS),
        (IDS, [1.0, 0.0, 0.0], LOGITS),
        (IDS, [0.9995, 0.0, 0.0], LOGITS),
        (IDS, [0.8, 0.3, 0.1], LOGITS),
        (IDS, [0.5, -0.1, 0.1], LOGITS),
        (IDS, [0.5, math.nan, 0.1], LOGITS),
        (IDS, [math.inf, 0.1, 0.1], LOGITS),
        ([3, 3, 0], PROBS, LOGITS),
        ([3, 5, 0], PROBS, LOGITS),
        ([3, -1, 0], PROBS, LOGITS),
        (IDS, PROBS, [1.0, -math.inf, 0.0, 1.5, 0.2]),
        (IDS, PROBS, [1.0, math.nan, 0.0, 1.5, 0.2]),
        (IDS, PROBS, [1.0, 0.5, 0.0, math.inf, 0.2]),
        (IDS, PROBS, [1.0, 0.5, math.nan, 1.5, 0.2]),
        (IDS, PROBS, [-math.inf] * 5),
    ],
)
def test_what_is_not_defined_is_as_far_as_can_be(ids: Any, probs: Any, logits: Any) -> None:
    value, _ = nkl.nkl(np.asarray(ids, np.int64), np.asarray(probs), np.asarray(logits))
    assert float(value) == 1.0


def test_what_it_is_compared_with_is_defined() -> None:
    value, largest = nkl.nkl(np.asarray(IDS), np.asarray(PROBS), np.asarray(LOGITS))
    assert 0.0 < float(value) < 0.2
    assert float(largest) == pytest.approx(softmax(np.asarray(LOGITS)).max())


def test_entries_without_mass_count_for_nothing() -> None:
    padded = nkl.nkl(np.asarray([*IDS, 3, 99]), np.asarray([*PROBS, 0.0, 0.0]), np.asarray(LOGITS))
    assert float(padded[0]) == float(nkl.nkl(np.asarray(IDS), np.asarray(PROBS), np.asarray(LOGITS))[0])


def test_a_token_the_target_excludes_matters_only_to_who_would_say_it() -> None:
    excluded = np.asarray([1.0, 0.5, 0.0, 1.5, -math.inf])
    assert float(nkl.nkl(np.asarray(IDS), np.asarray(PROBS), excluded)[0]) < 0.2


def limits(policy: Policy, offsets: int, generated: int) -> np.ndarray:
    knobs = np.asarray([policy.delta, policy.alpha, policy.delta_max, policy.length_scale])
    return nkl.limits(*knobs, np.arange(offsets), np.asarray(generated))


def test_thresholds_grow_into_a_draft_up_to_the_cap() -> None:
    found = limits(Policy(name="nkl", delta=0.1, alpha=0.5, delta_max=0.2), 16, 7)
    assert found[0] == pytest.approx(0.1)
    assert found[1] == pytest.approx(0.15)
    assert found[3:].tolist() == pytest.approx([0.2] * 13)
    assert (np.diff(found) >= 0).all()


def test_length_scale_shrinks_them_after_so_many_tokens() -> None:
    policy = Policy(name="nkl", delta=0.1, alpha=0.0, length_scale=100)
    assert limits(policy, 1, 50).tolist() == pytest.approx([0.1])
    assert limits(policy, 1, 399).tolist() == pytest.approx([0.025])
