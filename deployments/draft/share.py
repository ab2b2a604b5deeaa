"""A share of time for work that could otherwise wait for ever behind work of a higher class. Pure; no clock."""

_MOST_S = 0.1  # of credit or debt: what was long ago does not count


class Share:
    """Credit in seconds: earned as time passes while the work waits, spent by doing it. Due while there is credit."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 0.0
        self._since: float | None = None

    def waits(self, now: float) -> None:
        """The work waits, or still does: earn for the time since this was said last."""
        if self._since is not None:
            self._credit = min(self._credit + self._share * (now - self._since), _MOST_S)
        self._since = now

    def skip(self, seconds: float) -> None:
        """So much of the time that passed was not there to be shared."""
        if self._since is not None:
            self._since += seconds

    def spend(self, seconds: float) -> None:
        """The work took so long."""
        self._credit = max(self._credit - seconds, -_MOST_S)

    def rest(self) -> None:
        """No work waits."""
        self._since, self._credit = None, 0.0

    @property
    def due(self) -> bool:
        return self._credit > 0.0
