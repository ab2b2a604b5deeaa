"""What a step of a model costs, as two straight lines: enough to choose between ways of doing the same work."""

from dataclasses import dataclass

_ALPHA = 0.2  # weight of one observation
_MIN_SCALE, _MAX_SCALE = 0.25, 16.0  # one stall of a busy machine must not change every later choice


@dataclass(slots=True)
class StepCosts:
    """Seconds of one call: ``base + per * rows`` for single-token steps, ``base + per * tokens`` for a prefill.

    The lines are measured with little past; attention over a longer one, and a busy machine, make steps dearer. Both move
    slowly, so a scale that follows what calls really took is enough.
    """

    decode_base_s: float = 0.0
    decode_row_s: float = 0.0
    prefill_base_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_scale: float = 1.0
    prefill_scale: float = 1.0

    def decode(self, rows: int) -> float:
        """Seconds expected for one token of each of ``rows`` sequences; 0 for no rows."""
        return (self.decode_base_s + self.decode_row_s * rows) * self.decode_scale if rows else 0.0

    def prefill(self, tokens: int) -> float:
        """Seconds expected for ``tokens`` tokens of one sequence; 0 for none."""
        return (self.prefill_base_s + self.prefill_token_s * tokens) * self.prefill_scale if tokens else 0.0

    def prefill_fitting(self, seconds: float) -> int:
        """Most tokens whose prefill is expected to take at most ``seconds``; 2**31 where prefills cost nothing."""
        each = self.prefill_token_s * self.prefill_scale
        if each <= 0.0:
            return 1 << 31
        return max(0, int((seconds - self.prefill_base_s * self.prefill_scale) / each))

    def bridged_gap(self, slots: int) -> int:
        """Most unwanted slots between two of a step that are computed along: they cost their rows, not doing so one more call."""
        return min(int(self.decode_base_s / self.decode_row_s), slots) if self.decode_row_s > 0.0 else 0

    def saw_decode(self, rows: int, seconds: float) -> None:
        """Learn from one decode call."""
        self.decode_scale = _follow(self.decode_scale, self.decode_base_s + self.decode_row_s * rows, seconds)

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from one prefill call."""
        self.prefill_scale = _follow(self.prefill_scale, self.prefill_base_s + self.prefill_token_s * tokens, seconds)


def _follow(scale: float, expected: float, seconds: float) -> float:
    if expected <= 0.0:
        return scale
    seen = min(max(seconds / expected, _MIN_SCALE), _MAX_SCALE)
    return scale + _ALPHA * (seen - scale)
