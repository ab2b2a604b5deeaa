r"""NKL: how far the draft's next-token distribution is from the target's, as a share of the largest possible entropy.

``NKL = clamp(KL(draft ‖ target) / ln V, 0, 1)``, both at the same temperature. A draft sends its ``k`` largest
probabilities ``p_i`` and thereby the mass ``τ = 1 - Σ p_i`` of all others, its *tail*. The target's distribution ``q`` is
known in full. The tail is taken to be spread as the target spreads its own mass ``ρ = 1 - Σ q_i`` over those tokens::

    KL_k = Σ_{i in top k} p_i ln(p_i / q_i)  +  τ ln(τ / max(ρ, REST))

By the chain rule of KL the full-vocabulary value is ``KL_k + τ KL(p' ‖ q')`` (for ``ρ ≥ REST``), ``p'`` and ``q'`` being the
two tails normalised. So ``KL_k`` never exceeds it. And since no tail token is more likely for the draft than the least of
the top ``k``, ``p_k``, the entropy of ``p'`` is at least ``ln(τ / p_k)``, while ``-Σ p' ln q' ≤ ln(ρ / q_min)`` with ``q_min``
the target's least probability in the tail. Hence the error bound that :func:`error_bound` returns::

    0 ≤ KL - KL_k ≤ τ [ln(max(ρ, REST) / q_min) - max(0, ln(τ / p_k))]

It vanishes with the tail's mass. ``REST`` keeps the rounding of float16 probabilities (a tail of 0.0005 that is not there)
from looking like an infinite divergence where the top ``k`` is all the target has.

Where the value is not defined it is 1, so that only an exact match passes: no probabilities, none above zero, a sum above 1,
a token twice or outside the vocabulary, all mass on one token (a draft by look-up or by rule: it says nothing of what else
it would have said), mass on a token the target cannot say, a logit that is NaN or +inf. Entries without mass are no entries.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance.evidence import Bools, Evidence, Floats, Ints
from deployments.chain.acceptance.policy import Policy

ONE_HOT = 1.0 - 2.0**-10  # float16 cannot tell more than this from certainty
OVERFULL = 1.0 + 2.0**-10  # what rounding may add to a sum of probabilities
REST = 2.0**-20

Values = npt.NDArray[np.float64]


def usable(ids: Ints, probs: Floats, vocab_size: int) -> Bools:
    """Whether ``probs [..., k]`` of ``ids [..., k]`` say something about a distribution over ``vocab_size``: ``[...]``."""
    width = ids.shape[-1]
    if not width:
        return np.zeros(ids.shape[:-1], dtype=np.bool_)
    entry = probs > 0
    ordered = np.sort(np.where(entry, ids, -1 - np.arange(width)), axis=-1)  # what is no entry differs from all
    distinct = (ordered[..., 1:] != ordered[..., :-1]).all(axis=-1)
    inside = (~entry | ((ids >= 0) & (ids < vocab_size))).all(axis=-1)
    total = probs.sum(axis=-1)
    mass = (probs >= 0).all(axis=-1) & (total > 0) & (total <= OVERFULL) & (probs.max(axis=-1) < ONE_HOT)
    result: Bools = distinct & inside & mass
    return result


def named(tokens: Ints, ids: Ints, probs: Floats) -> Bools:
    """Whether ``tokens [...]`` are among those that ``ids, probs [..., k]`` give a probability."""
    result: Bools = ((ids == tokens[..., None]) & (probs > 0)).any(axis=-1)
    return result


def nkl(ids: Ints, probs: Floats, logits: Floats) -> tuple[Values, Values]:
    """NKL and the target's largest probability, ``[...]`` each, from ``ids, probs [..., k]`` and ``logits [..., V]``."""
    good = usable(ids, probs, logits.shape[-1])
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        highest = wide.max(axis=-1)
        log_sum = highest + np.log(np.exp(wide - highest[..., None]).sum(axis=-1))
    at = np.take_along_axis(wide, np.where(good[..., None] & (probs > 0), ids, 0), axis=-1)
    value, top = from_logits(terms(probs, at), highest, log_sum, logits.shape[-1])
    return np.where(good, value, 1.0), top


@dataclass(frozen=True, slots=True)
class Terms:
    """What NKL needs of the named tokens alone, ``[...]`` each: ``KL_k = apart + named ln Z + spread - τ ln ρ``, ``Z = Σ exp(logit)``."""

    logits: Values  # [..., k] of the target, -inf where no token is named
    apart: Values  # Σ p (ln p - logit)
    named: Values  # Σ p
    tail: Values  # τ
    spread: Values  # τ ln τ


def terms(probs: Floats, at: Floats) -> Terms:
    """For usable ``probs [..., k]`` and the target's logits ``at [..., k]`` of the same tokens."""
    p = probs.astype(np.float64)
    entry = p > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        logits = np.where(entry, at, -np.inf)
        apart = np.where(entry, p * (np.log(p) - logits), 0.0).sum(axis=-1)
        named = p.sum(axis=-1)
        tail = np.minimum(np.maximum(1.0 - named, 0.0), 1.0)
        spread = np.where(tail > 0, tail * np.log(tail), 0.0)
    return Terms(logits, apart, named, tail, spread)


