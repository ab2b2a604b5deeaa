"""Pure figures: what timed pieces of work amount to.

Samples are kept by repetition (one inner list each): the speed of a virtual machine drifts, so only what ran within the same
repetition is compared.
"""

from collections.abc import Sequence
from statistics import median

from scripts.bench_lib.statistics import percentile

Samples = Sequence[Sequence[float]]


def figures(values: Sequence[float]) -> dict[str, float]:
    """``median``, ``min``, ``p90``, ``p99`` (nearest rank) and ``count``; raises ``ValueError`` without values."""
    if not values:
        raise ValueError("nothing was measured")
    p90, p99 = percentile(values, 0.9), percentile(values, 0.99)
    assert p90 is not None
    assert p99 is not None
    return {"median": median(values), "min": min(values), "p90": p90, "p99": p99, "count": len(values)}


def pooled(samples: Samples) -> dict[str, float]:
    """Figures over all repetitions; raises ``ValueError`` without values."""
    return figures([value for repetition in samples for value in repetition])


def paired_ratio(samples: Samples, base: Samples) -> float | None:
    """Median over the repetitions of (median of ``samples``) / (median of ``base``); None where none has both."""
    ratios = [median(ours) / median(theirs) for ours, theirs in zip(samples, base, strict=True) if ours and theirs]
    return median(ratios) if ratios else None


def within(pieces: Sequence[tuple[float, float]], began: float, ended: float) -> list[float]:
    """Durations of those ``(start, duration)`` that lie wholly in ``[began, ended]``; all in seconds of one clock."""
    return [seconds for start, seconds in pieces if start >= began and start + seconds <= ended]
