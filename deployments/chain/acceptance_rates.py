"""How often a target agrees with a source: the source's own confidence, corrected by what happened.

Two scales. A tenant's record of a source calibrates confidence by bins and by depth in the draft, over many requests. A
sequence's *trust* follows within a few rounds how this text differs from that record.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

UNKNOWN_CONFIDENCE = 0.8  # of a token whose source says nothing

_CONFIDENCE_EDGES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
_DEPTH_EDGES = (1, 2, 4, 8)
_PRIOR = 4.0  # observations that a coarser estimate counts for
_MEMORY = 400.0  # observations a cell remembers
_FAST = 0.15  # weight of one tested token in a sequence's trust
_RECOVERY = 0.002  # a step without a test: after some of them the source gets another, short try
_MOST = 1.2  # trust: a text can suit a source better than its record says


@dataclass(slots=True)
class _Share:
    """A decayed share of successes."""

    weight: float = 0.0
    successes: float = 0.0

    def estimate(self, prior: float) -> float:
        return (self.successes + _PRIOR * prior) / (self.weight + _PRIOR)

    def observe(self, success: bool) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self.weight = self.weight * keep + 1.0
        self.successes = self.successes * keep + success


def _bins() -> list[_Share]:
    return [_Share() for _ in range(len(_CONFIDENCE_EDGES) + 1)]


@dataclass(slots=True)
class AcceptanceRates:
    """One source's record with one tenant.

    A cell (depth, confidence) is drawn towards its confidence bin, and that towards the confidence itself, as long as it
    has seen little.
    """

    by_confidence: list[_Share] = field(default_factory=_bins)
    by_depth: list[list[_Share]] = field(default_factory=lambda: [_bins() for _ in range(len(_DEPTH_EDGES) + 1)])

    def probability(self, confidence: float, depth: int) -> float:
        """That the target agrees with a token at ``depth`` (0 is the first) given that it did with all before."""
        column = bisect_right(_CONFIDENCE_EDGES, confidence)
        coarse = self.by_confidence[column].estimate(confidence)
        return self.by_depth[bisect_right(_DEPTH_EDGES, depth)][column].estimate(coarse)

    def observe(self, confidence: float, depth: int, agreed: bool) -> None:
        column = bisect_right(_CONFIDENCE_EDGES, confidence)
        self.by_confidence[column].observe(agreed)
        self.by_depth[bisect_right(_DEPTH_EDGES, depth)][column].observe(agreed)


@dataclass(slots=True)
class Trust:
    """One sequence's factor on the record: 1 where the record holds, towards 0 where a source is useless here."""

    value: float = 1.0

    def observe(self, probability: float, agreed: bool) -> None:
        """``probability`` is the record's, without trust. In the mean the value settles where agreement = trust * record."""
        moved = self.value + _FAST * (agreed - self.value * probability)
        self.value = min(max(moved, 0.0), _MOST)

    def rested(self) -> None:
        if self.value < 1.0:
            self.value = min(1.0, self.value + _RECOVERY)


def path(rates: AcceptanceRates, trust: Trust, confidence: Sequence[float]) -> list[float]:
    """For each token of a draft, the probability that it and all before it are accepted."""
    result, product = [], 1.0
    for depth, value in enumerate(confidence):
        product *= min(1.0, rates.probability(value, depth) * trust.value)
        result.append(product)
    return result


def learn(rates: AcceptanceRates, trust: Trust, confidence: Sequence[float], accepted: int) -> None:
    """Record one verification: the accepted tokens, and the first that was not (what came behind it was never tested)."""
    for depth, value in enumerate(confidence[: accepted + 1]):
        agreed = depth < accepted
        trust.observe(rates.probability(value, depth), agreed)
        rates.observe(value, depth, agreed)
