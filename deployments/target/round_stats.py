"""Counters of rounds: totals, by source, by reason, and where the time of a round goes."""

from collections import Counter, defaultdict, deque

_KEPT = 8192  # latest rounds whose overhead is kept for percentiles


class RoundStats:
    """Plain numbers; whoever exports them takes differences."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.overhead_ms: deque[float] = deque(maxlen=_KEPT)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._timed: Counter[str] = Counter()

    def reset(self) -> None:
        """Start anew."""
        for values in (self.counters, self.reasons, self.overhead_ms, self._seconds, self._timed):
            values.clear()

    def round(self, waited_s: float, work_s: float, overhead_s: float | None) -> None:
        """One engine step; ``overhead_s`` is None where no draft was asked."""
        self.counters["rounds"] += 1
        if overhead_s is not None:
            self.overhead_ms.append(overhead_s * 1e3)
            self._time("wait", waited_s)
            self._time("draft", work_s)
            self._time("overhead", overhead_s)

    def verify(self, seconds: float) -> None:
        """The engine step itself, without the round before it."""
        self._time("verify", seconds)

    def sequence(self, source: str, drafted: int, accepted: int, new: list[int], relaxed: int = 0) -> None:
        """What one step brought one sequence; ``relaxed`` of the accepted tokens are not the target's own."""
        self.counters["committed_tokens"] += len(new)
        if drafted:
            self.counters["verifications"] += 1
            self.counters["drafted_tokens"] += drafted
            self.counters["accepted_tokens"] += accepted
            self.counters["relaxed_tokens"] += relaxed
            self.counters[f"drafted:{source}"] += drafted
            self.counters[f"accepted:{source}"] += accepted

    def as_dict(self) -> dict[str, float]:
        """Totals since the start; ``verify_ms``, ``wait_ms``, ``draft_ms`` and ``overhead_ms`` are means of a round."""
        result = {name: float(value) for name, value in self.counters.items()}
        result |= {f"miss:{reason}": float(value) for reason, value in self.reasons.items()}
        result |= {f"{name}_ms": 1e3 * self._seconds[name] / count for name, count in self._timed.items()}
        ordered = sorted(self.overhead_ms)
        if ordered:
            result["round_overhead_ms_p50"] = ordered[len(ordered) // 2]
            result["round_overhead_ms_p99"] = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return result

    def _time(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds
        self._timed[name] += 1
