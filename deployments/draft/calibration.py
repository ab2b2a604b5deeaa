"""How likely the target agrees with a drafted token, learned from how clearly the token won. Pure; no model, no clock.

The margin of a choice (score of the winner less score of the runner-up, in logits) says how easily a slightly different
model chooses otherwise. Margins fall into a dozen bins; each starts from a prior curve and follows what commits show, with
old observations fading. Greedy and sampled choices have different margins and are kept apart.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import exp

RANKS = 3  # runner-ups told apart when the target chose one of them instead
EDGES = tuple(0.08 * 1.6**index for index in range(11))  # between the bins: 0.08 … 8.8 logits

_CENTRES = (0.04, *(edge * 1.6**0.5 for edge in EDGES))
_PRIOR_WEIGHT = 8.0  # observations the prior of a bin counts as
_SHARE_PRIOR = (0.4, 0.15, 0.08)
_SHARE_WEIGHT = 20.0
_MEAN_PRIOR, _MEAN_WEIGHT = 0.7, 8.0
_KEEP = 0.995  # weight an observation keeps when the next one of its kind arrives: some 200 count
_LEAST, _MOST = 0.01, 0.999


def prior(margin: float) -> float:
    """Probability that the target agrees, before anything is known: 0.5 where two tokens tie, 0.99 from 4 logits on."""
    return 1.0 - 0.5 * exp(-margin)


class _Curve:
    """One kind of choices: confidence by bin, the mean over all, and where the target's token was when it differed."""

    def __init__(self) -> None:
        self.priors = [prior(centre) for centre in _CENTRES]
        self.confidence = list(self.priors)
        self.mean = _MEAN_PRIOR
        self.shares = list(_SHARE_PRIOR)
        self._right = [0.0] * len(_CENTRES)
        self._seen = [0.0] * len(_CENTRES)
        self._all_right = self._all_seen = 0.0
        self._ranks = [0.0] * RANKS
        self._misses = 0.0

    def observe(self, margin: float, agreed: bool, rank: int) -> None:
        index = bisect_right(EDGES, margin)
        right = self._right[index] = self._right[index] * _KEEP + agreed
        seen = self._seen[index] = self._seen[index] * _KEEP + 1.0
        rate = (_PRIOR_WEIGHT * self.priors[index] + right) / (_PRIOR_WEIGHT + seen)
        self.confidence[index] = min(max(rate, _LEAST), _MOST)
        self._all_right = self._all_right * _KEEP + agreed
        self._all_seen = self._all_seen * _KEEP + 1.0
        self.mean = (_MEAN_WEIGHT * _MEAN_PRIOR + self._all_right) / (_MEAN_WEIGHT + self._all_seen)
        if not agreed:
            self._misses = self._misses * _KEEP + 1.0
            for place in range(RANKS):
                self._ranks[place] = self._ranks[place] * _KEEP + (place == rank)
                hits = _SHARE_WEIGHT * _SHARE_PRIOR[place] + self._ranks[place]
                self.shares[place] = hits / (_SHARE_WEIGHT + self._misses)


class Calibration:
    """Confidence in drafted tokens, followed from commits."""

    def __init__(self) -> None:
        self._curves = (_Curve(), _Curve())  # sampled, greedy

    def confidence(self, greedy: bool, margin: float) -> float:
        """Probability that the target chooses the token that won by ``margin`` (logits, at least 0)."""
        return self._curves[greedy].confidence[bisect_right(EDGES, margin)]

    def mean(self, greedy: bool) -> float:
        """Share of tested tokens that the target agreed with: what to expect of a token not drafted yet."""
        return self._curves[greedy].mean

    def shares(self, greedy: bool) -> Sequence[float]:
        """``[RANKS]``: of the tokens the target did not agree with, how many it replaced by the first, second … runner-up."""
        return self._curves[greedy].shares

    def observe(self, greedy: bool, margin: float, agreed: bool, rank: int = -1) -> None:
        """A token was put to the test; ``rank`` is the place of the target's token among its runner-ups, -1 for none."""
        self._curves[greedy].observe(margin, agreed, rank)
