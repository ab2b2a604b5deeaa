"""The draft engine: many sessions, one model, one answer a step.

Work on a session is always the same: compute its first token without KV. Behind the frontier that is catching up, at the
frontier it tells the next guess; so sessions that catch up, draft, and run ahead share batched single-token steps. Only
where it is cheaper, a session reads several tokens in one call of its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import (
    DEADLINE,
    ERROR,
    MAX_DRAFT_TOKENS,
    PROTOCOL_VERSION,
    STALE,
    Commit,
    Draft,
    Drafts,
    Step,
)
from deployments.draft.choose import BadLogits, Logits, choose
from deployments.draft.model import StepModel
from deployments.draft.pace import Pace
from deployments.draft.sessions import Session, SessionStore

logger = logging.getLogger(__name__)

CATCH_UP = MAX_DRAFT_TOKENS + 1  # a round commits at most so many tokens; more to read is a prompt
_LARGEST_CHUNK = 256  # scratch memory of a prefill grows with it, speed no more
_SMALLEST_CHUNK = 8  # smaller ones read the weights once for too few tokens


class DraftEngine:
    """Implements :class:`deployments.chain.protocol.Drafter`. Use from one thread.

    ``target_vocab_size``: tokens from there on are never proposed. ``top_k``: probabilities sent with each token.
    ``prefill_wait_s``: a step waits so long for prompts (and never past its deadline); longer ones are read between messages,
    a slice of ``prefill_slice_s`` at a time, because a message that arrives meanwhile waits for the slice.
    ``ahead``: tokens guessed in idle time beyond those sent; None is the bonus token and the whole next draft; 0 is off.
    ``paced``: start idle steps only where :class:`Pace` expects a gain; else whenever there is time.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        name: str = "draft",
        target_vocab_size: int | None = None,
        top_k: int = 4,
        faults: FaultPolicy | None = None,
        prefill_wait_s: float = 0.05,
        prefill_slice_s: float = 0.03,
        ahead: int | None = None,
        paced: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        faults = faults or FaultPolicy()
        self.name = name
        self.vocab_size = min(model.vocab_size, target_vocab_size or model.vocab_size)
        self.top_k = min(top_k, self.vocab_size)
        self._model = model
        self._scratch = np.empty(self.vocab_size, np.float32)
        self._store = SessionStore(model.slots, model.context, model.vocab_size, faults.session_lease_s)
        self._prefill_wait_s = min(prefill_wait_s, faults.prefill_budget_s)
        self._prefill_slice_s = prefill_slice_s
        self._ahead = ahead
        self._pace = Pace() if paced else None
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._busy_s = self._idle_s = 0.0

    # --- Drafter --------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> Drafts:
        """Apply every commit, close what ended, and draft until all have what they want or the deadline is near."""
        now = self._clock()
        if self._pace:
            self._pace.received(now)
        if step.version != PROTOCOL_VERSION:
            self._counts["bad_version"] += 1
            return Drafts(PROTOCOL_VERSION, self.name, step.number, [])
        self._counts["steps"] += 1
        for session in step.closed:
            self._store.close((step.target, session))
        applied = self._apply(step, now)
        wanting = [session for _, session, _ in applied if session is not None and session.want]
        self._draft(wanting, now, now + step.deadline_s)
        drafts = [self._answer(*entry) for entry in applied]
        after = self._clock()
        self._busy_s += after - now
        if self._pace:
            self._pace.answered(after)
        return Drafts(PROTOCOL_VERSION, self.name, step.number, drafts, after - now)

    def disconnect(self, target: str) -> None:
        """Forget every session of a target that is gone."""
        self._store.disconnect(target)

    def idle(self, budget_s: float, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Use time between messages: read waiting prompts, guess beyond what was sent. True when work is left.

        Looks at the clock and at ``should_stop`` between model calls; one call is a token for each session or a slice of a
        prompt.
        """
        started = self._clock()
        before, left = started, True
        while before - started < budget_s and not should_stop():
            left = self._idle_once(before)
            if not left:
                break
            after = self._clock()
            if self._pace and should_stop():
                self._pace.interrupted(before, after)
            before = after
        self._idle_s += self._clock() - started
        return left

    # --- beside it ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counters since the start: empty drafts by reason, steps, tokens, model calls and seconds; gauges of now."""
        gap = self._pace.gap_s if self._pace else None
        return {
            **self._counts,
            "busy_s": self._busy_s,
            "idle_busy_s": self._idle_s,
            "evicted": self._store.evicted,
            "sessions": len(self._store.sessions),
            "slots_free": self._store.table.free,
            "gap_ms": (gap or 0.0) * 1e3,
        }

    def check_integrity(self) -> None:
        """Assert that sessions and slots match and that every session's bookkeeping holds."""
        self._store.check()

    # --- a step ---------------------------------------------------------------------------------------------------

    def _apply(self, step: Step, now: float) -> list[tuple[Commit, Session | None, str]]:
        applied: list[tuple[Commit, Session | None, str]] = []
        latest: dict[str, int] = {}
        for commit in step.commits:
            known = (step.target, commit.session) in self._store.sessions
            session, reason = self._store.apply(step.target, commit, now)
            if session is not None:
                if known:
                    self._learn(session)
                if commit.session in latest:  # a later commit of the same step overtakes this one
                    earlier = latest[commit.session]
                    applied[earlier] = (applied[earlier][0], None, STALE)
                latest[commit.session] = len(applied)
            applied.append((commit, session, reason))
        return applied

    def _learn(self, session: Session) -> None:
        if not session.tried:
            return
        if self._pace:
            self._pace.committed(session.agreed, min(session.tried, session.agreed + 1))
        self._counts["rounds"] += 1
        if session.want and session.guess:
            self._counts["ahead_rounds"] += 1
            self._counts["ahead_tokens"] += min(len(session.guess), session.want)
            self._counts["ahead_full_rounds"] += len(session.guess) >= session.want

    def _draft(self, wanting: list[Session], started: float, until: float) -> None:
        self._pack()
        self._read_alone([session for session in wanting if 1 < session.pending <= CATCH_UP], until)
        ready = [session for session in wanting if session.pending <= CATCH_UP]
        waiting = [session for session in wanting if session.pending > CATCH_UP]
        longest = max((session.want for session in wanting), default=0)
        drafting_s = longest * self._model.costs.decode(len(wanting))
        prompts_until = min(started + self._prefill_wait_s, until - drafting_s)
        for session in waiting:
            expected = self._prefill_s(session)
            while session.live and session.pending > 1 and self._clock() + expected <= prompts_until:
                self._read(session, min(session.pending, _LARGEST_CHUNK))
                expected = self._prefill_s(session)
                if session.guess:
                    ready.append(session)
                    break
        while self._advance([s for s in ready if s.live and len(s.guess) < s.want], until):
            pass
        for session in waiting:
            # Without idle time a prompt would wait for ever: then each step reads a slice, when the drafts are done.
            if session.live and not session.guess and not session.moved:
                self._read_slice(session, until - self._clock())
            session.moved = False

    def _read_alone(self, lagging: list[Session], until: float) -> None:
        """Sessions behind by a few tokens read them in one call each, unless stepping together is cheaper."""
        if not lagging:
            return
        costs = self._model.costs
        behind = [session.pending for session in lagging]
        alone = sum(costs.prefill(count) for count in behind) - len(lagging) * (costs.decode(2) - costs.decode(1))
        together = sum(costs.decode(sum(count > turn for count in behind)) for turn in range(1, max(behind)))
        if alone > together:
            return
        for session in lagging:
            if self._clock() + costs.prefill(session.pending) <= until:
                self._read(session, session.pending)

    def _answer(self, commit: Commit, session: Session | None, reason: str) -> Draft:
        chosen = []
        if session is not None:
            if not session.live:
                reason = ERROR
            elif commit.want:
                chosen = session.guess[: min(commit.want, MAX_DRAFT_TOKENS)]
                reason = "" if chosen else DEADLINE
        if reason:
            self._counts[reason] += 1
        if not chosen:
            return Draft(commit.session, commit.epoch, commit.length, [], reason)
        self._counts["tokens"] += len(chosen)
        tokens = [choice.token for choice in chosen]
        if not self.top_k:
            return Draft(commit.session, commit.epoch, commit.length, tokens)
        ids = np.concatenate([choice.ids for choice in chosen]).astype("<i4").tobytes()
        probs = np.concatenate([choice.probs for choice in chosen]).astype("<f2").tobytes()
        return Draft(commit.session, commit.epoch, commit.length, tokens, "", self.top_k, ids, probs)

    # --- idle time ------------------------------------------------------------------------------------------------

    def _idle_once(self, now: float) -> bool:
        """One model call of idle work; False when there is none worth doing."""
        sessions = self._store.sessions.values()
        near = [session for session in sessions if session.want and session.pending <= 2 and self._room(session)]
        if self._ahead != 0 and self._run_ahead([s for s in near if len(s.guess) <= s.want], now):
            return True  # so that a draft that is accepted whole costs nothing to continue
        unread = [s for s in sessions if s.pending > (2 if s.want else 1)]
        if unread:
            self._read_slice(min(unread, key=lambda session: (not session.want, session.pending)))
            return True
        return self._run_ahead([s for s in near if len(s.guess) < s.want + self._beyond(s)], now)

    def _run_ahead(self, sessions: list[Session], now: float) -> bool:
        if not sessions:
            return False
        if self._pace:
            depth = sum(len(session.guess) for session in sessions) / len(sessions)
            if not self._pace.worthwhile(now, self._model.costs.decode(len(sessions)), depth):
                return False
        self._counts["ahead_steps"] += 1
        return self._advance(sessions, float("inf"))

    def _beyond(self, session: Session) -> int:
        return 1 + session.want if self._ahead is None else self._ahead

    def _room(self, session: Session) -> bool:
        return session.total < self._model.context

    # --- model calls ----------------------------------------------------------------------------------------------

    def _advance(self, sessions: Iterable[Session], until: float) -> bool:
        """Compute one more token of each session together; False when there are none or no time."""
        rows = sorted(sessions, key=lambda session: session.slot)
        started = self._clock()
        if not rows or started + self._model.costs.decode(len(rows)) > until:
            return False
        try:
            self._decode(rows)
            self._model.costs.saw_decode(len(rows), self._clock() - started)
        except Exception:
            for session in rows:  # find the one that fails: the others go on
                if len(rows) == 1:
                    self._drop(session)
                    continue
                try:
                    self._decode([session])
                except Exception:
                    self._drop(session)
        return True

    def _decode(self, rows: list[Session]) -> None:
        logits = self._model.decode(
            [session.slot for session in rows],
            [session.next_token() for session in rows],
            [session.computed for session in rows],
        )
        self._counts["decodes"] += 1
        for session, row in zip(rows, logits, strict=True):
            self._computed(session, 1, row)

    def _prefill_s(self, session: Session) -> float:
        """Expected seconds to read all a session has to read."""
        return self._model.costs.prefill(session.pending)

    def _read_slice(self, session: Session, budget_s: float = float("inf")) -> None:
        """Read the next slice of a prompt; nothing when not even the smallest fits ``budget_s``."""
        costs = self._model.costs
        if costs.prefill(_SMALLEST_CHUNK) > budget_s:
            return
        fitting = costs.prefill_fitting(min(self._prefill_slice_s, budget_s))
        # computing the last token of a session nobody wants drafts of would guess one
        unread = session.pending if session.want else session.pending - 1
        self._read(session, min(unread, max(_SMALLEST_CHUNK, min(fitting, _LARGEST_CHUNK))))

    def _read(self, session: Session, count: int) -> None:
        """Compute the next ``count`` tokens of one session in one call."""
        first = session.computed
        tokens = session.tokens[first : first + count]
        tokens += [choice.token for choice in session.guess[: count - len(tokens)]]
        started = self._clock()
        try:
            logits = self._model.prefill(session.slot, tokens, first)
            self._computed(session, count, logits)
        except Exception:
            self._drop(session)
            return
        self._model.costs.saw_prefill(count, self._clock() - started)
        self._counts["prefills"] += 1
        self._counts["prefill_tokens"] += count
        session.moved = True

    def _computed(self, session: Session, count: int, logits: Logits) -> None:
        """Record that ``count`` more tokens have KV; at the frontier ``logits`` tell the next guess."""
        if session.pending == count:
            try:
                choice = choose(logits[: self.vocab_size], session.sampling, session.total, self.top_k, self._scratch)
            except BadLogits:
                self._drop(session)
                return
            session.guess.append(choice)
        session.computed += count

    def _drop(self, session: Session) -> None:
        logger.exception("draft %s failed on session %s", self.name, session.key)
        self._counts["dropped"] += 1
        self._store.close(session.key)

    def _pack(self) -> None:
        """Move the highest session into the lowest hole, one a step: rows between live slots cost like live ones."""
        hole = self._store.table.hole()
        if hole is None:
            return
        source, target = hole
        session = next(s for s in self._store.sessions.values() if s.slot == source)
        self._model.move(source, target, session.computed)
        self._store.relocate(session)
        self._counts["moves"] += 1
