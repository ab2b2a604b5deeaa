"""The draft engine: many sessions, one model, one answer a step, and the time between used for what may be asked next.

While the target verifies a guess, the engine goes on along the main line and along branches off it. What a commit makes wrong is
given up at once; a commit that takes a branch finds its draft waiting.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import (
    DEADLINE,
    ERROR,
    PROTOCOL_VERSION,
    STALE,
    Commit,
    Draft,
    Drafts,
    Step,
)
from deployments.draft.answer_job import AnswerJob
from deployments.draft.answers import NO_HIDDEN, Emit, WriteRequest, Writing
from deployments.draft.between import CATCH_UP, Between
from deployments.draft.calibration import Calibration
from deployments.draft.choose import Choice
from deployments.draft.health import STEPS_AFTER_MOVE, fragmentation, mend
from deployments.draft.hidden_intake import HiddenIntake
from deployments.draft.kv_intake import KvIntake
from deployments.draft.lines import BRANCH, MAIN_LINE, MISS, Session
from deployments.draft.migration import Migration
from deployments.draft.model import StepModel
from deployments.draft.pace import Pace
from deployments.draft.runner import Runner
from deployments.draft.sessions import SessionStore
from deployments.draft.turns import Turns
from deployments.draft.waiting import Waiting
from deployments.draft.writer import Writer

_COUNTERS = (
    "rows",  # of single-token steps; what they are wasted on: deployments/draft/health.py
    "rows_wasted",
    "rows_fragmented",
    "calls_split",
    "moves",
    "integrity_checks",
    "integrity_violations",
    "cache_hits",  # rounds that left the main line where a branch did
    "cache_misses",  # rounds that left it elsewhere
    "branch_hits",  # of the hits, those that found tokens waiting
    "mainline_hits",  # rounds that stayed on the main line and found tokens waiting beyond
    "branch_tokens",
    "ready_tokens",
    "answers",  # whole ones that came to their end or length; those that did not are counted by reason, ``answer:…``
    "answer_tokens",
)


class DraftEngine:
    """Implements :class:`deployments.chain.protocol.Drafter`. Use from one thread.

    ``target_vocab_size``: tokens from there on are never proposed. ``top_k``: probabilities sent with each token.
    ``prefill_wait_s``: a step waits so long for prompts (and never past its deadline); longer ones are read between messages,
    a slice of ``prefill_slice_s`` at a time, because a message that arrives meanwhile waits for the slice.
    ``ahead``: tokens guessed in idle time beyond those sent, on the main line and on branches; None is the bonus token and the
    whole next draft; 0 is off: no branches, no tokens of other sources, nothing in idle time but reading prompts.
    ``hidden``: takes the target's hidden states; then ``kv`` is None, and whole answers are refused: nobody has any for those.
    ``kv``: takes the target's KV of committed positions where it is offered; None computes all of it here.
    ``migration``: gives KV of sessions to a draft like this one, and takes it; None neither.
    ``writing``: how whole answers are written beside. ``paced``: start idle steps only where :class:`Pace` expects a gain; else whenever there is time.
    ``check_s``: least time between two looks at the books when there is nothing else to do.
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
        kv: KvIntake | None = None,
        hidden: HiddenIntake | None = None,
        migration: Migration | None = None,
        writing: Writing | None = None,
        check_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        faults = faults or FaultPolicy()
        self.name = name
        self.vocab_size = min(model.vocab_size, target_vocab_size or model.vocab_size)
        known = hidden.token_ids if hidden is not None else None  # the tokens that have a logit
        self.top_k = min(top_k, self.vocab_size if known is None else int(np.searchsorted(known, self.vocab_size)))
        hint_vocab = 0 if ahead == 0 else self.vocab_size
        self._model = model
        self._store = SessionStore(model.slots, model.context, model.vocab_size, faults.session_lease_s, hint_vocab)
        self._calibration = Calibration()
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._runner = Runner(
            model,
            self._store,
            self._calibration,
            vocab_size=self.vocab_size,
            token_ids=known,
            top_k=self.top_k,
            slice_s=prefill_slice_s,
            clock=clock,
            counts=self._counts,
        )
        self._waiting = Waiting(
            self._runner, self._calibration, prompt_s=min(prefill_wait_s, faults.prefill_budget_s), clock=clock
        )
        self._kv = kv
        self._hidden = hidden
        self._migration = migration
        self._unused_s = faults.session_lease_s / 10  # then a session's branches go, long before itself
        self._pace = Pace() if paced else None
        writing = writing or Writing()
        self._writer = Writer(
            self._store,
            self._runner,
            self._calibration,
            writing,
            vocab_size=self.vocab_size,
            clock=clock,
            refuses=NO_HIDDEN if hidden is not None else "",
        )
        between = Between(self._store, self._runner, self._calibration, self._pace, ahead=ahead)
        self._turns = Turns(self._store, between, self._writer, self._pace, share=writing.share, clock=clock)
        self._clock = clock
        self._worth_s = 0.0
        self._packed = False
        self._check_s, self._checked = check_s, clock()
        self._busy_s = self._idle_s = 0.0

    # --- Drafter --------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> Drafts:
        """Apply every commit, close what ended, and draft what is wanted while it pays and the deadline allows."""
        return self.step_together([step])[0]

    def step_together(self, steps: Sequence[Step]) -> list[Drafts]:
        """As :meth:`step` for several targets at once: their sessions share batched model calls and the nearest deadline."""
        now = self._clock()
        if self._pace:
            self._pace.received(now)
        applied = [self._receive(step, now) for step in steps]
        wanting = [session for entries in applied for _, session, _ in entries if session is not None and session.want]
        if wanting:
            deadline_s = min(step.deadline_s for step in steps if any(commit.want for commit in step.commits))
            self._packed = False
            self._waiting.draft(wanting, now, now + deadline_s, self._worth_s)
        drafts = [[self._answer(*entry) for entry in entries] for entries in applied]
        after = self._clock()
        self._busy_s += after - now
        self._turns.kept_waiting(after - now)
        if self._pace:
            self._pace.answered(after)
        return [
            Drafts(PROTOCOL_VERSION, self.name, step.number, answers, after - now)
            for step, answers in zip(steps, drafts, strict=True)
        ]

    def meet(self, offer: Mapping[str, Any]) -> str:
        """What a target that makes this offer should send of what it computes, and how; empty: nothing. Callable from any thread."""
        if self._hidden is not None:
            return self._hidden.meet(offer)
        return self._kv.meet(offer) if self._kv is not None else ""

    def write(self, request: WriteRequest, emit: Emit) -> AnswerJob:
        """Write whole answers between messages; ``emit`` gets each one once. Callable from any thread.

        ``emit`` is called in the drafting thread, or before this returns for what is refused; not for what was cancelled.
        Raises ValueError for tokens the model does not know.
        """
        return self._writer.submit(request, emit)

    def disconnect(self, target: str) -> None:
        """Forget every session of a target that is gone."""
        self._store.disconnect(target)

    def export_sessions(self) -> list[bytes]:
        """Records of the KV of all sessions, those used last first, for :meth:`adopt` of a draft like this one."""
        if self._migration is None:
            return []
        sessions = sorted(self._store.sessions.values(), key=lambda session: session.last_used, reverse=True)
        return [record for session in sessions if (record := self._migration.export(session))]

    def adopt(self, records: Sequence[bytes]) -> None:
        """Keep KV of sessions of a draft that leaves, for when their targets open them here; refusals are counted."""
        if self._migration is not None:
            for record in reversed(records):  # those used last stay longest
                self._counts[self._migration.shelve(record)] += 1

    def idle(self, budget_s: float, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Use time between messages: read waiting prompts, guess beyond what was sent, write answers. True when work is left.

        Looks at the clock and at ``should_stop`` between model calls; one call is a token for each of several lines or a slice
        of a prompt.
        """
        started = self._clock()
        before, left = started, True
        while before - started < budget_s and not should_stop():
            if not self._packed:  # one move between two model calls
                self._store.tidy(before, self._unused_s)
                self._packed = not self._runner.pack(STEPS_AFTER_MOVE)
            left = self._turns.once(before, self._worth_s) or not self._packed
            if not left:
                self._store.tidy(before, self._unused_s)  # also where nobody sent anything for long
                if before - self._checked >= self._check_s:
                    self._checked = before
                    mend(self._store, self._counts)
                    self._writer.mend()
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
        store = self._store
        gap = self._pace.gap_s if self._pace else None
        return {
            **self._counts,
            **(self._migration.stats() if self._migration is not None else {}),
            "busy_s": self._busy_s,
            "idle_busy_s": self._idle_s,
            "evicted": store.evicted,
            "preempted": store.preempted,
            "hinted_tokens": store.hinted,
            "sessions": len(store.sessions),
            "branches": sum(len(session.branches) for session in store.sessions.values()),
            "slots_free": store.table.free,
            **self._writer.stats(),
            "writing_s": self._turns.writing_s,
            "slot_fragmentation": fragmentation(store.sessions.values()),
            "gap_ms": (gap or 0.0) * 1e3,
        }

    def check_integrity(self) -> None:
        """Assert that lines and slots match and that every session's bookkeeping holds."""
        self._store.check()
        self._writer.check()

    # --- a step ---------------------------------------------------------------------------------------------------

    def _receive(self, step: Step, now: float) -> list[tuple[Commit, Session | None, str]]:
        if step.version != PROTOCOL_VERSION:
            self._counts["bad_version"] += 1
            return []
        self._counts["steps"] += 1
        for session in step.closed:
            self._store.close((step.target, session))
        applied = self._apply(step, now)
        if step.token_worth_s or any(commit.want for commit in step.commits):  # announcements do not tell
            self._worth_s = step.token_worth_s
        return applied

    def _apply(self, step: Step, now: float) -> list[tuple[Commit, Session | None, str]]:
        applied: list[tuple[Commit, Session | None, str]] = []
        latest: dict[str, int] = {}
        for commit in step.commits:
            known = (step.target, commit.session) in self._store.sessions
            session, reason = self._store.apply(step.target, commit, now)
            if session is not None:
                if known:
                    self._learn(session)
                if self._hidden is not None:
                    if taken := self._hidden.take(session, commit):
                        self._counts[taken] += 1
                elif commit.kv and self._kv is not None:
                    self._counts[self._kv.take(session, commit.kv)] += 1
                elif not known and self._migration is not None and (moved := self._migration.take(session)):
                    self._counts[moved] += 1
                if commit.session in latest:  # a later commit of the same step overtakes this one
                    earlier = latest[commit.session]
                    applied[earlier] = (applied[earlier][0], None, STALE)
                latest[commit.session] = len(applied)
            applied.append((commit, session, reason))
        return applied

    def _learn(self, session: Session) -> None:
        """Count what a commit showed about the guess, and follow it in the calibration."""
        if session.outcome:
            waiting = bool(session.guess) and session.behind <= 1
            self._counts["rounds"] += 1
            self._counts["cache_hits"] += session.outcome == BRANCH
            self._counts["cache_misses"] += session.outcome == MISS
            self._counts["branch_hits"] += session.outcome == BRANCH and waiting
            self._counts["mainline_hits"] += session.outcome == MAIN_LINE and waiting
            if session.ready:
                self._counts["ahead_rounds"] += 1
                self._counts["ahead_tokens"] += session.ready
                self._counts["ahead_full_rounds"] += session.ready >= session.want
        greedy = session.sampling.temperature <= 0.0
        for index, choice in enumerate(session.tested):
            if choice.margin < 0.0:
                continue  # another source chose it
            agreed = index < session.agreed
            rank = -1 if agreed or session.own not in choice.runners else choice.runners.index(session.own)
            self._calibration.observe(greedy, choice.margin, agreed, rank)

    def _answer(self, commit: Commit, session: Session | None, reason: str) -> Draft:
        chosen = []
        if session is not None:
            if not session.live:
                reason = ERROR
            elif commit.want:
                chosen = session.guess[: session.want]
                session.sent = max(len(chosen), session.verifying)
                # drafting did not pay, which says nothing about the next time; or there was no time to read what it follows
                unpaid = self._worth_s > 0.0 and session.pending <= CATCH_UP
                reason = "" if chosen or unpaid else DEADLINE
        if reason:
            self._counts[reason] += 1
        if session is None or not chosen:
            eta_s = self._unread_s() if reason == DEADLINE else 0.0
            have = session.computed if session is not None and session.live else 0
            return Draft(commit.session, commit.epoch, commit.length, [], reason, eta_s, have=have)
        ready = min(session.ready, len(chosen))
        self._counts["tokens"] += len(chosen)
        self._counts["ready_tokens"] += ready
        tokens = [choice.token for choice in chosen]
        accept = struct.pack(f"<{len(chosen)}e", *[choice.confidence for choice in chosen])
        ids = probs = b""
        top_k = self.top_k if session.sampling.probs else 0
        if top_k:
            ids = np.concatenate([self._ids(choice) for choice in chosen]).astype("<i4").tobytes()
            probs = np.concatenate([self._probs(choice) for choice in chosen]).astype("<f2").tobytes()
        return Draft(
            session=commit.session,
            epoch=commit.epoch,
            base=commit.length,
            tokens=tokens,
            ready=ready,
            accept=accept,
            top_k=top_k,
            top_ids=ids,
            top_probs=probs,
            have=session.computed,
        )

    def _unread_s(self) -> float:
        """Seconds to read what all sessions still have to read."""
        return sum(self._model.costs.prefill(s.pending) for s in self._store.sessions.values() if s.pending > CATCH_UP)

    def _ids(self, choice: Choice) -> npt.NDArray[np.int32]:
        # another source's token has no probabilities here: all of the mass is in the tail
        return choice.ids if len(choice.ids) else np.full(self.top_k, choice.token, np.int32)

    def _probs(self, choice: Choice) -> npt.NDArray[np.float16]:
        return choice.probs if len(choice.probs) else np.zeros(self.top_k, np.float16)
