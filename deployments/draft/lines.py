"""A sequence at a draft: its main line, the branches off it, and what a commit does to them. No model, no clock, no slots given.

The main line is the committed ``tokens`` and the linear ``guess`` beyond them. ``computed`` counts its leading positions with
valid KV. Only computing a token tells the next one, so the last token is never computed and ``computed < total`` always.
A branch leaves the main line at position ``start`` with a token of its own, in a KV slot of its own: it is the draft for the
outcome that the target agrees up to there and then chooses that token. All positions are absolute, so that commits shift
nothing. A slot that has lost its branch is a spare; it still holds a part of the main line.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.chain.protocol import Sampling
from deployments.draft.choose import Choice, hinted

Key = tuple[str, str]  # target, session

# What a commit showed about the guess it tested.
UNTESTED = ""
MAIN_LINE = "main"  # all its tokens were the main line's
BRANCH = "branch"  # it left the main line where a branch does, with that branch's token
MISS = "miss"


@dataclass(slots=True, eq=False)
class Spare:
    """A slot without a branch. ``valid``: how many leading positions hold the KV of the session's main line."""

    slot: int
    valid: int = 0


@dataclass(slots=True, eq=False)
class Branch:
    """An alternative to the main line from position ``start`` on: ``token`` and the ``guess`` behind it."""

    session: Session
    start: int
    token: int
    rank: int  # place of the token among the runner-ups of the main line's choice
    slot: int
    computed: int
    guess: list[Choice] = field(default_factory=list)
    live: bool = True

    @property
    def total(self) -> int:
        """Positions known: those of the main line before ``start``, the own token, the guess."""
        return self.start + 1 + len(self.guess)

    @property
    def pending(self) -> int:
        """Positions to compute before the next guess; at least 1."""
        return self.total - self.computed

    @property
    def sampling(self) -> Sampling:
        """How the target samples."""
        return self.session.sampling

    def next_token(self) -> int:
        """The first token without KV."""
        beyond = self.computed - self.start
        return self.guess[beyond - 1].token if beyond else self.token

    def history(self) -> list[int]:
        """All its tokens from position 0 on, ``[total]``."""
        return [*self.session.history()[: self.start], self.token, *(choice.token for choice in self.guess)]


