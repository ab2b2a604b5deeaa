"""One answer as it was measured, and what it looks like beside the lossless one."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from scripts.calibrate_lib import scoring
from scripts.calibrate_lib.item_sets import Item


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one setting answered to one item. ``same``: what the lossless answer says, so that it need not be kept twice."""

    id: str
    steps: int  # of the target
    tokens: list[int] = []
    text: str = ""
    finish: str = ""  # vLLM's: "stop" or "length"
    same: bool = False
    drafted: int = 0
    accepted: int = 0
    relaxed: list[int] = []  # places of tokens that the policy let pass
    nll: float | None = None  # of all tokens after the prompt, by the target, nats; None: not scored yet
    similarity: float | None = None  # to the lossless answer, by the sentence model; None: not compared yet

    def beside(self, own: "Answer") -> "Answer":
        """As it is kept: without what the lossless answer says as well."""
        if (self.tokens, self.text, self.finish) != (own.tokens, own.text, own.finish):
            return self
        return msgspec.structs.replace(self, tokens=[], text="", finish="", nll=None, similarity=None, same=True)

    def whole(self, own: "Answer") -> "Answer":
        """The inverse of :meth:`beside`."""
        if not self.same:
            return self
        near = None if own.similarity is None else 1.0
        return msgspec.structs.replace(
            self, tokens=own.tokens, text=own.text, finish=own.finish, nll=own.nll, similarity=near, same=False
        )


@dataclass(frozen=True)
class Pair:
    """The lossless answer to an item and another one."""

    item: Item
    own: Answer
    other: Answer

    @property
    def changed(self) -> bool:
        """Whether a client would see another answer."""
        return (self.own.text, self.own.finish) != (self.other.text, self.other.finish)

    @property
    def agrees(self) -> bool:
        """Whether what counts of the answer is the same, see :func:`scoring.answer`."""
        return scoring.answer(self.item, self.own.text) == scoring.answer(self.item, self.other.text)

    @property
    def first_difference(self) -> int | None:
        """Place of the first token that differs; None: there is none."""
        return first_difference(self.own.tokens, self.other.tokens)

    @property
    def differing(self) -> int:
        """Places of the longer answer that hold another token or none in the other one."""
        return differing(self.own.tokens, self.other.tokens)

    @property
    def places(self) -> int:
        return max(len(self.own.tokens), len(self.other.tokens))

    @property
    def right(self) -> tuple[bool, bool] | None:
        """Scores of both answers; None where there is no right one."""
        before, after = scoring.score(self.item, self.own.text), scoring.score(self.item, self.other.text)
        return None if before is None or after is None else (before, after)


def first_difference(own: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two token sequences part; an end is a difference."""
    for place, (a, b) in enumerate(zip(own, other, strict=False)):
        if a != b:
            return place
    return None if len(own) == len(other) else min(len(own), len(other))


def differing(own: Sequence[int], other: Sequence[int]) -> int:
    """How many places of the longer sequence differ."""
    return sum(a != b for a, b in zip(own, other, strict=False)) + abs(len(own) - len(other))
