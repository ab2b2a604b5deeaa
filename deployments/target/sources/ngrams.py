"""An incremental index of n-grams over a stream of tokens: where does what we just saw occur, and what followed?"""

from collections.abc import Iterable, Sequence

from deployments.target.sources.source import MIN_PATH, Proposal, trust

SIZES = (4, 3, 2)  # n-grams looked up, longest first; a match of one token is no evidence
SEPARATOR = -1  # between texts in one stream; no match and no proposal crosses it
BYTES_PER_TOKEN = 600.0  # what CPython holds for one indexed token where every n-gram is new; 280 for text


class NgramIndex:
    """Tokens with the last ``keep`` occurrences of each of their n-grams. Appending costs O(1) a token.

    An occurrence is kept as the position of the token that follows it, and entered when that token is known: the end
    of the stream never matches itself. Positions count from the start of the stream, whatever was dropped since.
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._ends: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._tokens: list[int] = []  # begins with those that are dropped but not yet removed
        self._base = 0  # position of _tokens[0]
        self._first = 0  # position of the oldest token that is not dropped

    def __len__(self) -> int:
        """Tokens held, separators included."""
        return self._base + len(self._tokens) - self._first

    @property
    def grams(self) -> int:
        """Different n-grams held."""
        return len(self._ends)

    def tail(self, most: int) -> list[int]:
        """Return the last ``most`` tokens, fewer if there are not as many."""
        return self._tokens[max(self._first - self._base, len(self._tokens) - most) :]

    def append(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            if token != SEPARATOR:
                for key in self._before(len(self._tokens)):
                    self._ends[key] = (*self._ends.get(key, ()), self._base + len(self._tokens))[-self._keep :]
            self._tokens.append(token)

    def drop(self, count: int) -> None:
        """Forget the ``count`` oldest tokens, if any, and all occurrences that contain one of them."""
        if count <= 0:
            return
        last = min(self._first + count, self._base + len(self._tokens))
        # An n-gram that begins with a dropped token is followed by a token up to SIZES[0] further on.
        stop = min(last + SIZES[0], self._base + len(self._tokens))
        for end in range(self._first, stop):
            for key in self._before(end - self._base):
                if end - len(key) < last:
                    self._forget(key, end)
        self._first = last
        if 2 * (self._first - self._base) > len(self._tokens):
            del self._tokens[: self._first - self._base]
            self._base = self._first

    def propose(self, context: Sequence[int], most: int, source: str, own: bool) -> Proposal | None:
        """Return up to ``most`` tokens that followed the occurrence with the longest match, the latest among equals.

        ``context`` are the tokens to match, ``own`` says that they are the end of this very stream: a proposal that
        reaches it goes on into itself, as periodic text does. Other recent occurrences vote on every token, weighted
        by their match, as long as they agreed so far; that share times the match's trust is the confidence.
        """
        voters = self._occurrences(context)
        if not voters:
            return None
        end, match = max(voters, key=lambda voter: (voter[1], voter[0]))
        tokens: list[int] = []
        confidence: list[float] = []
        path = 1.0
        while len(tokens) < most:
            token = self._following(end, tokens, own)
            if token is None:
                break
            votes = [(voter, self._following(voter[0], tokens, own)) for voter in voters]
            total = sum(voter[1] for voter, vote in votes if vote is not None)
            voters = [voter for voter, vote in votes if vote == token]
            chance = sum(voter[1] for voter in voters) / total * trust(match + len(tokens))
            path *= chance
            if path < MIN_PATH:
                break
            tokens.append(token)
            confidence.append(chance)
        return Proposal(tokens, confidence, match, source) if tokens else None

    def _before(self, index: int) -> list[tuple[int, ...]]:
        """N-grams that end just before an index into ``_tokens``, none with a separator or a dropped token."""
        window = self._tokens[max(self._first - self._base, index - SIZES[0], 0) : index]
        if SEPARATOR in window:
            window = window[len(window) - window[::-1].index(SEPARATOR) :]
        return [tuple(window[-size:]) for size in SIZES if len(window) >= size]

    def _forget(self, key: tuple[int, ...], end: int) -> None:
        ends = tuple(known for known in self._ends.get(key, ()) if known != end)
        if ends:
            self._ends[key] = ends
        else:
            self._ends.pop(key, None)

    def _occurrences(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """Recent occurrences of the longest n-gram known, as (position that follows, tokens that match)."""
        for size in SIZES:
            ends = self._ends.get(tuple(context[-size:])) if len(context) >= size else None
            if ends:
                return [(end, self._match(end, context)) for end in ends]
        return []

    def _match(self, end: int, context: Sequence[int]) -> int:
        stop = end - self._base
        earlier = self._tokens[max(self._first - self._base, stop - len(context)) : stop]
        match = 0
        for ours, theirs in zip(reversed(context), reversed(earlier), strict=False):
            if ours != theirs:
                break
            match += 1
        return match

    def _following(self, end: int, proposed: list[int], own: bool) -> int | None:
        """Token after an occurrence and as many further tokens as are proposed; None where its text ends."""
        index = end - self._base + len(proposed)
        if index < len(self._tokens):
            token = self._tokens[index]
            return None if token == SEPARATOR else token
        return proposed[index - len(self._tokens)] if own else None
