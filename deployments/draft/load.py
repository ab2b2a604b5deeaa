"""How loaded a draft replica is, for the autoscaling policy (``record_autoscaling_stats``)."""

import time
from collections.abc import Callable, Mapping

from deployments.chain.protocol import DEADLINE, NO_SLOT

LATE = (
    DEADLINE,
    NO_SLOT,
    "dropped:superseded",
)  # counters of rounds that brought the target nothing for want of capacity


class LoadMeter:
    """Turns the engine's totals into shares of the time and of the rounds since it was last asked."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._last: dict[str, float] = {}
        self._at = clock()

    def read(self, stats: Mapping[str, float]) -> dict[str, float]:
        """``busy`` and ``late`` since the last call (0..1), ``sessions`` (share of slots) and ``answers`` (requests) now.

        ``stats``: those of the engine and the socket together.
        """
        now = self._clock()
        late = sum(self._growth(name, stats) for name in LATE)
        rounds = self._growth("rounds", stats)
        busy = self._growth("busy_s", stats) / max(now - self._at, 1e-3)
        self._last, self._at = dict(stats), now
        return {
            "busy": min(busy, 1.0),
            "late": late / max(rounds, late, 1.0),
            "sessions": stats["sessions"] / self._slots,
            "answers": stats["answers_waiting"] + stats["answers_running"],
        }

    def _growth(self, name: str, stats: Mapping[str, float]) -> float:
        return max(0.0, stats.get(name, 0.0) - self._last.get(name, 0.0))
