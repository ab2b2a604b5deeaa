"""All sequences of a draft, who holds which KV slot, and what a commit does. No model, no clock.

Slots go to sessions first. Those left over serve whole answers, branches and spares. Prompts kept from answers, spares and
branches are taken back whenever a session needs a slot; then sessions nobody advanced within their lease go, then those of the
tenant that holds most, for one that holds less than its share.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection

from deployments.chain.protocol import (
    CONTEXT_FULL,
    ERROR,
    MAX_DRAFT_TOKENS,
    MAX_SESSIONS_PER_STEP,
    NO_SLOT,
    STALE,
    UNKNOWN_SESSION,
    Commit,
    Sampling,
)
from deployments.draft.lines import Branch, Key, Line, Session, Spare
from deployments.draft.loans import KeptPrompt, Loans
from hw.onnx.slots import SlotTable

GREEDY = Sampling(temperature=0.0, seed=0)
_MAX_REFUSED = 4 * MAX_SESSIONS_PER_STEP


def slots_of(session: Session) -> list[int]:
    """The slots of a session, its branches and its spares."""
    return [session.slot, *(branch.slot for branch in session.branches), *(spare.slot for spare in session.spares)]


class SessionStore:
    """Sessions by target and name, one KV slot each, their branches, and the sequences this draft will not draft for.

    ``hint_vocab``: tokens of other sources are taken over below this id; 0 takes none.
    """

    def __init__(self, slots: int, context: int, vocab_size: int, lease_s: float, hint_vocab: int = 0) -> None:
        self.table = SlotTable(slots)
        self.context = context
        self.vocab_size = vocab_size
        self.lease_s = lease_s
        self.sessions: dict[Key, Session] = {}
        self.loans = Loans()
        self.evicted = 0
        self.preempted = 0
        self.hinted = 0  # tokens taken over from other sources
        self.read: dict[str, int] = {}  # by tenant with sessions: prompt tokens read for it in idle time
        self._hint_vocab = hint_vocab
        self._held: dict[str, int] = {}  # sessions by tenant
        # (reason, epoch, when): answers for sequences refused for good, so that they are not sent whole again and again
        self._refused: OrderedDict[Key, tuple[str, int, float]] = OrderedDict()

    def apply(self, target: str, commit: Commit, now: float) -> tuple[Session | None, str]:
        """Bring a session in step with a commit: (session, "") or (None, reason).

        A reason of ``STALE`` or ``UNKNOWN_SESSION`` leaves what is held as it was; the others free the slot.
        """
        key = (target, commit.session)
        base = commit.length - len(commit.tokens)
        if base < 0 or commit.length < 1 or commit.want < 0:
            return None, self._refuse(key, commit.epoch, ERROR, now)
        held = self.sessions.get(key)
        if held is None:
            return self._open(key, commit, now)
        if commit.epoch < held.epoch or (commit.epoch == held.epoch and commit.length < len(held.tokens)):
            return None, STALE
        if not commit.opens and (commit.epoch > held.epoch or not self._continues(held, commit, base)):
            return None, UNKNOWN_SESSION
        reason = self._unusable(commit)
        if reason:
            return None, self._refuse(key, commit.epoch, reason, now)
        if commit.sampling is not None and commit.sampling != held.sampling:
            held.forget_guess()  # it was drawn in another way
            held.sampling = commit.sampling
        if commit.opens:
            held.replace(commit.tokens)
        else:
            held.extend(commit.tokens[len(held.tokens) - base :])
        held.epoch, held.last_used = commit.epoch, now
        self._wish(held, commit)
        return held, ""

    def _wish(self, session: Session, commit: Commit) -> None:
        """Take note of what the target wants, and of what it verifies meanwhile."""
        session.want = min(commit.want, MAX_DRAFT_TOKENS)
        session.ready = min(len(session.guess), session.want)
        session.sent = session.verifying = 0
        session.announced = commit.opens and not commit.want
        if commit.verifying and self._hint_vocab:
            room = min(MAX_DRAFT_TOKENS, self.context - len(session.tokens))
            hints = []
            for token in commit.verifying[:room]:
                if not 0 <= token < self._hint_vocab:
                    break
                hints.append(token)
            self.hinted += session.hint(hints)
            session.sent = session.verifying = len(hints)
        session.depth = session.want or session.depth or session.verifying

    def close(self, key: Key) -> None:
        """End a session; nothing happens when it is not held."""
        self._refused.pop(key, None)
        held = self.sessions.pop(key, None)
        if held is None:
            return
        held.live = False
        self.table.give(held.slot)
        self.give_lent(held)
        if self._held[held.tenant] == 1:
            del self._held[held.tenant], self.read[held.tenant]
        else:
            self._held[held.tenant] -= 1

    def disconnect(self, target: str) -> None:
        """End every session of a target."""
        for key in [key for key in (*self.sessions, *self._refused) if key[0] == target]:
            self.close(key)

    # --- branches and their slots ---------------------------------------------------------------------------------

    @property
    def branch_slots(self) -> int:
        """How many branches could start now."""
        return self.table.free + len(self.loans.kept) + sum(len(session.spares) for session in self.sessions.values())

    def lend(self, session: Session, distance: int = 0) -> Spare | None:
        """Take a slot for a branch of a session: a spare of its own, a free one, or another's spare.

        A spare saves copying what it holds. A slot further away costs the steps of the branch rows in between: as much as the
        copy of ``distance`` positions for each.
        """
        free = min(set(range(self.table.slots)) - self.table.taken, default=None)
        own = min(session.spares, key=lambda spare: distance * spare.slot - spare.valid, default=None)
        if own is not None and (free is None or distance * (own.slot - free) <= own.valid):
            session.spares.remove(own)
            return own
        if free is None and self._free_kept():
            (free,) = set(range(self.table.slots)) - self.table.taken
        if free is not None:
            self.table.claim(free)
            return Spare(free)
        for other in self.sessions.values():
            if other.spares:
                return Spare(other.spares.pop().slot)
        return None

    def discard(self, branch: Branch) -> None:
        """Give a branch up and free its slot."""
        branch.session.retire(branch)
        self.table.give(branch.session.spares.pop().slot)

    def give_lent(self, session: Session) -> None:
        """Free every slot of a session but its own."""
        for branch in list(session.branches):
            session.retire(branch)
        for spare in session.spares:
            self.table.give(spare.slot)
        session.spares.clear()

    def tidy(self, now: float, unused_s: float) -> None:
        """Free slots between those that steps need: sessions past their lease, all that a session holds besides its own when
        nobody wants drafts of it or advanced it for ``unused_s``, all spares but the one that saves most copying, and prompts
        kept for a lease's time.

        A target that was lost or cut off closes no session. A draft that kept those would never be without work.
        """
        while (expired := self._expired(now)) is not None:
            self.close(expired.key)
            self.evicted += 1
        for slot in self.loans.expired(now - self.lease_s) if self.loans.kept else ():
            self.table.give(slot)
        for session in self.sessions.values():
            if not session.active or now - session.last_used > unused_s:
                self.give_lent(session)
            elif len(session.spares) > 1:
                session.spares.sort(key=lambda spare: spare.valid, reverse=True)
                for spare in session.spares[1:]:
                    self.table.give(spare.slot)
                del session.spares[1:]

    def relocate(self, line: Line, target: int) -> None:
        """Give a line a free slot or that of a spare instead of its own, once its KV is there.

        A spare of the same session takes the line's slot in exchange, with what the line left there of the main line.
        """
        left, line.slot = line.slot, target
        owner = line.session if isinstance(line, Branch) else line
        for session in self.sessions.values():
            for spare in session.spares:
                if spare.slot == target and session is owner:
                    spare.slot, spare.valid = left, line.start if isinstance(line, Branch) else line.computed
                    return
                if spare.slot == target:
                    session.spares.remove(spare)
                    self.table.give(left)
                    return
        self.table.claim(target)
        self.table.give(left)

    def rebuild(self, without: Collection[Key]) -> None:
        """Forget some sessions and make the books anew from the others."""
        for key in without:
            self.sessions.pop(key).live = False
        self.table = SlotTable(self.table.slots)
        kept = {slot for session in self.sessions.values() for slot in slots_of(session)}
        for slot in kept.union(self.loans.slots()):
            self.table.claim(slot)
        self._held = dict(Counter(session.tenant for session in self.sessions.values()))
        self.read = {tenant: self.read.get(tenant, 0) for tenant in self._held}
        for key in self.sessions:
            self._refused.pop(key, None)

    # --- whole answers --------------------------------------------------------------------------------------------

    def borrow(self) -> int | None:
        """A slot to write an answer in: the highest free one, away from the sessions; else that of a kept prompt, a spare or a
        branch. None where sessions and other answers have them all."""
        if not self.table.free and not self._free_kept() and not self._free_lent():
            return None
        slot = max(set(range(self.table.slots)) - self.table.taken)
        self.table.claim(slot)
        self.loans.writing.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a borrowed slot."""
        self.loans.writing.remove(slot)
        self.table.give(slot)

    def keep(self, prompt: KeptPrompt, most: int) -> None:
        """Keep the prompt in a borrowed slot for another request, with at most ``most`` others, until the slot is needed."""
        for slot in self.loans.keep(prompt, most):
            self.table.give(slot)

    def _free_kept(self) -> bool:
        """Free the slot of the prompt kept longest; False when there is none."""
        if not self.loans.kept:
            return False
        self.table.give(self.loans.kept.pop(0).slot)
        return True

    # --- tenants --------------------------------------------------------------------------------------------------

    def served(self, tenant: str, tokens: int) -> None:
        """Account for prompt tokens read in idle time."""
        if tenant in self.read:
            self.read[tenant] += tokens

    def check(self) -> None:
        """Assert that lines and slots belong to each other one to one and that every session is well formed."""
        slots, tenants = [], dict.fromkeys(self._held, 0)
        for key, session in self.sessions.items():
            session.check()
            assert session.key == key
            assert key not in self._refused
            assert session.total <= self.context, session
            assert all(branch.total <= self.context for branch in session.branches)
            slots += slots_of(session)
            tenants[session.tenant] += 1
        slots += self.loans.slots()
        assert len(set(slots)) == len(slots), slots
        assert set(slots) == self.table.taken, (slots, self.table.taken)
        assert self.table.free + len(slots) == self.table.slots
        assert len(self._refused) <= _MAX_REFUSED
        assert tenants == self._held, (tenants, self._held)
        assert self.read.keys() == self._held.keys()

    # --- opening --------------------------------------------------------------------------------------------------

    def _open(self, key: Key, commit: Commit, now: float) -> tuple[Session | None, str]:
        refused = self._refused.get(key)
        if refused is not None:
            reason, epoch, when = refused
            if now - when <= self.lease_s and not (commit.opens and commit.epoch > epoch):
                return None, self._refuse(key, epoch, reason, now)
            del self._refused[key]
        if not commit.opens:
            # Asking a full draft's targets for whole sequences would be asking them for nothing.
            room = self.branch_slots or self._lowest_lent() is not None or self._expired(now) is not None
            return None, UNKNOWN_SESSION if room else NO_SLOT
        reason = self._unusable(commit)
        if reason:
            return None, self._refuse(key, commit.epoch, reason, now)
        slot = self._take(commit.tenant, now)
        if slot is None:
            return None, NO_SLOT
        session = Session(
            key=key,
            slot=slot,
            epoch=commit.epoch,
            sampling=commit.sampling or GREEDY,
            tokens=list(commit.tokens),
            last_used=now,
            tenant=commit.tenant,
        )
        self.sessions[key] = session
        self._held[session.tenant] = self._held.get(session.tenant, 0) + 1
        # a newcomer has been served as much as the least served: it goes first, but not for long
        self.read.setdefault(session.tenant, min(self.read.values(), default=0))
        self._wish(session, commit)
        return session, ""

    def _continues(self, held: Session, commit: Commit, base: int) -> bool:
        overlap = len(held.tokens) - base
        return overlap >= 0 and held.tokens[base:] == commit.tokens[:overlap]

    def _unusable(self, commit: Commit) -> str:
        if commit.length + min(commit.want, MAX_DRAFT_TOKENS) > self.context:
            return CONTEXT_FULL
        if commit.tokens and not (min(commit.tokens) >= 0 and max(commit.tokens) < self.vocab_size):
            return ERROR  # no embedding for such a token
        return ""

    def _refuse(self, key: Key, epoch: int, reason: str, now: float) -> str:
        self.close(key)
        self._refused[key] = (reason, epoch, now)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        return reason

    def _take(self, tenant: str, now: float) -> int | None:
        """The slot for a new session: the lowest that no session needs, so that sessions lie side by side."""
        if not self.table.free and not self._free_kept() and not self._free_lent():
            expired = self._expired(now)
            crowded = self._crowded(tenant) if expired is None else None
            if expired is not None:
                self.close(expired.key)
                self.evicted += 1
            elif crowded is not None:
                self.close(crowded.key)
                self.preempted += 1
            else:
                return None
        return self.table.take()

    def _free_lent(self) -> bool:
        """Free the lowest slot of a spare, or else of a branch; False when there is neither."""
        lent = self._lowest_lent()
        if isinstance(lent, Branch):
            self.discard(lent)
        elif lent is not None:
            owner, spare = lent
            owner.spares.remove(spare)
            self.table.give(spare.slot)
        return lent is not None

    def _lowest_lent(self) -> Branch | tuple[Session, Spare] | None:
        sessions = self.sessions.values()
        spares = ((session, spare) for session in sessions for spare in session.spares)
        lowest = min(spares, key=lambda entry: entry[1].slot, default=None)
        if lowest is not None:
            return lowest
        branches = (branch for session in sessions for branch in session.branches)
        return min(branches, key=lambda branch: branch.slot, default=None)

    def _crowded(self, tenant: str) -> Session | None:
        """The session to close for a tenant that holds less than its share: of who holds most, the longest unused.

        Never where it would only turn the tables: then two tenants would close each other's sessions for ever.
        """
        if not self._held:  # all slots are written in
            return None
        held = self._held.get(tenant, 0)
        active = len(self._held) + (tenant not in self._held)
        most = max(self._held, key=self._held.__getitem__)
        if held >= self.table.slots / active or self._held[most] <= held + 1:
            return None
        return min((s for s in self.sessions.values() if s.tenant == most), key=lambda session: session.last_used)

    def _expired(self, now: float) -> Session | None:
        """The session longest unused, if that is longer than its lease."""
        oldest = min(self.sessions.values(), key=lambda session: session.last_used, default=None)
        return oldest if oldest is not None and now - oldest.last_used > self.lease_s else None
