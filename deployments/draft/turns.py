"""Whose turn it is between messages: the token chain's first; whole answers have a share of the time, and what that leaves."""

from __future__ import annotations

from collections.abc import Callable

from deployments.draft.between import ALONE_SLICE_S, Between
from deployments.draft.pace import Pace
from deployments.draft.sessions import SessionStore
from deployments.draft.share import Share
from deployments.draft.writer import Call, Writer


class Turns:
    """Chooses between a model call of the token chain and one of an answer.

    A message that arrives waits for the call that runs. Beyond their share, answers therefore only make calls that are expected
    to be over by then.
    """

    def __init__(
        self,
        store: SessionStore,
        between: Between,
        writer: Writer,
        pace: Pace | None,
        *,
        share: float,
        clock: Callable[[], float],
    ) -> None:
        self.writing_s = 0.0
        self._store = store
        self._between = between
        self._writer = writer
        self._pace = pace
        self._share = Share(share)
        self._clock = clock

    def once(self, now: float, worth_s: float) -> bool:
        """Make one model call; False when there is none worth making now."""
        if not self._writer.waits:
            self._share.rest()
            return self._between.once(now, worth_s)
        alone = not any(session.active for session in self._store.sessions.values())
        self._share.waits(now)
        call = self._writer.next(now, ALONE_SLICE_S if alone else self._writer.slice_s)
        if call is not None and self._share.due:
            return self._write(call, now)
        if self._between.once(now, worth_s):
            return True
        if call is not None and (alone or self._pace is None or self._pace.fits(now, call.seconds)):
            return self._write(call, now)
        return False

    def kept_waiting(self, seconds: float) -> None:
        """A message was worked on for so long: that time is not shared."""
        self._share.skip(seconds)

    def _write(self, call: Call, now: float) -> bool:
        self._writer.make(call)
        spent = self._clock() - now
        self._share.spend(spent)
        self.writing_s += spent
        return True