@dataclass(slots=True, eq=False)
class Session:
    """One sequence at this draft."""

    key: Key
    slot: int
    epoch: int
    sampling: Sampling
    tokens: list[int]
    last_used: float
    tenant: str = ""
    want: int = 0
    depth: int = 0  # tokens of use after a commit: what was wanted last
    verifying: int = 0  # tokens of another source that the target is verifying
    sent: int = 0  # tokens of the guess that the target is verifying
    ready: int = 0  # tokens that waited when the last commit came
    announced: bool = False  # only its prompt is known so far, nothing was asked for
    guess: list[Choice] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    spares: list[Spare] = field(default_factory=list)
    computed: int = 0
    outcome: str = UNTESTED  # of the last commit
    tested: list[Choice] = field(default_factory=list)  # the guessed tokens it tested, up to the first wrong one
    agreed: int = 0  # how many of them were right
    own: int = -1  # the target's token where the main line was wrong
    moved: bool = True  # it was read on since the last step
    live: bool = True

    @property
    def total(self) -> int:
        """Positions known: committed and guessed."""
        return len(self.tokens) + len(self.guess)

    @property
    def pending(self) -> int:
        """Positions to compute before the next guess; at least 1."""
        return self.total - self.computed

    @property
    def behind(self) -> int:
        """Committed tokens without KV; negative where guessed ones have it too."""
        return len(self.tokens) - self.computed

    @property
    def active(self) -> bool:
        """Whether the target uses drafts for it now."""
        return self.want > 0 or self.verifying > 0

    def next_token(self) -> int:
        """The first token without KV."""
        beyond = self.computed - len(self.tokens)
        return self.tokens[self.computed] if beyond < 0 else self.guess[beyond].token

    def unread(self, count: int) -> list[int]:
        """The next ``count`` tokens without KV, at most :attr:`pending`."""
        first, known = self.computed, len(self.tokens)
        found = self.tokens[first : first + count]
        skip = max(0, first - known)
        return found + [choice.token for choice in self.guess[skip : skip + count - len(found)]]

    def history(self) -> list[int]:
        """All its tokens from position 0 on, ``[total]``."""
        return self.tokens + [choice.token for choice in self.guess]

    def likelihood(self) -> float:
        """Probability that the target agrees with the whole guess."""
        product = 1.0
        for choice in self.guess:
            product *= choice.confidence
        return product

    # --- what the target says -------------------------------------------------------------------------------------

    def extend(self, tokens: list[int]) -> None:
        """Append committed tokens. Where they leave the main line on a branch, that becomes the main line."""
        base = len(self.tokens)
        agreed = self._agreeing(tokens)
        tried = min(len(tokens), len(self.guess))
        self._record(self.guess[: min(tried, agreed + 1)], agreed, tokens[agreed] if agreed < tried else -1)
        if tokens and self.guess:
            self.outcome = MAIN_LINE if agreed == len(tokens) else MISS
        if agreed < tried:
            branch = self._branch(base + agreed, tokens[agreed])
            if branch is not None:
                self.promote(branch)
                self.outcome = BRANCH
                agreed = self._agreeing(tokens)
        if agreed == len(tokens):
            del self.guess[:agreed]
        else:
            self.guess.clear()
            self._cut(base + agreed)
        self.tokens.extend(tokens)
        self._drop_branches(len(self.tokens), self.total - 1)

    def replace(self, tokens: list[int]) -> None:
        """Take ``tokens`` as all that is committed, keeping the KV of what they share with what was known."""
        shared, known = 0, len(self.tokens)
        while shared < min(len(tokens), known) and self.tokens[shared] == tokens[shared]:
            shared += 1
        if shared == known:
            self.extend(tokens[known:])
            return
        self._record([], 0, -1)
        self.guess.clear()
        self._drop_branches(0, -1)
        self._cut(min(shared, len(tokens) - 1))
        self.tokens = list(tokens)

    def hint(self, tokens: list[int]) -> int:
        """Guess ``tokens``, which another source proposed; returns how many of them the guess did not begin with already."""
        same = self._agreeing(tokens)
        if same < min(len(tokens), len(self.guess)):
            branch = self._branch(len(self.tokens) + same, tokens[same])
            if branch is not None:
                self.promote(branch)
                same = self._agreeing(tokens)
        new = tokens[same:]
        if new:
            del self.guess[same:]
            self.guess.extend(hinted(token) for token in new)
            self._cut(len(self.tokens) + same)
        return len(new)

    def received(self, stop: int) -> None:
        """KV of committed positions up to ``stop`` (exclusive) came from elsewhere and is in the slot."""
        assert stop < len(self.tokens)
        self.computed = max(self.computed, stop)

    def lost(self, start: int) -> None:
        """What the slot holds from ``start`` on is worthless."""
        self._cut(start)

    def informed(self, start: int) -> None:
        """Positions from ``start`` on would be computed otherwise now that more is known of those before.

        The own guess goes, and branches off it; tokens of another source, which are being verified, stay.
        """
        del self.guess[self.verifying :]
        self.ready = min(self.ready, len(self.guess))
        self._drop_branches(0, -1)
        self._cut(start)

    def forget_guess(self) -> None:
        """Drop what was guessed; the last committed token is computed again to guess anew."""
        self.guess.clear()
        self._drop_branches(0, -1)
        self._cut(len(self.tokens) - 1)

    # --- branches -------------------------------------------------------------------------------------------------

    def promote(self, branch: Branch) -> None:
        """Make a branch the main line from its start on; the slot of the main line becomes a spare."""
        at = branch.start - len(self.tokens)
        replaced = self.guess[at]
        alternative = Choice(branch.token, replaced.ids, replaced.probs)
        self.branches.remove(branch)
        branch.live = False
        self.guess[at:] = [alternative, *branch.guess]
        self.spares.append(Spare(self.slot, min(self.computed, branch.start)))
        self.slot, self.computed = branch.slot, branch.computed
        self._drop_branches(0, branch.start)
        for spare in self.spares:
            spare.valid = min(spare.valid, branch.start)

    def retire(self, branch: Branch) -> None:
        """Give a branch up; its slot becomes a spare."""
        self.branches.remove(branch)
        branch.live = False
        self.spares.append(Spare(branch.slot, branch.start))

    def _branch(self, start: int, token: int) -> Branch | None:
        for branch in self.branches:
            if branch.start == start and branch.token == token:
                return branch
        return None

    def _agreeing(self, tokens: list[int]) -> int:
        agreed = 0
        for choice, token in zip(self.guess, tokens, strict=False):
            if choice.token != token:
                break
            agreed += 1
        return agreed

    def _record(self, tested: list[Choice], agreed: int, own: int) -> None:
        self.tested, self.agreed, self.own, self.outcome = tested, agreed, own, UNTESTED

    def _drop_branches(self, first: int, last: int) -> None:
        """Retire the branches that start before ``first`` or after ``last``."""
        if self.branches:
            for branch in [branch for branch in self.branches if not first <= branch.start <= last]:
                self.retire(branch)

    def _cut(self, position: int) -> None:
        """The main line has other tokens from ``position`` on, or none: what was computed of it ends there."""
        self.computed = min(self.computed, position)
        self._drop_branches(0, position)
        for spare in self.spares:
            spare.valid = min(spare.valid, self.computed)

    def check(self) -> None:
        """Assert that it is well formed."""
        assert self.live
        assert 0 <= self.computed < self.total, self
        for spare in self.spares:
            assert 0 <= spare.valid <= self.computed, (spare, self.computed)
        seen = set()
        for branch in self.branches:
            assert branch.live
            assert branch.session is self
            assert len(self.tokens) <= branch.start < self.total, branch.start
            assert branch.start <= self.computed
            assert branch.start <= branch.computed < branch.total
            assert branch.token != self.guess[branch.start - len(self.tokens)].token
            assert (branch.start, branch.token) not in seen
            seen.add((branch.start, branch.token))


Line = Session | Branch
