"""The seam between a target and its drafts: frozen messages and two Protocols, nothing else.

One engine step of the target sends one :class:`Step`; the draft answers with one :class:`Drafts`. Both carry the step
number so that an answer that comes after its deadline is recognised and dropped. Positions count tokens of the whole
sequence, prompt included. Token lists are plain ids of the *target's* vocabulary.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 4
MAX_DRAFT_TOKENS = 32
MAX_SESSIONS_PER_STEP = 1024
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# Why a draft is empty. Stable strings: they label counters.
UNKNOWN_SESSION = "unknown_session"  # the draft lost the session (restart, lease): the target sends it whole again
CONTEXT_FULL = "context_full"  # the sequence no longer fits the draft's context
NO_SLOT = "no_slot"  # every KV slot is taken by a live session
STALE = "stale"  # the commit was older than what the draft already holds
DEADLINE = "deadline"  # the draft stopped working on it because the target no longer waits
ERROR = "error"  # the draft failed on this session


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the target will sample, so that a draft can sample the same way (same keyed noise, same temperature)."""

    temperature: float  # 0 is greedy
    seed: int  # keys the noise of ``deployments.chain.noise``; below 2**63
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    probs: bool = True  # whether the draft's probabilities are of use; they are to lossy policies


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """What the target accepted for one sequence in one step.

    ``tokens`` are the last ``len(tokens)`` of the ``length`` committed ones. A commit that opens a session (or opens it
    anew in a later epoch) carries all of them, so ``length == len(tokens)``.
    """

    session: str
    epoch: int
    length: int
    tokens: list[int]
    want: int  # most draft tokens of use after ``length``; 0 only keeps the session in step
    sampling: Sampling | None = None  # set when the session opens
    tenant: str = ""  # set when the session opens: whose work it is, for fair shares
    verifying: list[int] = []  # what the target is about to verify after ``length`` that this draft did not propose
    kv: bytes = b""  # where the target's KV of committed positions can be had: a reference of ``hw.kv``; opaque here
    hidden: bytes = b""  # little-endian float16 [n, size]: the target's last hidden states, to a draft that asked
    hidden_start: int = 0  # position of the first of them; none is of the last token, which was not computed yet

    @property
    def opens(self) -> bool:
        return self.length == len(self.tokens)

    def hidden_rows(self, size: int) -> npt.NDArray[np.float16] | None:
        """The hidden states ``[n, size]`` of positions from ``hidden_start`` on; None where they are not what they should be."""
        rows, rest = divmod(len(self.hidden), 2 * size)
        if rest or self.hidden_start < 0 or self.hidden_start + rows > self.length - 1:
            return None
        return np.frombuffer(self.hidden, dtype="<f2").reshape(rows, size)


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Target to draft: every running sequence's commit after one engine step, and the sessions that ended."""

    version: int
    target: str  # names the target replica; sessions of different targets never meet
    number: int  # grows by one a step
    deadline_s: float  # seconds from receipt after which nobody waits for the answer
    commits: list[Commit]
    closed: list[str]
    token_worth_s: float = 0.0  # what one more accepted token saves the target; 0: not known, draft all that is wanted


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Guessed tokens after position ``base`` of one session; empty with a reason when there are none."""

    session: str
    epoch: int
    base: int
    tokens: list[int]
    reason: str = ""
    eta_s: float = 0.0  # with ``DEADLINE``: when the draft expects to have read what it must read first
    ready: int = 0  # how many of ``tokens`` were waiting when the commit came (drafted while the target verified)
    accept: bytes = b""  # little-endian float16 [len(tokens)]; see :meth:`confidence`. Empty: the source does not know
    top_k: int = 0
    top_ids: bytes = b""  # little-endian int32 [len(tokens), top_k]
    top_probs: bytes = b""  # little-endian float16 [len(tokens), top_k]; what is missing to 1 is the tail's mass
    have: int = 0  # leading positions, guessed ones included, whose KV the draft holds

    def confidence(self) -> npt.NDArray[np.float32] | None:
        """Per token ``[len(tokens)]``: the source's estimate that the target agrees, given that it did with all before."""
        return np.frombuffer(self.accept, dtype="<f2").astype(np.float32) if self.accept else None

    def has_top(self) -> bool:
        """Whether :meth:`top` has something to return: the source may have none, or not what it says."""
        entries = len(self.tokens) * self.top_k
        return entries > 0 and len(self.top_ids) == 4 * entries and len(self.top_probs) == 2 * entries

    def top(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return ids and probabilities, both ``[len(tokens), top_k]``; the rows sum to at most 1."""
        shape = (len(self.tokens), self.top_k)
        ids = np.frombuffer(self.top_ids, dtype="<i4").reshape(shape).astype(np.int32)
        probs = np.frombuffer(self.top_probs, dtype="<f2").reshape(shape).astype(np.float32)
        return ids, probs


class Drafts(msgspec.Struct, frozen=True, array_like=True, tag="drafts"):
    """Draft to target: the answer to one :class:`Step`."""

    version: int
    source: str  # names the draft and its replica
    number: int  # the step this answers
    drafts: list[Draft]
    work_s: float = 0.0  # time the draft spent, without queueing and transport
    queue_s: float = 0.0  # time the step waited at the draft before work on it began: grows when the draft falls behind


class Drafter(Protocol):
    """What drafts: an engine behind a socket, or a fake in a test. Called from one thread at a time."""

    def step(self, step: Step) -> Drafts:
        """Apply every commit, close what ended, and draft. Never raises for one bad session: it answers ``ERROR``."""

    def disconnect(self, target: str) -> None:
        """Forget every session of a target that is gone."""


class DraftChannel(Protocol):
    """The target's end of one draft replica."""

    name: str
    dropped: Counter[str]  # messages that came to nothing, by reason

    def post(self, step: Step) -> bool:
        """Send without waiting; False when the channel cannot take it (peer gone, queue full)."""

    def collect(self, number: int, timeout_s: float) -> Drafts | None:
        """Return the answer to step ``number`` or None at the deadline. Older answers are dropped and counted."""

    def close(self) -> None: ...


Count = Callable[[str], None]  # called with a reason, once for each thing dropped
