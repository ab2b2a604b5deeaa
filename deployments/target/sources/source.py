"""What a source without weights is: it guesses the next tokens of a request from tokens already seen.

Sources run inside the target's proposer, between two engine steps, in one thread. They cost microseconds, never wait
and never raise for token ids from 0 to 2**31 - 1; a request nobody began is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import mul
from typing import Protocol

from deployments.chain.given import Top

MIN_PATH = 0.05  # a proposal ends where the probability that all of it holds falls below this


@dataclass(frozen=True, slots=True)
class Proposal:
    """A guess at what follows the committed tokens of one request."""

    tokens: list[int]  # [N], N >= 1
    confidence: list[float]  # [N], each in (0, 1]: the target agrees with this token, given it did with all before
    match: int  # tokens at the end of the context that were found again
    source: str
    top: Top | None = None  # what its writer thought of each token [N, k]; None: it does not say

    @property
    def expected(self) -> float:
        """Tokens of this proposal the target will accept, by its own confidence."""
        return sum(accumulate(self.confidence, mul), 0.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what a source keeps in memory. Raises ValueError for one below 1."""

    depth: int = 64  # longest match, tokens
    request_tokens: int = 32_768  # of a longer prompt only so many of its last tokens are searched
    outputs: int = 256  # finished outputs remembered for each tenant
    output_tokens: int = 4_096  # of one output at most so many of its last tokens are remembered
    shared_bytes: int = 128 * 2**20  # all tenants' outputs together, as estimated

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name} must be at least 1, got {getattr(self, limit.name)}")


class Source(Protocol):
    """Guesses from committed tokens. Outputs cross requests within one tenant only; tenant "" shares nothing."""

    name: str

    def begin(self, request: str, tenant: str, prompt: Sequence[int]) -> None:
        """Start a request; one that is already running starts anew and its output so far is forgotten."""

    def extend(self, request: str, tokens: list[int]) -> None:
        """Append committed tokens, in order."""

    def propose(self, request: str, most: int) -> Proposal | None:
        """Return up to ``most`` tokens that may follow all committed ones; None where nothing was found."""

    def finish(self, request: str) -> None:
        """End a request; its tenant's later requests may be drafted from its output."""

    def stats(self) -> dict[str, float]:
        """Sizes now and counts since the start, by name."""

    def clear(self) -> None:
        """Forget all outputs that cross requests. Running requests go on."""


def trust(match: int) -> float:
    """Chance that text which agreed in ``match`` tokens agrees in the next one too: match / (match + 1).

    A single earlier occurrence always claims certainty. This takes from it what a short match cannot know: one common
    token found again says little about the next (0.5), a run of twenty is hardly an accident (0.95). On source code and
    prose, tokens given 0.95 / 0.85 / 0.66 / 0.35 this way came true in 0.92 / 0.75 / 0.56 / 0.20 of cases.
    """
    return match / (match + 1)


def best(*proposals: Proposal | None) -> Proposal | None:
    """Return the proposal with the most accepted tokens expected; the first among equals."""
    return max((proposal for proposal in proposals if proposal is not None), key=lambda p: p.expected, default=None)
