"""When to stop asking a draft that does not answer, and when to try it again."""

from dataclasses import dataclass, field

from deployments.chain.faults import FaultPolicy


@dataclass(slots=True)
class Circuit:
    """Closed: ask. Open: do not ask until the pause is over, then let one probe through.

    Time is passed in (seconds of any monotonic clock), so that behaviour is a pure function of calls.
    """

    faults: FaultPolicy
    failures: int = 0
    _pause_s: float = field(default=0.0, init=False)
    _open_until: float = field(default=float("-inf"), init=False)

    @property
    def open(self) -> bool:
        return self.failures >= self.faults.circuit_failures

    def allows(self, now: float) -> bool:
        return not self.open or now >= self._open_until

    def success(self) -> None:
        self.failures = 0
        self._pause_s = 0.0

    def failure(self, now: float) -> None:
        self.failures += 1
        if self.open:
            self._pause_s = min(self._pause_s * 2 or self.faults.circuit_pause_s, self.faults.circuit_pause_max_s)
            self._open_until = now + self._pause_s
