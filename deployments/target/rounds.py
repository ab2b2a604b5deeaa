"""Draft rounds from the target's side: sessions, one message per draft and step, deadlines, circuits, counters.

Knows nothing of vLLM: it is given what each sequence committed and returns draft tokens.
"""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import (
    DEADLINE,
    MAX_SESSIONS_PER_STEP,
    PROTOCOL_VERSION,
    UNKNOWN_SESSION,
    Commit,
    Draft,
    DraftChannel,
    Drafts,
    Sampling,
    Step,
)
from deployments.chain.source_choice import choose
from deployments.chain.trace import Round, Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """One running sequence after an engine step."""

    request: str
    new: list[int]  # tokens this step committed
    length: int  # committed tokens, prompt included
    tokens: Callable[[int, int], list[int]]  # tokens(start, stop) of the whole sequence
    want: int  # draft tokens of use after this one; 0: none (finished, disabled, at the limit)
    sampling: Sampling


@dataclass(slots=True)
class _Session:
    trace: Trace
    chain_id: str
    epoch: int = 0
    sent: int = 0  # committed tokens the draft has been told of; 0: not open there
    draft: str = ""  # channel that holds the session
    pending: Draft | None = None  # draft being verified by the step under way
    pending_source: str = ""
    pending_wait_ms: float = 0.0
    pending_work_ms: float = 0.0
    reason: str = ""
    behind: int = 0  # answers in a row that the draft was still reading the sequence
    useless: int = 0  # drafts in a row of which nothing was accepted
    rest: int = 0  # steps until the draft is asked again
    resting: str = ""  # why


@dataclass(slots=True)
class _Peer:
    channel: DraftChannel
    circuit: Circuit
    closed: list[str] = field(default_factory=list)  # sessions to close with the next message


