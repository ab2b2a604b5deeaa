"""When running ahead pays: a step in idle time that is still running when the next message arrives delays its answer."""

from dataclasses import dataclass

_ALPHA = 0.1
_LONGEST_GAP_S = 1.0  # a longer silence is the end of the traffic, not its rhythm


@dataclass(slots=True)
class Pace:
    """Learns the time between an answer and the next message, and how often a guessed token is what gets committed."""

    gap_s: float | None = None
    agreement: float = 0.7
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

    def committed(self, agreed: int, tried: int) -> None:
        """Of ``tried`` guessed tokens that were put to the test one after the other, ``agreed`` were right."""
        for right in [1.0] * agreed + [0.0] * (tried - agreed):
            self.agreement += _ALPHA / 4 * (right - self.agreement)

    def worthwhile(self, now: float, step_s: float, depth: float) -> bool:
        """Whether a step ``depth`` guessed tokens past the committed ones should start now.

        Its work is of use with probability ``p = agreement ** depth``, and then saves ``step_s``; with time ``r`` left before
        the next message it delays the answer by ``step_s - r``. It gains where ``p * step_s > step_s - r``.
        """
        if self.gap_s is None or self._answered is None:
            return True
        left = self.gap_s - (now - self._answered)
        return bool(left > (1.0 - self.agreement**depth) * step_s)
