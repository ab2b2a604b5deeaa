"""A quality floor, and the setting to use at it. Pure.

``changed<=1%``: at most 1 % of the answers may be changed. A setting *keeps* the floor if its figure does, and does so *for
sure* if the far end of the figure's interval does as well.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scripts.calibrate_lib.figures import Figures
from scripts.calibrate_lib.intervals import Estimate

# What a floor can be about: its name, the figure, whether less of it is better, what it says.
METRICS: dict[str, tuple[str, bool, str]] = {
    "changed": ("changed", True, "answers changed"),
    "differing": ("differing", True, "tokens that differ"),
    "relaxed": ("relaxed", True, "tokens let pass"),
    "agreement": ("agreement", False, "answers that agree"),
    "similarity": ("similarity", False, "similarity to the lossless answers"),
    "perplexity": ("perplexity_ratio", True, "perplexity relative to the target's own"),
    "score": ("score_change", False, "change of the task score"),
}
SHARES = ("changed", "agreement")  # of answers: too few of them cannot tell a small share from none
_FLOOR = re.compile(r"\s*([a-z]+)\s*(<=|>=)\s*(-?\d+(?:\.\d+)?)\s*(%?)\s*")

Outcome = Literal["found", "no_gain", "none_keeps", "no_effect", "too_few", "unmeasured"]


@dataclass(frozen=True)
class Floor:
    """The least quality that is wanted."""

    metric: str
    limit: float

    @property
    def text(self) -> str:
        _, less, what = METRICS[self.metric]
        percent = self.metric != "perplexity" and self.metric != "similarity"
        limit = f"{self.limit:.4%}".rstrip("%").rstrip("0").rstrip(".") + " %" if percent else f"{self.limit:g}"
        return f"{what} {'≤' if less else '≥'} {limit}"

    def of(self, figures: Figures) -> Estimate | None:
        """The figure it is about."""
        found: Estimate | None = getattr(figures, METRICS[self.metric][0])
        return found

    def kept_by(self, estimate: Estimate) -> bool:
        return self._within(estimate.value)

    def surely_kept_by(self, estimate: Estimate) -> bool:
        """Whether the whole interval keeps it; not where there is none."""
        far = self.far_end(estimate)
        return far is not None and self._within(far)

    def far_end(self, estimate: Estimate) -> float | None:
        """The worse end of the interval."""
        return estimate.high if METRICS[self.metric][1] else estimate.low

    @property
    def least_answers(self) -> int:
        """Of fewer answers, one is more than the floor allows: then it could not be told from none."""
        allowed = {"changed": self.limit, "agreement": 1 - self.limit}.get(self.metric, 0.0)
        return math.ceil(1 / allowed - 1e-9) if allowed > 0 else 1

    def _within(self, value: float) -> bool:
        return value <= self.limit + 1e-12 if METRICS[self.metric][1] else value >= self.limit - 1e-12


def parse_floor(text: str) -> Floor:
    """Read ``changed<=1%``, ``perplexity<=1.02``, ``score>=-2%``.

    Raises:
        ValueError: it is none; says what there is.
    """
    match = _FLOOR.fullmatch(text)
    known = ", ".join(f"{name}{'<=' if less else '>='}…" for name, (_, less, _) in METRICS.items())
    if match is None or match[1] not in METRICS:
        raise ValueError(f"no quality floor: {text!r}; one is of {known}, for example changed<=1%")
    metric, sign = match[1], "<=" if METRICS[match[1]][1] else ">="
    if match[2] != sign:
        raise ValueError(
            f"{text!r}: of {metric}, {'less' if sign == '<=' else 'more'} is better: write {metric}{sign}…"
        )
    return Floor(metric, float(match[3]) / (100 if match[4] else 1))


@dataclass(frozen=True)
class Candidate:
    """One setting and what was measured of it. ``speed``: tokens/s as a ratio to lossless; None: not measured."""

    name: str
    figures: Figures
    speed: Estimate | None = None

    @property
    def acts(self) -> bool:
        """Whether it let any token pass at all."""
        return self.figures.relaxed is not None and self.figures.relaxed.value > 0

    @property
    def gain(self) -> Estimate | None:
        """Of the time where that was measured, else of the target's steps."""
        return self.speed or self.figures.step_gain

    @property
    def gains(self) -> bool:
        """Faster than lossless, and not by chance."""
        return self.gain is not None and self.gain.low is not None and self.gain.low > 1.0


@dataclass(frozen=True)
class Recommendation:
    """What to use at a floor. ``choice`` is None unless ``outcome`` is ``found``; ``nearest``: what comes closest."""

    floor: Floor
    outcome: Outcome
    choice: Candidate | None = None
    nearest: Candidate | None = None

    @property
    def sure(self) -> bool:
        estimate = self.floor.of(self.choice.figures) if self.choice is not None else None
        return estimate is not None and self.floor.surely_kept_by(estimate)


def recommend(candidates: Sequence[Candidate], floor: Floor) -> Recommendation:
    """The setting that saves the target most steps of those that keep the floor and are faster than lossless.

    Steps and not seconds rank them: they repeat exactly, seconds do not. Of equals the one that lets fewest tokens pass wins.
    """
    measured = [c for c in candidates if floor.of(c.figures) is not None]
    if not measured:
        return Recommendation(floor, "unmeasured")
    acting = [c for c in measured if c.acts]
    if not acting:
        return Recommendation(floor, "no_effect")
    if min(_estimate(c, floor).n for c in acting) < floor.least_answers:
        return Recommendation(floor, "too_few", nearest=_nearest(acting, floor))
    keeping = [c for c in acting if floor.kept_by(_estimate(c, floor))]
    if not keeping:
        return Recommendation(floor, "none_keeps", nearest=_nearest(acting, floor))
    gaining = [c for c in keeping if c.gains]
    if not gaining:
        return Recommendation(floor, "no_gain", nearest=max(keeping, key=_rank))
    return Recommendation(floor, "found", choice=max(gaining, key=_rank))


def _estimate(candidate: Candidate, floor: Floor) -> Estimate:
    found = floor.of(candidate.figures)
    assert found is not None
    return found


def _rank(candidate: Candidate) -> tuple[float, float]:
    gain, relaxed = candidate.figures.step_gain, candidate.figures.relaxed
    return (gain.value if gain else 0.0, -relaxed.value if relaxed else 0.0)


def _nearest(candidates: Sequence[Candidate], floor: Floor) -> Candidate:
    sign = 1 if METRICS[floor.metric][1] else -1
    return min(candidates, key=lambda c: (sign * _estimate(c, floor).value, _rank(c)[1] * -1))