class DraftRounds:
    """Turns commits into drafts; every failure is an empty draft with a counted reason."""

    def __init__(
        self, target: str, vocab_size: int, faults: FaultPolicy, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.target = target
        self.vocab_size = vocab_size
        self.faults = faults
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._sessions: dict[str, _Session] = {}
        self._done: OrderedDict[str, tuple[float, Trace]] = OrderedDict()
        self._number = 0
        self._step_s = 0.0  # EWMA of an engine step without drafting
        self._wait_s = 0.0  # deadline of the round under way
        self._left_at: float | None = None
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._overhead_ms: deque[float] = deque(maxlen=8192)
        self._dropped: Counter[str] = Counter()  # by channels that are gone

    # --- peers ----------------------------------------------------------------------------------------------------

    def set_channels(self, channels: dict[str, DraftChannel]) -> None:
        """Replace the set of drafts; sessions of one that left open anew elsewhere with their next commit."""
        for name in list(self._peers):
            if channels.get(name) is not self._peers[name].channel:
                gone = self._peers.pop(name).channel
                self._dropped += gone.dropped
                gone.close()
                for session in self._sessions.values():
                    if session.draft == name:
                        self._forget(session)
        for name, channel in channels.items():
            if name not in self._peers:
                self._peers[name] = _Peer(channel, Circuit(self.faults))

    @property
    def channels(self) -> dict[str, DraftChannel]:
        return {name: peer.channel for name, peer in self._peers.items()}

    # --- one engine step ------------------------------------------------------------------------------------------

    def round(self, running: list[Running]) -> dict[str, list[int]]:
        """Record what the step committed, then return draft tokens by request (missing: none)."""
        entered = self._clock()
        if self._left_at is not None:
            took = entered - self._left_at
            self._step_s = took if self._step_s == 0.0 else 0.8 * self._step_s + 0.2 * took
        for sequence in running:
            self._record(sequence)
        asked = self._ask(running, entered)
        drafts, work_s = self._gather(asked, entered)
        result = {}
        for sequence in running:
            session = self._sessions[sequence.request]
            draft = drafts.get(sequence.request)
            if draft is not None and draft.tokens:
                session.pending = draft
                result[sequence.request] = draft.tokens
        self._left_at = self._clock()
        self.counters["rounds"] += 1
        if asked:
            self._overhead_ms.append((self._left_at - entered - work_s) * 1e3)
        return result

    def begin(self, request: str, chain_id: str, prompt_tokens: int, keep_rounds: bool) -> None:
        """A request reached the target; must precede its first :meth:`round`."""
        self._sessions[request] = _Session(Trace(keep_rounds, prompt_tokens), chain_id)

    def announce(self, prompts: list[tuple[str, list[int], Sampling]]) -> None:
        """Send prompts the target is about to read, so that drafts read them meanwhile. Waits for nothing."""
        now = self._clock()
        usable = [name for name, peer in self._peers.items() if peer.circuit.allows(now) and not peer.circuit.open]
        if not usable:
            return
        commits: dict[str, list[Commit]] = {}
        for request, tokens, sampling in prompts[:MAX_SESSIONS_PER_STEP]:
            session = self._sessions[request]
            session.draft, session.epoch = choose(request, usable), session.epoch + 1
            commit = Commit(request, session.epoch, len(tokens), tokens, 0, sampling)
            commits.setdefault(session.draft, []).append(commit)
        self._number += 1
        for name, batch in commits.items():
            peer = self._peers[name]
            if self._post(peer, Step(PROTOCOL_VERSION, self.target, self._number, 0.0, batch, peer.closed)):
                peer.closed = []
                for commit in batch:
                    self._sessions[commit.session].sent = commit.length

    def knows(self, request: str) -> bool:
        return request in self._sessions

    def _record(self, sequence: Running) -> None:
        session = self._sessions[sequence.request]
        draft, session.pending = session.pending, None
        base = sequence.length - len(sequence.new)
        drafted = draft.tokens if draft is not None and draft.base == base else []
        accepted = len(sequence.new) - 1 if drafted else 0
        session.trace.add(
            Round(
                base=base,
                drafted=drafted,
                accepted=accepted,
                own=sequence.new[accepted:],
                source=session.pending_source if drafted else "",
                wait_ms=session.pending_wait_ms,
                draft_ms=session.pending_work_ms if drafted else 0.0,
                reason="" if drafted else session.reason,
            )
        )
        session.reason, session.pending_wait_ms = "", 0.0
        self.counters["committed_tokens"] += len(sequence.new)
        if drafted:
            self.counters["verifications"] += 1
            self.counters["drafted_tokens"] += len(drafted)
            self.counters["accepted_tokens"] += accepted
            self._judge(session, accepted)

    def _judge(self, session: _Session, accepted: int) -> None:
        """Verifying costs even when nothing comes of it: a sequence whose drafts are useless is asked for fewer."""
        session.useless = 0 if accepted else session.useless + 1
        over = session.useless - self.faults.useless_drafts
        if over >= 0:
            session.rest = min(1 << over, self.faults.useless_rest_steps)
            session.resting = "useless"

    def _ask(self, running: list[Running], now: float) -> dict[str, list[Commit]]:
        """Post one message to each draft concerned; return what was asked of whom."""
        usable = [name for name, peer in self._peers.items() if peer.circuit.allows(now)]
        commits: dict[str, list[Commit]] = {}
        for sequence in running:
            session = self._sessions[sequence.request]
            if sequence.want <= 0:
                continue
            if session.rest:
                session.rest -= 1
                self._miss(session, session.resting)
                continue
            if not usable:
                self._miss(session, "circuit_open" if self._peers else "no_draft_replica")
                continue
            name = session.draft if session.draft in usable else choose(sequence.request, usable)
            if name != session.draft:
                self._close_at_draft(sequence.request, session)
                session.draft, session.epoch, session.sent = name, session.epoch + 1, 0
            batch = commits.setdefault(name, [])
            if len(batch) >= MAX_SESSIONS_PER_STEP:
                self._miss(session, "message_full")
                continue
            batch.append(
                Commit(
                    session=sequence.request,
                    epoch=session.epoch,
                    length=sequence.length,
                    tokens=sequence.tokens(session.sent, sequence.length),
                    want=sequence.want,
                    sampling=sequence.sampling if session.sent == 0 else None,
                )
            )
        self._number += 1
        asked = {}
        self._wait_s = self._deadline(running)
        self._send_closes(except_to=commits)
        for name, batch in commits.items():
            peer = self._peers[name]
            step = Step(PROTOCOL_VERSION, self.target, self._number, self._wait_s, batch, peer.closed)
            if self._post(peer, step):
                peer.closed = []
                asked[name] = batch
                for commit in batch:
                    self._sessions[commit.session].sent = commit.length
            else:
                peer.circuit.failure(now)
                for commit in batch:
                    self._miss(self._sessions[commit.session], "not_sent")
        return asked

    def _post(self, peer: _Peer, step: Step) -> bool:
        """A channel that raises is a channel that does not deliver: the target must not fail with it."""
        try:
            return peer.channel.post(step)
        except Exception:
            logger.exception("draft channel %s failed to send", peer.channel.name)
            return False

    def _collect(self, peer: _Peer, number: int, timeout_s: float) -> Drafts | None:
        try:
            return peer.channel.collect(number, timeout_s)
        except Exception:
            logger.exception("draft channel %s failed to receive", peer.channel.name)
            return None

    def _deadline(self, running: Iterable[Running]) -> float:
        """Waiting longer than the drafted tokens could save is never worth it: T plain steps."""
        most = max((sequence.want for sequence in running), default=0)
        if self._step_s == 0.0:
            return self.faults.draft_deadline_s
        return min(self.faults.draft_deadline_s, max(most * self._step_s, self.faults.draft_deadline_min_s))

    def _gather(self, asked: dict[str, list[Commit]], entered: float) -> tuple[dict[str, Draft], float]:
        """Wait for the answers, all drafts against one deadline."""
        found: dict[str, Draft] = {}
        longest_work = 0.0
        until = self._clock() + self._wait_s + self.faults.answer_slack_s
        for name, commits in asked.items():
            peer = self._peers[name]
            answer = self._collect(peer, self._number, max(0.0, until - self._clock()))
            now = self._clock()
            if answer is None:
                peer.circuit.failure(now)
                for commit in commits:
                    self._miss(self._sessions[commit.session], "deadline_missed", (now - entered) * 1e3)
                continue
            peer.circuit.success()
            longest_work = max(longest_work, answer.work_s)
            self._take(answer, commits, found, (now - entered) * 1e3)
        return found, longest_work

    def _take(self, answer: Drafts, commits: list[Commit], found: dict[str, Draft], wait_ms: float) -> None:
        by_session = {draft.session: draft for draft in answer.drafts}
        for commit in commits:
            session = self._sessions[commit.session]
            session.pending_source, session.pending_wait_ms = answer.source, wait_ms
            session.pending_work_ms = answer.work_s * 1e3
            draft = by_session.get(commit.session)
            if draft is None:
                self._miss(session, "not_answered", wait_ms)
            elif draft.epoch != commit.epoch or draft.base != commit.length:
                self._miss(session, "stale_draft", wait_ms)
            elif not draft.tokens:
                if draft.reason == UNKNOWN_SESSION:
                    session.epoch, session.sent = session.epoch + 1, 0
                elif draft.reason == DEADLINE:
                    # It reads in the time between messages, and each message interrupts it.
                    session.behind += 1
                    session.rest = min(1 << (session.behind - 1), self.faults.reading_rest_steps)
                    session.resting = "draft_reading"
                self._miss(session, draft.reason or "empty", wait_ms)
            elif len(draft.tokens) > commit.want or not all(0 <= t < self.vocab_size for t in draft.tokens):
                self._miss(session, "bad_draft", wait_ms)
            else:
                session.behind = 0
                found[commit.session] = draft

    def _miss(self, session: _Session, reason: str, wait_ms: float = 0.0) -> None:
        session.reason, session.pending_wait_ms = reason, wait_ms
        self.reasons[reason] += 1

    # --- ends -----------------------------------------------------------------------------------------------------

    def finish(self, requests: Iterable[str]) -> None:
        """Requests ended or were aborted: close their sessions and keep their totals for who asks."""
        now = self._clock()
        for request in requests:
            session = self._sessions.pop(request, None)
            if session is None:
                continue
            self._close_at_draft(request, session)
            if session.chain_id:
                self._done[session.chain_id] = (now, session.trace)
        while self._done and (
            len(self._done) > self.faults.trace_requests
            or now - next(iter(self._done.values()))[0] > self.faults.trace_keep_s
        ):
            self._done.popitem(last=False)

    def flush(self) -> None:
        """The engine goes idle: tell drafts of closed sessions now, and do not count the idleness as a step."""
        self._number += 1
        self._send_closes(except_to={})
        self._left_at = None

    def _send_closes(self, except_to: Container[str]) -> None:
        """A message of its own where none with commits is about to carry them; nobody answers it."""
        for name, peer in self._peers.items():
            if peer.closed and name not in except_to:
                step = Step(PROTOCOL_VERSION, self.target, self._number, 0.0, [], peer.closed)
                if self._post(peer, step):
                    peer.closed = []
                del peer.closed[: -self.faults.trace_requests]  # a draft that is away evicts them by their lease

    def _close_at_draft(self, request: str, session: _Session) -> None:
        peer = self._peers.get(session.draft)
        if peer is not None and session.sent:
            peer.closed.append(request)

    def _forget(self, session: _Session) -> None:
        session.draft, session.sent = "", 0

    # --- what happened --------------------------------------------------------------------------------------------

    def take_trace(self, chain_id: str) -> dict[str, Any] | None:
        """Totals and rounds of a request by its chain id; a finished one is handed out once."""
        done = self._done.pop(chain_id, None)
        if done is not None:
            return done[1].as_dict()
        for session in self._sessions.values():
            if session.chain_id == chain_id:
                return session.trace.as_dict()
        return None

    def stats(self) -> dict[str, float]:
        """Counters since start or :meth:`reset_stats`, flat."""
        result: dict[str, float] = {name: float(value) for name, value in self.counters.items()}
        result.update({f"miss:{reason}": float(value) for reason, value in self.reasons.items()})
        dropped = sum((peer.channel.dropped for peer in self._peers.values()), self._dropped)
        result.update({f"dropped:{reason}": float(value) for reason, value in dropped.items()})
        result["drafts_connected"] = float(len(self._peers))
        result["drafts_usable"] = float(sum(not peer.circuit.open for peer in self._peers.values()))
        result["sessions"] = float(len(self._sessions))
        ordered = sorted(self._overhead_ms)
        if ordered:
            result["round_overhead_ms_p50"] = ordered[len(ordered) // 2]
            result["round_overhead_ms_p99"] = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return result

    def overheads_ms(self) -> list[float]:
        """Of the latest rounds, what each took beyond the draft's own work."""
        return list(self._overhead_ms)

    def reset_stats(self) -> None:
        self.counters.clear()
        self.reasons.clear()
        self._overhead_ms.clear()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.channel.close()
        self._peers.clear()
