"""What happened to one request, round by round: the record behind ``chain.trace`` and the usage statistics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Round:
    """One verification: ``drafted`` after position ``base``; the first ``accepted`` of them and then ``own`` were committed."""

    base: int
    drafted: list[int]
    accepted: int
    own: list[int]  # the target's own token; empty once output was cut inside the accepted run
    source: str  # who drafted; empty for a plain step
    wait_ms: float  # how long the target's step waited for this draft
    draft_ms: float  # how long the draft worked on it (for the whole batch)
    reason: str = ""  # why there was no draft
    ready: int = 0  # drafted tokens that were waiting when the step before ended
    relaxed: list[int] = field(default_factory=list)  # which of ``drafted`` were accepted though not the target's own

    def as_dict(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "own": self.own,
            "source": self.source,
            "wait_ms": round(self.wait_ms, 3),
            "draft_ms": round(self.draft_ms, 3),
            "reason": self.reason,
            "ready": self.ready,
            "relaxed": self.relaxed,
        }


@dataclass(slots=True)
class Trace:
    """Rounds of one request (when asked for) and its totals (always)."""

    keep_rounds: bool
    prompt_tokens: int
    rounds: list[Round] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    relaxed: int = 0  # of those accepted, the ones that a lossy policy let pass
    rounds_n: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)  # accepted tokens by who drafted them
    given: int = 0  # tokens of a draft that came with the request
    followed: int = 0  # and how many of them the output has, also where the target said them unasked

    def add(self, item: Round) -> None:
        self.rounds_n += 1
        self.drafted += len(item.drafted)
        self.accepted += item.accepted
        self.relaxed += len(item.relaxed)
        if item.drafted:
            self.sources[item.source] += item.accepted
        if item.reason:
            self.reasons[item.reason] += 1
        if self.keep_rounds:
            self.rounds.append(item)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": [item.as_dict() for item in self.rounds],
            "drafted": self.drafted,
            "accepted": self.accepted,
            "relaxed": self.relaxed,
            "rounds_n": self.rounds_n,
            "reasons": dict(self.reasons),
            "sources": dict(self.sources),
            "prompt_tokens": self.prompt_tokens,
            "given": self.given,
            "followed": self.followed,
        }


def clip(trace: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
    """Cut the rounds of ``Trace.as_dict()`` to what the client got.

    The last step can commit tokens behind a stop string, EOS or length limit; the scheduler drops them, and so does this.
    """
    left = completion_tokens
    rounds = []
    for item in trace["rounds"]:
        if left <= 0:
            break
        accepted = min(item["accepted"], left)
        own = item["own"][: left - accepted]
        left -= accepted + len(own)
        relaxed = [offset for offset in item["relaxed"] if offset < accepted]
        rounds.append({**item, "accepted": accepted, "own": own, "relaxed": relaxed})
    return {**trace, "rounds": rounds}
