"""When running ahead pays: a step in idle time that is still running when the next message arrives delays its answer."""

from dataclasses import dataclass

_ALPHA = 0.1
_LONGEST_GAP_S = 1.0  # a longer silence is the end of the traffic, not its rhythm


@dataclass(slots=True)
class Pace:
    """Learns the time between an answer and the next message, and tells whether a step fits into what is left of it."""

    gap_s: float | None = None
    _answered: float | None = None
    _arrived: float | None = None

    def answered(self, now: float) -> None:
        """An answer was sent."""
        self._answered, self._arrived = now, None

    def interrupted(self, started: float, now: float) -> None:
        """The next message arrived while idle work ran from ``started`` to ``now``: somewhere in the middle, say."""
        if self._arrived is None:
            self._arrived = (started + now) / 2

    def received(self, now: float) -> None:
        """A message is being handled."""
        if self._answered is not None:
            gap = (self._arrived or now) - self._answered
            if gap < _LONGEST_GAP_S:
                self.gap_s = gap if self.gap_s is None else self.gap_s + _ALPHA * (gap - self.gap_s)
        self._answered = None

    def worthwhile(self, now: float, step_s: float, probability: float) -> bool:
        """Whether a step whose tokens are of use with ``probability`` should start now, when a token's worth is not known.

        It then saves ``step_s``; with time ``r`` left before the next message it delays the answer by ``step_s - r``. It gains
        where ``probability * step_s > step_s - r``.
        """
        left = self._left(now)
        return left is None or left > (1.0 - probability) * step_s

    def pays(self, now: float, step_s: float, worth_s: float) -> bool:
        """Whether a step that saves the target ``worth_s`` on average saves more than it is expected to delay the next answer.

        A message that is overdue may come at any moment: then the whole step counts as delay.
        """
        left = self._left(now)
        if left is None:
            return True
        overrun = min(step_s - left, step_s)
        return overrun <= 0.0 or worth_s > overrun

    def fits(self, now: float, step_s: float) -> bool:
        """Whether a step that is of no use to the next answer would be over before its message, or none is expected any more."""
        left = self._left(now)
        return left is None or left >= step_s or left < -(self.gap_s or 0.0)

    def _left(self, now: float) -> float | None:
        if self.gap_s is None or self._answered is None:
            return None
        return self.gap_s - (now - self._answered)
