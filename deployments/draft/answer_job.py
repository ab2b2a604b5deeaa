"""One request for answers while it is worked on: its prompt, read once, and a row for each answer. No model, no clock, no slots given.

The prompt is read in the slot of the first row and its KV copied to the others'. A row writes behind it, so a slot whose row has
ended still holds the prompt, for a row that found none, or for another request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from deployments.chain.protocol import CONTEXT_FULL, Sampling
from deployments.draft.answers import CANCELLED, Emit, WriteRequest, pack_answer
from deployments.draft.choose import Choice

logger = logging.getLogger(__name__)

NO_PLACE = -1


@dataclass(slots=True, eq=False)
class Row:
    """One answer. ``copied``: how many positions of the prompt have valid KV in its slot."""

    index: int
    sampling: Sampling
    slot: int = NO_PLACE
    copied: int = 0
    choices: list[Choice] = field(default_factory=list)
    ended: bool = False


class AnswerJob:
    """Belongs to the drafting thread, except :meth:`cancel`. ``context``: positions of a slot; ``until``: its deadline."""

    def __init__(self, request: WriteRequest, emit: Emit, *, until: float, context: int, diversity: float) -> None:
        self.request = request
        self.prompt = request.prompt
        self.until = until
        self.rows = [Row(index, request.sampling(index, diversity)) for index in range(request.k)]
        self.read = 0  # positions of the prompt with valid KV in the slot of whoever holds the prompt
        self.blocked = False  # no slot was to be had for it
        self._emit = emit
        self._stop = frozenset(request.stop)
        self._length = min(request.length, context - len(request.prompt))
        self._cancelled = False

    def cancel(self) -> None:
        """Nobody waits for it any more. Callable from any thread."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def reading(self) -> bool:
        """Whether its prompt is not read yet."""
        return self.read < len(self.prompt)

    @property
    def ended(self) -> bool:
        return all(row.ended for row in self.rows)

    @property
    def holders(self) -> list[Row]:
        """Rows with a slot."""
        return [row for row in self.rows if row.slot != NO_PLACE]

    @property
    def waiting(self) -> list[Row]:
        """Rows that have no slot yet."""
        return [row for row in self.rows if row.slot == NO_PLACE and not row.ended]

    def ready(self) -> Iterator[Row]:
        """Rows whose next token can be computed: none before all that have a slot can go on together."""
        return iter(() if self.reading or self.copying() else self.holders)

    def copying(self) -> tuple[Row, Row] | None:
        """A row that lacks some of the prompt's KV and one that has it all; None where none lacks any."""
        if self.reading:
            return None
        short = next((row for row in self.holders if row.copied < self.read), None)
        whole = next((row for row in self.holders if row.copied == self.read), None)
        return (short, whole) if short is not None and whole is not None else None

    def position(self, row: Row) -> int:
        """Where the row's last token goes."""
        return len(self.prompt) + len(row.choices) - 1

    def history(self, row: Row) -> list[int]:
        """All tokens of a row from position 0 on, the prompt's included."""
        return [*self.prompt, *(choice.token for choice in row.choices)]

    def take(self, row: Row, choice: Choice) -> bool:
        """Append what was chosen next; False when the answer ended with it."""
        if choice.token in self._stop:
            self.end(row, finished=True)
            return False
        row.choices.append(choice)
        if len(row.choices) < self._length:
            return True
        self.end(row, reason="" if self._length == self.request.length else CONTEXT_FULL)
        return False

    def end(self, row: Row, *, finished: bool = False, reason: str = "") -> None:
        """Hand the row's answer over, as far as it got. Its slot is the caller's to free."""
        row.ended = True
        if reason == CANCELLED:
            return
        try:
            self._emit(pack_answer(row.index, row.choices, finished=finished, reason=reason))
        except Exception:  # whoever asked is gone; others go on
            logger.exception("an answer could not be handed over")

    def check(self) -> None:
        """Assert that it is well formed."""
        slots = [row.slot for row in self.holders]
        assert len(set(slots)) == len(slots), slots
        assert 0 <= self.read <= len(self.prompt)
        for row in self.rows:
            assert not (row.ended and row.slot != NO_PLACE), row.index
            assert 0 <= row.copied <= self.read, row.index
            assert row.copied or row.slot == NO_PLACE or self.reading or self.copying(), row.index
            assert len(row.choices) <= self._length
            assert bool(row.choices) <= (not self.reading)
