"""Drafts that came with the request: followed from their start, and found again where the answer left them.

An answer that is an edit of its draft leaves it and comes back, mostly further on. Where it left is remembered for each
draft, and of the places where the last tokens occur again the one with the longest match is taken; among equals the next one
from there, or else the last one before.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from deployments.chain.given import MAX_DRAFTS, Top, problem
from deployments.target.sources.source import MIN_PATH, Limits, Proposal, trust

GIVEN = "given"
PAIR = 2  # tokens that must be found again; one is no evidence
NEAREST = 16  # places looked at on either side of where the draft was left
START = 4  # whoever gives a draft means the answer: before its first token it is trusted as a match of so many is


@dataclass(slots=True)
class _Draft:
    """One draft and where the output is in it."""

    tokens: list[int]
    top: Top | None = None  # what its writer thought of each token [len(tokens), k]
    at: int | None = 0  # its next token to come; None: the output has left it
    match: int = 0  # tokens before ``at`` in which output and draft agree
    head_start: int = START
    left: int = 0  # where the output left it last
    away: int = 0  # tokens of output since then
    followed: int = 0  # tokens of output that were the draft's
    _after: dict[tuple[int, int], list[int]] | None = None  # pair: ascending places that follow it

    @property
    def open(self) -> bool:
        """Whether it has something to propose."""
        return self.at is not None and self.at < len(self.tokens)

    def thought(self, start: int, stop: int) -> Top | None:
        """Of these tokens; None once the output has left the draft: of what comes after other words its writer was not asked."""
        if self.top is None or self.away:
            return None
        ids, probs = self.top
        return ids[start:stop], probs[start:stop]

    def advance(self, token: int) -> None:
        """One more token of output."""
        if self.at is not None and self.at < len(self.tokens) and self.tokens[self.at] == token:
            self.at, self.match, self.followed = self.at + 1, self.match + 1, self.followed + 1
            return
        if self.at is not None:
            self.left, self.away = self.at, 0
            self.at, self.match, self.head_start = None, 0, 0
        self.away += 1

    def find(self, tail: Sequence[int]) -> None:
        """Follow it again where the end of the output, ``tail``, occurs in it."""
        if len(tail) < PAIR:
            return
        places = self._places().get((tail[-2], tail[-1]), [])
        middle = bisect_left(places, self.left)
        near = places[max(0, middle - NEAREST) : middle + NEAREST]
        if near:
            match, _, _, self.at = max(
                (self._match(place, tail), place >= self.left, -abs(place - self.left), place) for place in near
            )
            self.match = match
            self.followed += min(match, self.away)

    def _places(self) -> dict[tuple[int, int], list[int]]:
        if self._after is None:
            self._after = {}
            for place in range(PAIR, len(self.tokens)):
                self._after.setdefault((self.tokens[place - 2], self.tokens[place - 1]), []).append(place)
        return self._after

    def _match(self, place: int, tail: Sequence[int]) -> int:
        match = 0
        while match < min(place, len(tail)) and self.tokens[place - 1 - match] == tail[-1 - match]:
            match += 1
        return match


@dataclass(slots=True)
class _Request:
    drafts: list[_Draft]
    tail: deque[int] = field(default_factory=deque)


class GivenSource:
    """Proposes what follows in the draft that agrees with most of the output's end. Nothing of it crosses requests."""

    name = GIVEN

    def __init__(self, vocab_size: int, limits: Limits | None = None) -> None:
        self._vocab_size = vocab_size
        self._depth = (Limits() if limits is None else limits).depth
        self._requests: dict[str, _Request] = {}

    def give(self, request: str, drafts: Sequence[Sequence[int]], tops: Sequence[Top | None] = ()) -> bool:
        """Start a request that has drafts; False where there is none to be used, and it is not started.

        Whoever takes requests checks drafts. What is wrong all the same must not reach the engine: a draft with a
        :func:`problem <deployments.chain.given.problem>` is left out. ``tops``: what the writer of each thought of its tokens.
        """
        usable = [
            _Draft(list(draft), top)
            for draft, top in zip_longest(drafts[:MAX_DRAFTS], tops[:MAX_DRAFTS])
            if draft and not problem(draft, self._vocab_size)
        ]
        if usable:
            self._requests[request] = _Request(usable, deque(maxlen=self._depth))
        return bool(usable)

    def begin(self, request: str, tenant: str, prompt: Sequence[int]) -> None:
        """The output starts anew; drafts are given with :meth:`give`."""
        state = self._requests.get(request)
        if state is not None:
            self.give(request, [draft.tokens for draft in state.drafts], [draft.top for draft in state.drafts])

    def extend(self, request: str, tokens: list[int]) -> None:
        state = self._requests.get(request)
        if state is None or not tokens:
            return
        state.tail.extend(tokens)
        tail = list(state.tail)
        for draft in state.drafts:
            for token in tokens:
                draft.advance(token)
            if draft.at is None:
                draft.find(tail)

    def propose(self, request: str, most: int) -> Proposal | None:
        """Among drafts that agree equally well, those that go on with the same token have the say; then the first."""
        state = self._requests.get(request)
        held = [draft for draft in state.drafts if draft.open] if state is not None else []
        if not held or most < 1:
            return None
        longest = max(draft.match for draft in held)
        held = [draft for draft in held if draft.match == longest]
        going_on = [draft.tokens[draft.at or 0] for draft in held]
        draft = held[going_on.index(max(going_on, key=going_on.count))]
        start = draft.at or 0
        confidence: list[float] = []
        path = 1.0
        for further in range(min(most, len(draft.tokens) - start)):
            chance = trust(draft.match + draft.head_start + further)
            path *= chance
            if path < MIN_PATH:
                break
            confidence.append(chance)
        stop = start + len(confidence)
        return Proposal(draft.tokens[start:stop], confidence, draft.match, self.name, draft.thought(start, stop))

    def finish(self, request: str) -> None:
        self._requests.pop(request, None)

    def outcome(self, request: str) -> tuple[int, int]:
        """Of the draft that the output followed most: its tokens, and how many of them the output has; (0, 0) for none."""
        state = self._requests.get(request)
        if state is None:
            return 0, 0
        draft = max(state.drafts, key=lambda draft: draft.followed)
        return len(draft.tokens), min(draft.followed, len(draft.tokens))

    def stats(self) -> dict[str, float]:
        tokens = sum(len(draft.tokens) for state in self._requests.values() for draft in state.drafts)
        return {"requests": len(self._requests), "request_tokens": tokens}

    def clear(self) -> None:
        """Nothing crosses requests."""
