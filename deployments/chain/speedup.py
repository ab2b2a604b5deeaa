"""How much faster than plain steps a way to run is, by batch size, as decayed averages of what steps brought."""

ALPHA = 1 / 16  # of a step, in averages over steps


class Average:
    """Ratio of two decayed sums."""

    __slots__ = ("_time", "_tokens", "steps")

    def __init__(self) -> None:
        self._tokens = self._time = 0.0
        self.steps = 0

    def add(self, tokens: float, time: float) -> None:
        alpha = max(ALPHA, 1.0 / (self.steps + 1))
        self._tokens += alpha * (tokens - self._tokens)
        self._time += alpha * (time - self._time)
        self.steps += 1

    @property
    def value(self) -> float:
        return self._tokens / self._time if self._time > 0.0 else 1.0


class Regime:
    """One size of batch: how the two ways to run compare, and when the worse one is tried again."""

    def __init__(self) -> None:
        self.local, self.model = Average(), Average()
        self.drafting = Average()  # as ``model``, without the steps in which a draft was still reading
        self.unplain = 0  # steps since one without drafts
        self.asking = True
        self.steps = 0  # since models are asked again
        self.time_s = 0.0  # spent in steps of this size; the clock of its tries
        self.began = 0.0
        self.try_at = 0.0
