"""Confidence intervals of what is measured. Pure; all at 95 %.

Shares of answers have Wilson's interval, which is honest about nothing seen in few tries; differences of paired shares combine
two of them (MOVER, Newcombe 1998 and Zou & Donner 2008); everything else is a percentile bootstrap over whole answers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

Z = 1.959964  # two-sided 95 %
RESAMPLES = 2000
LEAST = 5  # of fewer values a bootstrap says nothing
_SEED = 20  # intervals do not change between two reports of the same measurements

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure. ``low``, ``high``: None where there is too little to say, or nothing varied; ``n``: answers behind it."""

    value: float
    low: float | None
    high: float | None
    n: int


def wilson(hits: int, n: int) -> Estimate | None:
    """A share. None without tries."""
    if n == 0:
        return None
    share = hits / n
    denominator = 1 + Z * Z / n
    centre = (share + Z * Z / (2 * n)) / denominator
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / denominator
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)), n)


def paired_change(before: Sequence[bool], after: Sequence[bool]) -> Estimate | None:
    """By how much the share of right answers changed, the same items before and after. None without items.

    The two shares are those of the items lost and of the items gained; they exclude each other, hence the correlation.
    """
    n = len(before)
    lost = wilson(sum(b and not a for b, a in zip(before, after, strict=True)), n)
    gained = wilson(sum(a and not b for b, a in zip(before, after, strict=True)), n)
    if lost is None or gained is None:
        return None
    change = gained.value - lost.value
    free = (1 - gained.value) * (1 - lost.value)
    correlation = -math.sqrt(gained.value * lost.value / free) if free else -1.0
    return Estimate(
        change,
        change - _side(gained.value - _bound(gained.low), _bound(lost.high) - lost.value, correlation),
        change + _side(_bound(gained.high) - gained.value, lost.value - _bound(lost.low), correlation),
        n,
    )


def bootstrap(
    parts: Sequence[Sequence[float]],
    figure: Callable[..., Values | float],
) -> Estimate | None:
    """``figure`` of the sums of each part over answers: ``parts`` is ``[P, n]``, ``figure(p1, …, pP)`` takes arrays or numbers.

    A ratio of sums is ``bootstrap([tops, bottoms], lambda a, b: a / b)``. None without answers, or where the figure of all of
    them is not finite. Without bounds where there are fewer than ``LEAST`` answers, or all resamples agree.
    """
    table = np.asarray(parts, np.float64)
    n = table.shape[1]
    if n == 0:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value = float(figure(*table.sum(axis=1)))
        if not math.isfinite(value):
            return None
        if n < LEAST:
            return Estimate(value, None, None, n)
        picks = np.random.default_rng(_SEED).integers(0, n, (RESAMPLES, n))
        figures = np.asarray(figure(*table[:, picks].sum(axis=2)), np.float64)
    figures = figures[np.isfinite(figures)]
    low, high = np.quantile(figures, (0.025, 0.975))
    if low == high:
        return Estimate(value, None, None, n)
    return Estimate(value, float(low), float(high), n)


def typical(ratios: Sequence[float]) -> Estimate | None:
    """Median of paired ratios with the order statistics that enclose the true one with 95 % (of few pairs: the extremes).

    Six pairs are the fewest whose extremes do; with fewer there are no bounds.
    """
    if not ratios:
        return None
    ordered, n = sorted(ratios), len(ratios)
    if n < 6:
        return Estimate(median(ordered), None, None, n)
    outside, rank = 0.5**n, 0  # P(fewer than rank + 1 of n fair coins): what lies outside on one side
    while rank + 1 < n // 2 and outside + math.comb(n, rank + 1) * 0.5**n <= 0.025:
        rank += 1
        outside += math.comb(n, rank) * 0.5**n
    return Estimate(median(ordered), ordered[rank], ordered[n - 1 - rank], n)


def _bound(value: float | None) -> float:
    assert value is not None  # Wilson's always has both
    return value


def _side(first: float, second: float, correlation: float) -> float:
    return math.sqrt(max(0.0, first * first + second * second - 2 * correlation * first * second))
