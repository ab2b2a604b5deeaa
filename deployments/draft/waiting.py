"""What a draft does while a target waits for it: catch up, read what pays to read at once, and draft as far as it pays."""

from __future__ import annotations

from collections.abc import Callable

from deployments.draft.between import CATCH_UP
from deployments.draft.calibration import Calibration
from deployments.draft.lines import Session
from deployments.draft.runner import LARGEST_CHUNK, Runner
from deployments.draft.schedule import best_rows, reading_alone_is_cheaper, wanted_rows


class Waiting:
    """Drafts against a deadline. ``prompt_s``: a step waits so long for prompts, and never past its deadline."""

    def __init__(
        self, runner: Runner, calibration: Calibration, *, prompt_s: float, clock: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._calibration = calibration
        self._prompt_s = prompt_s
        self._clock = clock
        self._worth_s = 0.0

    def draft(self, wanting: list[Session], started: float, until: float, worth_s: float) -> None:
        """Draft for sessions that want some, until the deadline. ``worth_s``: what a token saves the target; 0: unknown."""
        self._worth_s = worth_s
        short = [session for session in wanting if len(session.guess) < session.want]
        steps = max((session.want - len(session.guess) for session in short), default=0)
        for _ in short:  # where this very draft makes up for it
            if len(short) == 1 or not self._runner.pack(steps):
                break
        self._read_alone([session for session in short if 1 < session.pending <= CATCH_UP], until)
        ready = [session for session in short if session.pending <= CATCH_UP]
        waiting = [session for session in short if session.pending > CATCH_UP]
        drafting_s = max((s.want for s in short), default=0) * self._runner.model.costs.decode(len(short))
        prompts_until = min(started + self._prompt_s, until - drafting_s)
        for session in waiting:
            expected = self._runner.model.costs.prefill(session.pending)
            while session.live and session.pending > 1 and self._clock() + expected <= prompts_until:
                if not self._worth_reading(session, expected):
                    break
                self._runner.read(session, min(session.pending, LARGEST_CHUNK))
                expected = self._runner.model.costs.prefill(session.pending)
            if session.live and session.pending == 1:
                ready.append(session)
        self._draft_ready(ready, until)
        for session in waiting:
            # Without idle time a prompt would wait for ever: then each step reads a slice, when the drafts are done.
            if session.live and session.pending > 1 and not session.moved:
                self._runner.read_slice(session, until - self._clock())
            session.moved = False

    def _draft_ready(self, ready: list[Session], until: float) -> None:
        """Draft for sessions that have less than is wanted; where a token's worth is known, only while it pays."""
        costs = self._runner.model.costs
        while lines := [session for session in ready if session.live and len(session.guess) < session.want]:
            if self._worth_s:
                rows = best_rows(wanted_rows(lines, self._calibration), costs, 0)
                if sum(row.value for row in rows) * self._worth_s <= costs.decode(len(rows)):
                    return
                lines = [row.work for row in rows if isinstance(row.work, Session)]
            if not self._runner.advance(lines, until):
                return

    def _read_alone(self, lagging: list[Session], until: float) -> None:
        """Sessions behind by a few tokens read them in one call each, unless stepping together is cheaper."""
        costs = self._runner.model.costs
        if not lagging or not reading_alone_is_cheaper(lagging, costs):
            return
        for session in lagging:
            expected = costs.prefill(session.pending)
            if not self._worth_reading(session, expected):
                continue
            left = until - self._clock()
            if expected <= left:
                self._runner.read(session, session.pending)
            else:
                self._runner.read_slice(session, left)

    def _worth_reading(self, session: Session, expected_s: float) -> bool:
        """Whether reading all that is unread should keep the target waiting for the one token it yields."""
        if not self._worth_s:
            return True
        value = session.likelihood() * self._calibration.mean(session.sampling.temperature <= 0.0)
        return value * self._worth_s > expected_s