def from_logits(of: Terms, highest: Floats, log_sum: Floats, vocab_size: int) -> tuple[Values, Values]:
    """The same as :func:`nkl` from the largest logit ``highest [...]`` and ``log_sum [...]``, the logarithm of the sum of exponentials of all."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rest = np.maximum(1.0 - np.exp(of.logits - log_sum[..., None]).sum(axis=-1), REST)
        divergence = of.apart + of.named * log_sum + of.spread - of.tail * np.log(rest)
        value = np.minimum(np.maximum(divergence / log_vocabulary(vocab_size), 0.0), 1.0)  # NaN stays
        top = np.minimum(np.exp(highest - log_sum), 1.0)  # where sums are rounded, a mask of 1 is still off
    finite = np.isfinite(top)
    return np.where(finite & ~np.isnan(value), value, 1.0), np.where(finite, top, 1.0)


def at_least(of: Terms, other: Floats, vocab_size: int) -> Values:
    """A lower bound ``[...]`` of NKL without a look at all logits: from those named, and ``other [...]``, any one more.

    The mass of all tokens is at least that of the named ones, and that of the other one, and no rest exceeds 1.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        highest = np.maximum(of.logits.max(axis=-1), other)
        log_sum = np.maximum(highest + np.log(np.exp(of.logits - highest[..., None]).sum(axis=-1)), other)
        bound = of.apart + of.named * log_sum + of.spread
    result: Values = bound / log_vocabulary(vocab_size)
    return result


def error_bound(ids: Ints, probs: Floats, logits: Floats) -> Values:
    """Most by which the NKL of the whole distributions can exceed :func:`nkl`'s (before clamping), ``[...]``.

    For :func:`usable` ``ids, probs [..., k]``, the draft's largest; infinite where the target excludes a token of the tail.
    """
    wide, p = logits.astype(np.float64), probs.astype(np.float64)
    q = np.exp(wide - wide.max(axis=-1, keepdims=True))
    q /= q.sum(axis=-1, keepdims=True)
    first = np.take_along_axis(ids, p.argmax(axis=-1)[..., None], axis=-1)
    named = np.where(p > 0, ids, first)
    outside = q.copy()
    np.put_along_axis(outside, named, np.inf, axis=-1)
    least = outside.min(axis=-1)  # infinite where the top k is the whole vocabulary
    inside = np.where(p > 0, np.take_along_axis(q, named, axis=-1), 0.0).sum(axis=-1)
    tail = np.clip(1.0 - p.sum(axis=-1), 0.0, 1.0)
    smallest = np.where(p > 0, p, np.inf).min(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cross = np.log(np.maximum(1.0 - inside, REST) / least)
        spread = np.maximum(np.log(tail / smallest), 0.0)
        bound = np.where((tail > 0) & np.isfinite(least), tail * np.maximum(cross - spread, 0.0), 0.0)
    result: Values = bound / log_vocabulary(logits.shape[-1])
    return result


def limits(
    delta: Floats, alpha: Floats, delta_max: Floats, length_scale: Floats, offset: Ints, generated: Ints
) -> Values:
    """Largest NKL that passes for the token at ``offset`` (from 0) of a draft after ``generated`` tokens; all broadcast.

    ``min(δ_max, δ (1 + α log2(offset + 1)))``: what follows an accepted token is judged in its light, so the same divergence
    weighs less. With a ``length_scale`` L above 0, all of it times ``min(1, L / n)`` for the ``n``-th token of the answer:
    divergence adds up, so that long answers are held to less of it at each token.
    """
    limit = np.minimum(delta_max, delta * (1.0 + alpha * np.log2(offset + 1.0)))
    shrink = np.where(length_scale > 0, length_scale / (generated + offset + 1.0), 1.0)
    result: Values = limit * np.minimum(1.0, shrink)
    return result


def thresholds(policy: Policy, evidence: Evidence) -> Values:
    """:func:`limits` of one policy at each draft token, ``[B, T]``."""
    delta, alpha, cap, scale = np.asarray(
        [policy.delta, policy.alpha, policy.delta_max, policy.length_scale], np.float64
    )
    offset = np.arange(evidence.drafts.shape[1])[None, :]
    return limits(delta, alpha, cap, scale, offset, evidence.generated[:, None])


def below(policy: Policy, evidence: Evidence, limit: Floats) -> Bools:
    """Mismatches ``[B, T]`` with an NKL below ``limit [B, T]``, where the target is not certain of its own token."""
    value, top = nkl(evidence.top_ids, evidence.top_probs, evidence.logits)
    said = named(evidence.drafts, evidence.top_ids, evidence.top_probs)
    result: Bools = evidence.mismatches() & said & (value < limit) & (top <= policy.mask)
    return result


def passes(policy: Policy, evidence: Evidence) -> Bools:
    """Mismatches that pass, ``[B, T]``."""
    return below(policy, evidence, thresholds(policy, evidence))


def log_vocabulary(vocab_size: int) -> float:
    """``ln V``, what NKL is divided by."""
    return math.log(max(vocab_size, 2))
