"""Draft rounds from the target's side: after each engine step, who drafts for which sequence and what is verified next.

Knows nothing of vLLM: it is given what each sequence committed and returns draft tokens. What sources offer and what the
controller thinks of it decides; every failure is an empty draft with a counted reason.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any

from deployments.chain.acceptance.candidates import Proposal
from deployments.chain.acceptance.family import LOSSLESS
from deployments.chain.controller import ALONE, SHARED, Controller, StepDone
from deployments.chain.faults import FaultPolicy
from deployments.chain.given import Top
from deployments.chain.protocol import MAX_SESSIONS_PER_STEP, DraftChannel, Sampling
from deployments.chain.source_choice import choose
from deployments.chain.trace import Round, Trace
from deployments.target.asking_models import MODEL, NOTHING, AskingModels, Commits
from deployments.target.hidden_states import HiddenStates
from deployments.target.kv_export import KvExport
from deployments.target.peers import Peers
from deployments.target.round_stats import RoundStats
from deployments.target.sequence import Candidate, Running, Sequence
from deployments.target.sources import Source
from deployments.target.sources.given import GivenSource


class DraftRounds:
    """Turns commits into drafts."""

    def __init__(
        self,
        target: str,
        vocab_size: int,
        faults: FaultPolicy,
        controller: Controller,
        sources: Many[Source] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.stats_of_rounds = RoundStats()
        self.faults = faults
        self._sources = list(sources)
        self._given = GivenSource(vocab_size)
        self._clock = clock
        self._peers = Peers(target, faults)
        self._sequences: dict[str, Sequence] = {}
        self._models = AskingModels(
            self._peers, self._sequences, self.stats_of_rounds, controller, faults, vocab_size, clock
        )
        self._done: OrderedDict[str, tuple[float, Trace]] = OrderedDict()
        self._left_at: float | None = None
        self._waited_s = 0.0
        self._mixed = False  # in the step under way models take part
        self._reading = False  # and one was still reading
        self._local = (0, 0.0)  # tokens and expectation of the offers that cost no waiting
        self._pure = True

    @property
    def controller(self) -> Controller:
        """Who decides; can be replaced between requests (tests, experiments)."""
        return self._models.controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        self._models.controller = controller

    def send_kv(self, kv: KvExport | None) -> None:
        """Let drafts have the KV that ``kv`` exports; None: none."""
        self._models.kv = kv

    def send_hidden(self, hidden: HiddenStates | None) -> None:
        """Let drafts that ask have the hidden states that ``hidden`` keeps; None: none."""
        self._models.hidden = hidden

    def takes_hidden(self, request: str) -> bool:
        """Whether hidden states of a request can be of use: its draft takes them, or it has none yet and may get one."""
        sequence = self._sequences.get(request)
        if sequence is None or not sequence.allows(MODEL):
            return False
        return not sequence.draft or self._models.sends_hidden(sequence.draft)

    # --- peers ----------------------------------------------------------------------------------------------------

    def set_channels(self, channels: Mapping[str, DraftChannel]) -> None:
        """Replace the set of drafts; sessions of one that left open anew elsewhere with their next commit."""
        gone = self._peers.replace(channels)
        for sequence in self._sequences.values():
            if sequence.draft in gone:
                sequence.draft, sequence.sent, sequence.active = "", 0, False

    @property
    def channels(self) -> dict[str, DraftChannel]:
        return self._peers.channels

    @property
    def lends(self) -> bool:
        """Whether a draft works on behalf of the step to come: it may need the core it shares with the engine."""
        return any(
            sequence.active and not self._models.sends_hidden(sequence.draft) for sequence in self._sequences.values()
        )

    @property
    def drafts_beside(self) -> bool:
        """Whether any draft works while the engine computes. Those that wait for its hidden states have nothing to do then."""
        return any(not self._models.sends_hidden(name) for name in self._peers.channels)

    # --- a request's life -----------------------------------------------------------------------------------------

    def begin(
        self,
        request: str,
        chain_id: str,
        prompt: Many[int],
        keep_rounds: bool,
        tenant: str = "",
        sources: Iterable[str] | None = None,
        given: Many[Many[int]] = (),
        family: str = LOSSLESS,
        tops: Many[Top | None] = (),
    ) -> None:
        """A request reached the target; must precede its first :meth:`round`.

        ``sources`` are those that may draft for it, None: all there are. Drafts that it brought, ``given``, count anyway;
        ``tops`` are what whoever wrote those thought of their tokens.
        ``family`` is that of its policy: what it accepts is remembered for those like it.
        """
        allowed = None if sources is None else frozenset(sources)
        sequence = Sequence(Trace(keep_rounds, len(prompt)), chain_id, tenant, allowed, family)
        self._sequences[request] = sequence
        if given and self._given.give(request, given, tops):
            sequence.local.append(self._given)
        for source in self._sources:
            if sequence.allows(source.name):
                source.begin(request, tenant, prompt)
                sequence.local.append(source)

    def knows(self, request: str) -> bool:
        return request in self._sequences

    def announce(self, prompts: list[tuple[str, list[int], Sampling, int]]) -> None:
        """Send prompts the target is about to read, so that drafts read them meanwhile. Waits for nothing.

        Each with its request, how it will be sampled, and how many tokens it may generate.
        """
        usable = self._peers.healthy()
        if not usable or not self.controller.announces(len(self._sequences)):
            return
        commits: Commits = {}
        for request, tokens, sampling, left in prompts[:MAX_SESSIONS_PER_STEP]:
            if self._sequences[request].allows(MODEL) and self.controller.opens(len(tokens), left):
                draft = choose(request, usable)
                if self._models.sends_kv(draft):
                    continue  # what the target reads, it need not read as well
                if self._models.sends_hidden(draft):
                    continue  # read without the target's hidden states, it would have to be read again with them
                commit = self._models.announcement(request, tokens, sampling, usable)
                commits.setdefault(self._sequences[request].draft, []).append(commit)
        self._peers.next_step()
        self._models.send(commits, 0.0)

    def finish(self, requests: Iterable[str]) -> None:
        """Requests ended or were aborted: close their sessions and keep their totals for who asks."""
        now = self._clock()
        for request in requests:
            sequence = self._sequences.pop(request, None)
            if sequence is None:
                continue
            sequence.trace.given, sequence.trace.followed = self._given.outcome(request)
            for source in sequence.local:
                source.finish(request)
            self._models.forget(request, sequence)
            if sequence.chain_id:
                self._done[sequence.chain_id] = (now, sequence.trace)
        while self._done and (
            len(self._done) > self.faults.trace_requests
            or now - next(iter(self._done.values()))[0] > self.faults.trace_keep_s
        ):
            self._done.popitem(last=False)

    def flush(self) -> None:
        """The engine goes idle: tell drafts of closed sessions now, and do not count the idleness as a step."""
        self._peers.next_step()
        self._peers.send_closes()
        self._left_at = None

    # --- one engine step ------------------------------------------------------------------------------------------

    def step_begins(self, pure: bool) -> None:
        """The engine computes now; ``pure``: nothing but decoding, so that its time says what verifying costs."""
        self._pure = pure
        self.controller.lane = SHARED if self.lends else ALONE

    def round(self, running: list[Running]) -> dict[str, list[int]]:
        """Record what the step committed, then return draft tokens by request (missing: none)."""
        entered = self._clock()
        self._record_step(running, entered)
        local: dict[str, Candidate | None] = dict.fromkeys(item.request for item in running)
        if not self.controller.measures(len(running)):
            local = {item.request: self._local_candidate(item, len(running)) for item in running}
            for item in running:
                candidate = local[item.request]
                self._sequences[item.request].pace.saw(candidate.offer if candidate is not None else NOTHING)
        offers = [candidate.offer for candidate in local.values() if candidate is not None]
        self._local = (sum(offer.length for offer in offers), sum(offer.expected for offer in offers))
        commits, decision = self._models.decide(running, local, entered)
        self._mixed = decision.mixed
        self._peers.next_step()
        deadline_s = self._deadline(len(running))
        self._peers.send_closes(except_to=commits)
        sending = self._clock()
        waiting = self._models.send(commits, deadline_s)
        until = self._clock() + deadline_s + self.faults.answer_slack_s
        drafted, work_s = self._models.gather(waiting, until, len(running))
        waited = self._clock() - sending if waiting else 0.0
        result = {}
        for item in running:
            best = self._best(local[item.request], drafted.get(item.request))
            sequence = self._sequences[item.request]
            sequence.base, sequence.pending = item.length, best
            sequence.wait_ms = waited * 1e3 if sequence.asked else 0.0
            if best is not None:
                result[item.request] = best.tokens[: best.offer.length]
        self._reading = any(self._sequences[item.request].behind for item in running)
        self._waited_s = waited
        self._left_at = self._clock()
        overhead_s = self._left_at - entered - work_s
        self.stats_of_rounds.round(waited, work_s, overhead_s if waiting else None)
        return result

    def proposal(self, request: str) -> Proposal | None:
        """What is to be verified next, with its probabilities; None where who drafted has none."""
        sequence = self._sequences.get(request)
        if sequence is None or sequence.pending is None or sequence.pending.top is None:
            return None
        length = sequence.pending.offer.length
        ids, probs = sequence.pending.top
        return Proposal(sequence.base, sequence.pending.tokens[:length], ids[:length], probs[:length])

    # --- what the last step brought -------------------------------------------------------------------------------

    def _record_step(self, running: list[Running], entered: float) -> None:
        tokens = len(running)
        for item in running:
            sequence = self._sequences[item.request]
            for source in sequence.local:
                source.extend(item.request, item.new)
            pending = sequence.pending
            tokens += pending.offer.length if pending is not None else 0
            self._record(sequence, item)
        if self._left_at is None or not running:
            return
        seconds = entered - self._left_at
        if self._pure:
            self.stats_of_rounds.verify(seconds)
            self.controller.stepped(
                StepDone(
                    sequences=len(running),
                    tokens=tokens,
                    seconds=seconds,
                    wait_s=self._waited_s,
                    committed=sum(len(item.new) for item in running),
                    mixed=self._mixed,
                    reading=self._reading,
                    local=any(self._sequences[item.request].local for item in running),
                    local_length=self._local[0],
                    local_expected=self._local[1],
                )
            )

    def _record(self, sequence: Sequence, item: Running) -> None:
        pending, sequence.pending = sequence.pending, None
        base = item.length - len(item.new)
        if pending is not None and sequence.base != base:
            pending = None
        drafted = pending.tokens[: pending.offer.length] if pending is not None else []
        accepted = len(item.new) - 1 if drafted else 0
        relaxed = [offset for offset in item.relaxed if offset < accepted]
        sequence.trace.add(
            Round(
                base=base,
                drafted=drafted,
                accepted=accepted,
                own=item.new[accepted:],
                source=pending.label if pending is not None else "",
                wait_ms=sequence.wait_ms,
                draft_ms=pending.work_ms if pending is not None else 0.0,
                reason="" if drafted else sequence.reason,
                ready=pending.ready if pending is not None else 0,
                relaxed=relaxed,
            )
        )
        source = pending.source if pending is not None else ""
        self.stats_of_rounds.sequence(source, len(drafted), accepted, item.new, len(relaxed))
        if pending is not None:
            self.controller.verified(pending.view, pending.confidence[: len(drafted)], accepted)
        for name, view in sequence.views.items():
            if pending is None or name != pending.source:
                view.trust.rested()
        if sequence.asked:
            of_model = pending is not None and pending.source == sequence.asked
            self.controller.asked(sequence.views[sequence.asked], accepted if of_model else 0)
        sequence.asked, sequence.reason, sequence.wait_ms = "", "", 0.0

    # --- who drafts -----------------------------------------------------------------------------------------------

    def _local_candidate(self, item: Running, tokens: int) -> Candidate | None:
        """The best offer of the sources that cost no waiting."""
        best: Candidate | None = None
        if item.want <= 0:
            return None
        sequence = self._sequences[item.request]
        for source in sequence.local:
            proposal = source.propose(item.request, item.want)
            if proposal is None or not proposal.tokens:
                continue
            view = sequence.views.get(source.name)
            if view is None:
                view = sequence.views[source.name] = self.controller.view(sequence.tenant, source.name, sequence.family)
            offer = self.controller.offer(view, proposal.confidence, tokens)
            if offer.length and (best is None or offer.expected > best.offer.expected):
                best = Candidate(
                    source.name,
                    source.name,
                    view,
                    proposal.tokens,
                    proposal.confidence,
                    offer,
                    len(proposal.tokens),
                    top=proposal.top,
                )
        return best

    def _deadline(self, sequences: int) -> float:
        """A draft that comes later than a plain step took has lost against it: the next one catches up."""
        step_s = self.controller.times.predict(self.controller.lane, sequences)
        if step_s == 0.0:
            return self.faults.draft_deadline_s
        return min(self.faults.draft_deadline_s, max(2 * step_s, self.faults.draft_deadline_min_s))

    @staticmethod
    def _best(local: Candidate | None, model: Candidate | None) -> Candidate | None:
        if local is None or model is None:
            return local or model
        return local if local.offer.expected >= model.offer.expected else model

    # --- what happened --------------------------------------------------------------------------------------------

    def take_trace(self, chain_id: str) -> dict[str, Any] | None:
        """Totals and rounds of a request by its chain id; a finished one is handed out once."""
        done = self._done.pop(chain_id, None)
        if done is not None:
            return done[1].as_dict()
        for request, sequence in self._sequences.items():
            if sequence.chain_id == chain_id:
                sequence.trace.given, sequence.trace.followed = self._given.outcome(request)
                return sequence.trace.as_dict()
        return None

    def stats(self) -> dict[str, float]:
        """Counters since start or :meth:`reset_stats`, and gauges, flat."""
        result = self.stats_of_rounds.as_dict() | self._peers.stats() | self.controller.state()
        if self._models.kv is not None:
            result |= self._models.kv.stats()
        if self._models.hidden is not None:
            result |= self._models.hidden.stats()
        result["sessions"] = float(len(self._sequences))
        for source in (self._given, *self._sources):
            result |= {f"source:{source.name}:{key}": value for key, value in source.stats().items()}
        return result

    @property
    def reasons(self) -> Counter[str]:
        return self.stats_of_rounds.reasons

    def overheads_ms(self) -> list[float]:
        """Of the latest rounds, what each took beyond the draft's own work."""
        return list(self.stats_of_rounds.overhead_ms)

    def reset_stats(self) -> None:
        self.stats_of_rounds.reset()

    def forget_outputs(self) -> None:
        """Drop the outputs of earlier requests that later ones could be drafted from."""
        for source in self._sources:
            source.clear()

    def close(self) -> None:
        self._peers.close()
