"""What an engine step takes, by how many tokens it computes: learned from the steps themselves.

A *lane* is a way the engine can run (all cores to itself, or a core lent to a draft). Values are kept relative to a common
scale that follows the machine's speed of the moment, so that a lane or size not seen for a while does not go stale when
everything becomes slower. Only plain steps move the scale: if others did, what verifying costs would hide in it.
"""

import itertools
from bisect import bisect_left

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_SCALE_ALPHA = 0.2
_PLAIN_ALPHA, _VALUE_ALPHA = 0.02, 0.1  # of a size's value once it has been seen _TRUSTED times: plain steps, others
_TRUSTED = 8
_OUTLIER = 4.0  # a step so many times longer than expected is a stall of the machine, no property of its size
_FIRST_OUTLIER = 1.5  # the first of its size has nothing to be compared with but the others
_LINE_WEIGHT = 4.0  # observations the straight line counts for
_MOST_SLOPE = 0.1  # of the mean step a token: beyond what was seen, hope rather than fear, or it is never tried
_BEYOND = 4096  # tokens past the largest size seen to which the line is continued
_LEAST_LEVEL = 0.25  # of what was seen at a size
_LEAST_SLOPE = 0.004  # of a step's time a token: verifying is never quite free, whatever a noisy measurement says


class StepTimes:
    """Seconds of a step, predicted. Lanes are any hashable names; an unseen one is as fast as what has been seen."""

    def __init__(self) -> None:
        self._lanes: dict[
            str, dict[int, tuple[float, int]]
        ] = {}  # lane -> size index -> (relative seconds, times seen)
        self._scale = 1.0
        self._curves: dict[str, list[tuple[int, float]]] = {}  # cached, dropped with each observation

    @property
    def known(self) -> bool:
        return bool(self._lanes)

    def sees(self, lane: str) -> bool:
        return lane in self._lanes

    def observe(self, lane: str, tokens: int, seconds: float, plain: bool = False) -> None:
        """Learn from a step that computed ``tokens`` tokens; ``plain``: one a sequence, nothing was verified."""
        if not self._lanes:
            self._scale = seconds
        index = min(bisect_left(_SIZES, tokens), len(_SIZES) - 1)
        expected = self.predict(lane, tokens) or seconds
        sizes = self._lanes.setdefault(lane, {})
        if index not in sizes:
            sizes[index] = (min(seconds, _FIRST_OUTLIER * expected) / self._scale, 1)
        else:
            value, seen = sizes[index]
            ratio = min(seconds / (self._scale * value), _OUTLIER)
            if plain:
                self._scale *= 1.0 + _SCALE_ALPHA * (ratio - 1.0)
            settled = _PLAIN_ALPHA if plain else _VALUE_ALPHA
            alpha = settled if seen >= _TRUSTED else max(1.0 / (seen + 1), settled)
            sizes[index] = (value * (1.0 + alpha * (ratio - 1.0)), seen + 1)
        self._curves.clear()

    def predict(self, lane: str, tokens: float) -> float:
        """Seconds of a step of ``tokens`` tokens; 0 while nothing was seen at all."""
        curve = self._curve(lane)
        if not curve:
            return 0.0
        return self._scale * _interpolate(curve, tokens)

    def slope(self, lane: str, tokens: float, more: float = 4.0) -> float:
        """Seconds that each of ``more`` further tokens costs."""
        here = self.predict(lane, tokens)
        return max((self.predict(lane, tokens + more) - here) / more, _LEAST_SLOPE * here)

    def _curve(self, lane: str) -> list[tuple[int, float]]:
        cached = self._curves.get(lane)
        if cached is None:
            sizes = self._lanes.get(lane) or next(iter(self._lanes.values()), {})
            cached = self._curves[lane] = _smooth(sizes) if sizes else []
        return cached


def _smooth(sizes: dict[int, tuple[float, int]]) -> list[tuple[int, float]]:
    """Values by size, non-decreasing, each drawn towards the straight line through all as far as it was seldom seen."""
    order = sorted(sizes)
    points = [(_SIZES[index], sizes[index][0], float(min(sizes[index][1], 4 * _TRUSTED))) for index in order]
    total = sum(weight for _, _, weight in points)
    x_mean = sum(x * weight for x, _, weight in points) / total
    y_mean = sum(y * weight for _, y, weight in points) / total
    spread = sum(weight * (x - x_mean) ** 2 for x, _, weight in points)
    rise = sum(weight * (x - x_mean) * (y - y_mean) for x, y, weight in points) / spread if spread else 0.0
    rise = min(max(rise, _LEAST_SLOPE * y_mean), _MOST_SLOPE * y_mean)
    curve: list[tuple[int, float]] = []
    for x, y, weight in points:
        level = (weight * y + _LINE_WEIGHT * (y_mean + rise * (x - x_mean))) / (weight + _LINE_WEIGHT)
        # far from most of what was seen the line can pass below zero, which no step's time does
        curve.append((x, max(level, curve[-1][1] if curve else _LEAST_LEVEL * y)))
    last, level = curve[-1]
    curve.append((last + _BEYOND, level + rise * _BEYOND))  # beyond what was seen: the line
    return curve


def _interpolate(curve: list[tuple[int, float]], tokens: float) -> float:
    if tokens <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in itertools.pairwise(curve):
        if tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    return curve[-1][1]
