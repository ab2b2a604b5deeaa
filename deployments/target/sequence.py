"""One sequence of the target as the chain sees it: what is being verified, by whom it was drafted, how it goes."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance.family import LOSSLESS
from deployments.chain.controller import LocalPace, Offer, View
from deployments.chain.protocol import MAX_DRAFT_TOKENS, Sampling
from deployments.chain.trace import Trace
from deployments.target.sources import Source


@dataclass(frozen=True, slots=True)
class Running:
    """One running sequence after an engine step."""

    request: str
    new: list[int]  # tokens this step committed
    length: int  # committed tokens, prompt included
    tokens: Callable[[int, int], list[int]]  # tokens(start, stop) of the whole sequence
    want: int  # draft tokens of use after this one; 0: none (finished, disabled, at the limit)
    sampling: Sampling
    ask: int = MAX_DRAFT_TOKENS  # of these, most that a model may be asked for; 0: ask none
    left: int = 1 << 30  # tokens it may still generate at most
    relaxed: Many[int] = ()  # offsets of verified draft tokens that a lossy policy let pass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft for one sequence that could be verified next."""

    source: str  # record under which its acceptance is remembered
    label: str  # who drafted, for the trace
    view: View
    tokens: list[int]
    confidence: list[float]
    offer: Offer  # how much of it is worth verifying
    ready: int = 0  # tokens that were waiting when they were asked for
    work_ms: float = 0.0
    top: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None  # ids and probabilities [T, k]


@dataclass(slots=True)
class DraftKnows:
    """For how much of a sequence its draft holds KV: what it said last, and what the target sent it."""

    base: int = 0  # committed tokens when it answered last
    guess: list[int] = field(default_factory=list)  # what it guessed after those
    positions: int = 0  # leading ones, guessed ones included, with KV

    def after(self, tokens: Callable[[int, int], list[int]], length: int) -> int:
        """Leading positions with KV, now that ``length`` tokens are committed.

        A guess that was right is taken to have been computed to its end while it was verified. Where it was not, the draft
        catches up by a token, which costs less than sending KV that is there already in every other round.
        """
        if not self.guess:
            return min(self.positions, self.base)
        agreed = 0
        for mine, theirs in zip(tokens(self.base, length), self.guess, strict=False):
            if mine != theirs:
                break
            agreed += 1
        return self.base + agreed

    def answered(self, base: int, guess: list[int], positions: int) -> None:
        self.base, self.guess, self.positions = base, guess, positions

    def sent(self, length: int) -> None:
        """KV of all but the last of ``length`` committed tokens is on its way."""
        self.base, self.guess, self.positions = length, [], length - 1


@dataclass(slots=True)
class Sequence:
    """State between two rounds."""

    trace: Trace
    chain_id: str
    tenant: str
    sources: frozenset[str] | None  # what the request allows; None: everything
    family: str = LOSSLESS  # of its policy
    local: list[Source] = field(default_factory=list)  # who drafts for it without a wait
    views: dict[str, View] = field(default_factory=dict)
    pace: LocalPace = field(default_factory=LocalPace)
    # --- at the draft ---
    draft: str = ""  # replica that holds the session
    epoch: int = 0
    sent: int = 0  # committed tokens the draft has been told of; 0: not open there
    known: DraftKnows = field(default_factory=DraftKnows)
    refreshed: int = 0  # leading positions whose KV the target sent
    hidden: int = 0  # leading positions whose hidden states it sent, or did not have
    active: bool = False  # the draft was last told to work on it
    behind: int = 0  # answers in a row that the draft was still reading the sequence
    rest_until: float = float("-inf")  # when it is asked again
    # --- being verified ---
    base: int = 0
    pending: Candidate | None = None
    asked: str = ""  # record of the model that was asked for the step under way
    reason: str = ""
    wait_ms: float = 0.0

    def allows(self, source: str) -> bool:
        return self.sources is None or source in self.sources
