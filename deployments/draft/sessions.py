"""The state of every sequence a draft follows, and what a commit does to it. No model, no clock.

A session holds the committed ``tokens``, the ``guess`` drafted beyond them, and ``computed``: how many leading positions of
both together have valid KV. The last token is never computed, because only computing a token tells the next one; so
``computed < len(tokens) + len(guess)`` always, and a guess exists only when all that is committed is computed. A commit that
agrees with the guess keeps its KV and what was guessed beyond it; one that does not rolls back to where they part.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

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
from deployments.draft.choose import Choice
from hw.onnx.slots import SlotTable

Key = tuple[str, str]  # target, session
GREEDY = Sampling(temperature=0.0, seed=0)
_MAX_REFUSED = 4 * MAX_SESSIONS_PER_STEP


@dataclass(slots=True, eq=False)
class Session:
    """One sequence at this draft."""

    key: Key
    slot: int
    epoch: int
    sampling: Sampling
    tokens: list[int]
    last_used: float
    want: int = 0
    guess: list[Choice] = field(default_factory=list)
    computed: int = 0
    tried: int = 0  # guessed tokens the last commit put to the test
    agreed: int = 0  # and how many of them were right
    moved: bool = True  # its prompt was read on since the last step
    live: bool = True

    @property
    def total(self) -> int:
        """Positions known: committed and guessed."""
        return len(self.tokens) + len(self.guess)

    @property
    def pending(self) -> int:
        """Positions to compute before the next guess; at least 1."""
        return self.total - self.computed

    def next_token(self) -> int:
        """The first token without KV."""
        beyond = self.computed - len(self.tokens)
        return self.tokens[self.computed] if beyond < 0 else self.guess[beyond].token

    def extend(self, tokens: list[int]) -> None:
        """Append committed tokens; sets :attr:`tried` and :attr:`agreed`."""
        self.tried = min(len(tokens), len(self.guess))
        agreed = 0
        while agreed < self.tried and self.guess[agreed].token == tokens[agreed]:
            agreed += 1
        self.agreed = agreed
        if agreed == len(tokens):
            del self.guess[:agreed]
        else:
            self.guess.clear()
            self.computed = min(self.computed, len(self.tokens) + agreed)
        self.tokens.extend(tokens)

    def replace(self, tokens: list[int]) -> None:
        """Take ``tokens`` as all that is committed, keeping the KV of what they share with what was known."""
        shared, known = 0, len(self.tokens)
        while shared < min(len(tokens), known) and self.tokens[shared] == tokens[shared]:
            shared += 1
        if shared == known:
            self.extend(tokens[known:])
            return
        self.tried = self.agreed = 0
        self.guess.clear()
        self.computed = min(self.computed, shared, len(tokens) - 1)
        self.tokens = list(tokens)

    def forget_guess(self) -> None:
        """Drop what was guessed; the last committed token is computed again to guess anew."""
        self.guess.clear()
        self.computed = min(self.computed, len(self.tokens) - 1)


class SessionStore:
    """All sessions of a draft, one KV slot each, and the sequences it will not draft for."""

    def __init__(self, slots: int, context: int, vocab_size: int, lease_s: float) -> None:
        self.table = SlotTable(slots)
        self.context = context
        self.vocab_size = vocab_size
        self.lease_s = lease_s
        self.sessions: dict[Key, Session] = {}
        self.evicted = 0
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
        held.epoch, held.want, held.last_used = commit.epoch, min(commit.want, MAX_DRAFT_TOKENS), now
        return held, ""

    def close(self, key: Key) -> None:
        """End a session; nothing happens when it is not held."""
        self._refused.pop(key, None)
        held = self.sessions.pop(key, None)
        if held is not None:
            held.live = False
            self.table.give(held.slot)

    def disconnect(self, target: str) -> None:
        """End every session of a target."""
        for key in [key for key in (*self.sessions, *self._refused) if key[0] == target]:
            self.close(key)

    def relocate(self, session: Session) -> None:
        """Give a session the lowest free slot instead of its own, once its KV is there."""
        slot = self.table.take()
        assert slot is not None
        self.table.give(session.slot)
        session.slot = slot

    def check(self) -> None:
        """Assert that sessions and slots belong to each other one to one and that every session is well formed."""
        slots = [session.slot for session in self.sessions.values()]
        assert len(set(slots)) == len(slots), slots
        assert set(slots) == self.table.taken, (slots, self.table.taken)
        assert self.table.free + len(slots) == self.table.slots
        assert len(self._refused) <= _MAX_REFUSED
        for key, session in self.sessions.items():
            assert session.key == key
            assert session.live
            assert key not in self._refused
            assert 0 <= session.computed < session.total <= self.context, session
            assert not session.guess or session.computed == session.total - 1, session

    def _open(self, key: Key, commit: Commit, now: float) -> tuple[Session | None, str]:
        refused = self._refused.get(key)
        if refused is not None:
            reason, epoch, when = refused
            if now - when <= self.lease_s and not (commit.opens and commit.epoch > epoch):
                return None, self._refuse(key, epoch, reason, now)
            del self._refused[key]
        if not commit.opens:
            # Asking a full draft's targets for whole sequences would be asking them for nothing.
            room = self.table.free or self._expired(now) is not None
            return None, UNKNOWN_SESSION if room else NO_SLOT
        reason = self._unusable(commit)
        if reason:
            return None, self._refuse(key, commit.epoch, reason, now)
        slot = self._take(now)
        if slot is None:
            return None, NO_SLOT
        session = Session(
            key=key,
            slot=slot,
            epoch=commit.epoch,
            sampling=commit.sampling or GREEDY,
            tokens=list(commit.tokens),
            last_used=now,
            want=min(commit.want, MAX_DRAFT_TOKENS),
        )
        self.sessions[key] = session
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

    def _take(self, now: float) -> int | None:
        slot = self.table.take()
        if slot is None:
            expired = self._expired(now)
            if expired is None:
                return None
            self.close(expired.key)
            self.evicted += 1
            slot = self.table.take()
        return slot

    def _expired(self, now: float) -> Session | None:
        """The session longest unused, if that is longer than its lease."""
        oldest = min(self.sessions.values(), key=lambda session: session.last_used, default=None)
        return oldest if oldest is not None and now - oldest.last_used > self.lease_s else None
