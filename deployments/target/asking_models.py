"""Asking draft models: which sequences are worth a round, what each draft replica is told, and what comes back in time."""

from collections.abc import Callable, Mapping

from deployments.chain.acceptance_rates import UNKNOWN_CONFIDENCE
from deployments.chain.controller import Controller, Decision, Offer, Wish
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import DEADLINE, MAX_SESSIONS_PER_STEP, UNKNOWN_SESSION, Commit, Draft, Drafts, Sampling
from deployments.chain.source_choice import choose
from deployments.target.hidden_states import HiddenStates
from deployments.target.kv_export import KvExport
from deployments.target.peers import Peers, draft_of
from deployments.target.round_stats import RoundStats
from deployments.target.sequence import Candidate, Running, Sequence

MODEL = "model"  # names every draft model in a request's ``sources``
NOTHING = Offer(0, 0.0)

Commits = dict[str, list[Commit]]  # by draft replica


class AskingModels:
    """One engine's end of all its draft models. ``sequences`` is shared with the rounds that own it."""

    def __init__(
        self,
        peers: Peers,
        sequences: Mapping[str, Sequence],
        stats: RoundStats,
        controller: Controller,
        faults: FaultPolicy,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.controller = controller
        self.kv: KvExport | None = None  # set once there is KV to send
        self.hidden: HiddenStates | None = None
        self._stats = stats
        self._peers = peers
        self._sequences = sequences
        self._faults = faults
        self._vocab_size = vocab_size
        self._clock = clock

    def decide(
        self, running: list[Running], local: Mapping[str, Candidate | None], now: float
    ) -> tuple[Commits, Decision]:
        """What to tell which draft, given what each sequence has without asking."""
        if self.kv is not None:
            self.kv.next_step()
        if self.hidden is not None:
            self.hidden.next_step()
        usable = self._peers.usable(now)
        wishes = [self._wish(item, local[item.request], usable) for item in running]
        decision = self.controller.asks(wishes)
        commits: Commits = {}
        for item, wish in zip(running, wishes, strict=True):
            sequence = self._sequences[item.request]
            if wish.model is None:
                self._pause(item, sequence, commits)
                continue
            if not decision.ask:
                self._miss(sequence, decision.reason)
                self._pause(item, sequence, commits)
                continue
            worth_it, reason = self.controller.wants_model(wish)
            if not worth_it:
                self._miss(sequence, reason)
                candidate = local[item.request]
                if reason == "local_better" and candidate is not None:
                    self._commit(item, sequence, commits, 0, candidate.tokens[: candidate.offer.length])
                else:
                    self._pause(item, sequence, commits)
            elif now < sequence.rest_until:
                self._miss(sequence, "draft_reading")
            elif self._commit(item, sequence, commits, min(item.want, item.ask), []):
                sequence.asked = draft_of(sequence.draft)
        return commits, decision

    def _wish(self, item: Running, candidate: Candidate | None, usable: list[str]) -> Wish:
        sequence = self._sequences[item.request]
        offer = candidate.offer if candidate is not None else NOTHING
        if min(item.want, item.ask) <= 0 or not sequence.allows(MODEL):
            return Wish(offer, None, sequence.pace)
        if not usable:
            self._miss(sequence, "circuit_open" if len(self._peers) else "no_draft_replica")
            return Wish(offer, None, sequence.pace)
        name = sequence.draft if sequence.draft in usable else choose(item.request, usable)
        if name != sequence.draft:
            self.close(item.request, sequence)
            sequence.draft, sequence.epoch, sequence.sent = name, sequence.epoch + 1, 0
        unread = 0 if self.sends_kv(name) else item.length - sequence.sent
        if not sequence.active and not self.controller.opens(unread, item.left):
            self._miss(sequence, "too_late")
            return Wish(offer, None, sequence.pace)
        record = draft_of(name)
        view = sequence.views.get(record)
        if view is None:
            view = sequence.views[record] = self.controller.view(sequence.tenant, record, sequence.family)
        return Wish(offer, view, sequence.pace)

    def _commit(self, item: Running, sequence: Sequence, commits: Commits, want: int, verifying: list[int]) -> bool:
        batch = commits.setdefault(sequence.draft, [])
        if len(batch) >= MAX_SESSIONS_PER_STEP:
            self._miss(sequence, "message_full")
            return False
        opens = sequence.sent == 0
        hidden, hidden_start = self._hidden(item, sequence) if want else (b"", 0)
        batch.append(
            Commit(
                session=item.request,
                epoch=sequence.epoch,
                length=item.length,
                tokens=item.tokens(sequence.sent, item.length),
                want=want,
                sampling=item.sampling if opens else None,
                tenant=sequence.tenant if opens else "",
                verifying=verifying,
                kv=self._kv(item, sequence) if want else b"",
                hidden=hidden,
                hidden_start=hidden_start,
            )
        )
        return True

    def sends_kv(self, draft: str) -> bool:
        """Whether a draft starts from the target's KV, so that it has next to nothing to read."""
        return self.kv is not None and self.kv.reaches(draft)

    def _kv(self, item: Running, sequence: Sequence) -> bytes:
        """Where the draft finds the KV it lacks. The last committed token has none yet."""
        stop = item.length - 1
        if self.kv is None or not self.kv.reaches(sequence.draft):
            return b""
        start = sequence.known.after(item.tokens, item.length) if sequence.sent else 0
        if self.kv.refresh and sequence.sent:
            start = min(start, sequence.refreshed)
        if start >= stop:
            return b""
        reference = self.kv.export(sequence.draft, item.request, item.tokens(0, stop), start, sequence.tenant)
        if reference:
            sequence.known.sent(item.length)
            sequence.refreshed = stop
        return reference

    def sends_hidden(self, draft: str) -> bool:
        """Whether a draft starts from the target's hidden states: before there are some it has nothing to read."""
        return self.hidden is not None and self.hidden.reaches(draft)

    def _hidden(self, item: Running, sequence: Sequence) -> tuple[bytes, int]:
        """Hidden states that the draft lacks, and their first position. The last committed token has none yet."""
        if self.hidden is None or not self.hidden.reaches(sequence.draft):
            return b"", 0
        return self.hidden.rows(item.request, sequence.hidden if sequence.sent else 0, item.length - 1)

    def _pause(self, item: Running, sequence: Sequence, commits: Commits) -> None:
        """Tell a draft that works for this sequence, once, that nobody wants drafts of it now."""
        if sequence.active and sequence.draft in self._peers:
            self._commit(item, sequence, commits, 0, [])

    def send(self, commits: Commits, deadline_s: float) -> Commits:
        """Post one message to each draft concerned; return what will be answered."""
        waiting = {}
        now = self._clock()
        worth = self.controller.token_worth_s
        for name, batch in commits.items():
            if self._peers.send(name, batch, deadline_s, worth, now):
                for commit in batch:
                    sequence = self._sequences[commit.session]
                    sequence.sent = commit.length
                    if commit.hidden and self.hidden is not None:
                        sequence.hidden = commit.hidden_start + len(commit.hidden) // self.hidden.row_bytes
                    elif commit.opens:
                        sequence.hidden = 0
                    sequence.active = bool(commit.want or commit.verifying or commit.opens)
                asked = [commit for commit in batch if commit.want]
                if asked:
                    waiting[name] = asked
            else:
                for commit in batch:
                    self._sequences[commit.session].asked = ""
                    self._miss(self._sequences[commit.session], "not_sent")
        return waiting

    # --- what comes back ------------------------------------------------------------------------------------------

    def gather(self, waiting: Commits, until: float, tokens: int) -> tuple[dict[str, Candidate], float]:
        """Wait for the answers, all drafts against one deadline."""
        found: dict[str, Candidate] = {}
        longest_work = 0.0
        for name, commits in waiting.items():
            answer = self._peers.receive(name, max(0.0, until - self._clock()))
            if answer is None:
                self._peers.missed(name, self._clock())
                for commit in commits:
                    self._miss(self._sequences[commit.session], "deadline_missed")
                continue
            self._peers.answered(name)
            longest_work = max(longest_work, answer.work_s + answer.queue_s)
            drafts = {draft.session: draft for draft in answer.drafts}
            for commit in commits:
                if commit.kv and self.kv is not None:
                    self.kv.settled(commit.session)
                candidate = self._take(commit, drafts.get(commit.session), answer, tokens)
                if candidate is not None:
                    found[commit.session] = candidate
        return found, longest_work

    def _take(self, commit: Commit, draft: Draft | None, answer: Drafts, tokens: int) -> Candidate | None:
        sequence = self._sequences[commit.session]
        if draft is None:
            self._miss(sequence, "not_answered")
        elif draft.epoch != commit.epoch or draft.base != commit.length:
            self._miss(sequence, "stale_draft")
        else:
            sequence.known.answered(commit.length, draft.tokens, draft.have)
            return self._offered(commit, draft, answer, sequence, tokens)
        return None

    def _offered(
        self, commit: Commit, draft: Draft, answer: Drafts, sequence: Sequence, tokens: int
    ) -> Candidate | None:
        if not draft.tokens:
            self._empty(sequence, draft, commit)
        elif len(draft.tokens) > commit.want or not all(0 <= t < self._vocab_size for t in draft.tokens):
            self._miss(sequence, "bad_draft")
        else:
            sequence.behind = 0
            given = draft.confidence()
            usable = given is not None and len(given) == len(draft.tokens)
            confidence = given.tolist() if usable and given is not None else [UNKNOWN_CONFIDENCE] * len(draft.tokens)
            view = sequence.views[sequence.asked]
            offer = self.controller.offer(view, confidence, tokens)
            if offer.length:
                return Candidate(
                    sequence.asked,
                    answer.source,
                    view,
                    draft.tokens,
                    confidence,
                    offer,
                    draft.ready,
                    answer.work_s * 1e3,
                    draft.top() if draft.has_top() else None,
                )
            self._miss(sequence, "not_worth_verifying")
        return None

    def _empty(self, sequence: Sequence, draft: Draft, commit: Commit) -> None:
        if draft.reason == UNKNOWN_SESSION:
            sequence.epoch, sequence.sent = sequence.epoch + 1, 0
        elif draft.reason == DEADLINE:
            # It reads in the time between messages, and each message interrupts it.
            if commit.opens:
                self.controller.read(commit.length, draft.eta_s)
            step_s = self.controller.times.predict(self.controller.lane, 1)
            rest_s = max(draft.eta_s, step_s * (1 << min(sequence.behind, 8)))
            sequence.rest_until = self._clock() + min(rest_s, self._faults.reading_rest_s)
            sequence.behind += 1
            sequence.asked = ""  # says nothing about how good its drafts are
        self._miss(sequence, draft.reason or "empty")

    # --- ends -----------------------------------------------------------------------------------------------------

    def announcement(self, request: str, tokens: list[int], sampling: Sampling, usable: list[str]) -> Commit:
        """Open a session with a prompt that nobody wants drafts of yet."""
        sequence = self._sequences[request]
        sequence.draft, sequence.epoch = choose(request, usable), sequence.epoch + 1
        return Commit(request, sequence.epoch, len(tokens), tokens, 0, sampling, sequence.tenant)

    def forget(self, request: str, sequence: Sequence) -> None:
        """A request ended."""
        self.close(request, sequence)
        if self.kv is not None:
            self.kv.forget(request)
        if self.hidden is not None:
            self.hidden.forget(request)

    def close(self, request: str, sequence: Sequence) -> None:
        """Tell the draft that holds a sequence, with the next message, that it is over."""
        if sequence.sent:
            self._peers.close_session(sequence.draft, request)
        sequence.active = False

    def _miss(self, sequence: Sequence, reason: str) -> None:
        sequence.reason = reason
        self._stats.reasons[reason] += 1
