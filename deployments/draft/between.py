"""What a draft does between messages: read prompts, go on along main lines, and start and follow branches off them."""

from __future__ import annotations

from deployments.chain.protocol import MAX_DRAFT_TOKENS
from deployments.draft.calibration import Calibration
from deployments.draft.lines import Line, Session
from deployments.draft.pace import Pace
from deployments.draft.runner import Runner
from deployments.draft.schedule import (
    Row,
    Start,
    best_rows,
    idle_rows,
    reading_alone_is_cheaper,
    step_seconds,
    use_of_reading,
)
from deployments.draft.sessions import SessionStore

ALONE_SLICE_S = 0.25  # longest call that reads a prompt while no other sequence is drafted for
CATCH_UP = MAX_DRAFT_TOKENS + 1  # a round commits at most so many tokens; more to read is a prompt


class Between:
    """Chooses the next model call of idle time. ``pace`` None: whenever there is time; ``ahead`` as the engine's."""

    def __init__(
        self,
        store: SessionStore,
        runner: Runner,
        calibration: Calibration,
        pace: Pace | None,
        *,
        ahead: int | None,
    ) -> None:
        self._store = store
        self._runner = runner
        self._calibration = calibration
        self._pace = pace
        self._ahead = ahead

    def once(self, now: float, worth_s: float) -> bool:
        """Make one model call; False when there is none worth making. ``worth_s``: what a token saves the target; 0: unknown."""
        sessions = self._store.sessions.values()
        rows: list[Row] = []
        if self._ahead != 0:
            active = [session for session in sessions if session.active and session.behind <= 2]
            if self._read_ahead(active, now, worth_s):
                return True
            rows = self._rows(active)
        unread = [session for session in sessions if _has_unread(session)]
        if not unread:
            return self._run(rows, now, worth_s)
        # the token after the last one verified comes first, so that a draft that is accepted whole costs nothing to continue
        if not self._run([row for row in rows if row.near], now, worth_s):
            read = self._store.read
            session = min(unread, key=lambda s: (read[s.tenant], not s.active, s.pending))
            # nobody who waits for a draft is kept by a longer call, which reads the weights less often
            alone = len(unread) == 1 and not any(other.active for other in sessions if other is not session)
            count = self._runner.read_slice(session, slice_s=ALONE_SLICE_S if alone else None)
            self._store.served(session.tenant, count)
        return True

    def _rows(self, sessions: list[Session]) -> list[Row]:
        branching = bool(self._store.branch_slots)
        rows: list[Row] = []
        for session in sessions:
            rows += idle_rows(
                session,
                self._calibration,
                ahead=self._ahead,
                context=self._store.context,
                copy_s=self._runner.copy_s,
                branching=branching,
            )
        return rows

    def _read_ahead(self, sessions: list[Session], now: float, worth_s: float) -> bool:
        """Read all that one session has to read in one call, where that is cheaper than stepping and pays."""
        lagging = [session for session in sessions if session.pending > 1]
        costs = self._runner.model.costs
        if not lagging or not reading_alone_is_cheaper(lagging, costs):
            return False
        session = min(lagging, key=lambda session: session.pending)
        if not self._pays(now, costs.prefill(session.pending), use_of_reading(session), 1, worth_s):
            return False
        self._runner.read(session, session.pending)
        return True

    def _run(self, rows: list[Row], now: float, worth_s: float) -> bool:
        """Compute the best of the rows together, if that pays; False when nothing was done."""
        costs = self._runner.model.costs
        best = best_rows(rows, costs, self._store.branch_slots)
        value = sum(row.value for row in best)
        if not best or not self._pays(now, step_seconds(best, costs), value, len(best), worth_s):
            return False
        lines: list[Line] = []
        for row in best:
            line = self._runner.start(row.work) if isinstance(row.work, Start) else row.work
            if line is not None:
                lines.append(line)
        self._runner.counts["ahead_steps"] += 1
        return self._runner.advance(lines)

    def _pays(self, now: float, step_s: float, value: float, tokens: int, worth_s: float) -> bool:
        """Whether a call that yields ``tokens`` of ``value`` together should start now."""
        if self._pace is None:
            return True
        if worth_s:
            return self._pace.pays(now, step_s, value * worth_s)
        return self._pace.worthwhile(now, step_s, min(value / tokens, 1.0))


def _has_unread(session: Session) -> bool:
    """Whether committed tokens of a session wait to be read between messages."""
    if session.active:
        return session.behind > 2
    # The target may need this core for a sequence it wants no drafts of, except when it is about to want some.
    return session.announced and session.pending > 1
