"""How much faster than plain steps a way to run is, by batch size, as decayed averages of what steps brought."""

ALPHA = 1 / 16  # of a step, in averages over steps
_WATCHED = 8  # steps before conclusions are drawn
_HURTS, _HELPS = 0.995, 1.04
_MORE, _LESS, _MOST = 1.12, 0.97, 4.0  # of caution, a step


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

    def __init__(self, caution: float = 1.0) -> None:
        """``caution``: by how much more than its expected cost a drafted token must be worth, to begin with."""
        self.caution = self._least = caution
        self.local, self.model = Average(), Average()
        self.drafting = Average()  # as ``model``, without the steps in which a draft was still reading
        self.unplain = 0  # steps since one without drafts
        self.asking = True
        self.steps = 0  # since models are asked again
        self.time_s = 0.0  # spent in steps of this size; the clock of its tries
        self.began = 0.0
        self.try_at = 0.0

    def usual(self, few: bool) -> float:
        """What drafting by models brings; for more than a few sequences with the reading it takes."""
        return self.drafting.value if few else self.model.value

    def watch(self) -> None:
        """Whatever verifying was expected to cost: where steps with drafts are slower than plain ones, fewer are verified."""
        if self.local.steps < _WATCHED:
            return
        if self.unplain and self.local.value < _HURTS:
            self.caution = min(self.caution * _MORE, _MOST)
        elif (
            not self.unplain or self.local.value > _HELPS
        ):  # without drafts nothing is learned: dare a little more again
            self.caution = max(self.caution * _LESS, self._least)
