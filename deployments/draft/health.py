"""Memory health of a draft: what steps pay for slots that lie apart, which move would mend most, and whose books are wrong.

A step computes consecutive slots, and bridges slots that want nothing where that is cheaper than a call more
(:func:`hw.onnx.slots.runs`). So what counts is not how full the slots are but whether the sessions that targets want drafts of
lie side by side: a free slot between two of them costs a row of every step, and so does a spare or a session that rests. Pure;
no model, no clock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from deployments.draft.lines import Key, Line, Session
from deployments.draft.sessions import SessionStore, slots_of
from hw.onnx.costs import StepCosts
from hw.onnx.slots import runs

logger = logging.getLogger(__name__)

STEPS_AFTER_MOVE = 16  # steps that gain from a move in idle time: a few rounds, until what lies there changes again


class Move(NamedTuple):
    """A line and where it should lie: in a free slot, or in one that a spare holds. Positions before ``start`` are there."""

    line: Line
    target: int
    start: int = 0


def worth_copying(costs: StepCosts, copy_s: float, steps: int) -> int:
    """Positions whose copy, at ``copy_s`` seconds each, takes as long as ``steps`` steps take for a row more."""
    if costs.decode(1) <= 0.0 or copy_s <= 0.0:
        return 2**31  # nothing was measured
    return int(steps * costs.decode_row_s * costs.decode_scale / copy_s)


def count_rows(slots: Sequence[int], useful: Collection[int], gap: int, counts: Counter[str]) -> None:
    """Add what a step over the ascending ``slots`` computes to ``counts``.

    ``rows``: all of it. ``rows_wasted``: rows of no line that wanted a token. ``rows_fragmented``: those of the wasted ones
    whose slot is not ``useful``, which lie between only because of where lines were put; the others are of lines in use that
    had nothing to compute. ``calls_split``: calls beyond the first.
    """
    ranges = runs(list(slots), gap)
    beside = set().union(*(range(low, high) for low, high in ranges)).difference(slots)
    counts["rows"] += len(slots) + len(beside)
    counts["rows_wasted"] += len(beside)
    counts["rows_fragmented"] += len(beside.difference(useful))
    counts["calls_split"] += len(ranges) - 1


def useful_slots(sessions: Iterable[Session]) -> set[int]:
    """Slots that hold a line of a session that a target wants drafts of."""
    active = [session for session in sessions if session.active]
    return {session.slot for session in active} | {branch.slot for session in active for branch in session.branches}


def fragmentation(sessions: Iterable[Session]) -> float:
    """Share of the slots from the first to the last session in use that hold none: what a step of all of them would waste."""
    slots = [session.slot for session in sessions if session.active]
    return 1.0 - len(slots) / (max(slots) + 1 - min(slots)) if slots else 0.0


def next_move(store: SessionStore, most: int) -> Move | None:
    """The next copy on the way to sessions in use side by side in the lowest slots; None where none is needed or possible.

    What goes down is what has least to copy. It goes into a spare of its own, which holds nearly all of it, a free slot, or
    another's spare; where only lines that are not wanted lie there, one of those goes up first, as far as it can. ``most``:
    positions that are worth copying.
    """
    sessions = list(store.sessions.values())
    active = [session for session in sessions if session.active]
    count = len(active)
    outside = sorted((session for session in active if session.slot >= count), key=lambda session: session.computed)
    for session in outside:
        below = [spare for spare in session.spares if spare.slot < count]
        own = max(below, key=lambda spare: spare.valid, default=None)
        if own is not None and session.computed - own.valid <= most:
            return Move(session, own.slot, own.valid)
    if not outside or outside[0].computed > most:
        return None
    free = set(range(store.table.slots)) - store.table.taken
    spares = {spare.slot for session in sessions for spare in session.spares}
    for slots in (free, spares):
        if min(slots, default=count) < count:
            return Move(outside[0], min(slots))
    others: list[Line] = [session for session in sessions if not session.active]
    others += [branch for session in sessions for branch in session.branches]
    blocking = [other for other in others if other.slot < count]
    other = min(blocking, key=lambda other: other.computed, default=None)
    room = max(free or spares, default=None)
    if room is None or other is None or other.computed + outside[0].computed > most:
        return None
    return Move(other, room)


def mend(store: SessionStore, counts: Counter[str]) -> None:
    """Check the books; where they are wrong, drop the sessions concerned, whose targets send them whole again.

    Drafts over wrong KV would make no wrong text, since targets verify every token, but useless work. ``counts``:
    ``integrity_checks``, ``integrity_violations`` and, with other failures, sessions ``dropped``.
    """
    counts["integrity_checks"] += 1
    try:
        store.check()
    except (AssertionError, LookupError):
        wrong = faulty(store)
        logger.exception("the books of this draft were wrong; sessions dropped: %s", sorted(wrong) or "none")
        store.rebuild(without=wrong)
        counts["integrity_violations"] += 1
        counts["dropped"] += len(wrong)


def faulty(store: SessionStore) -> set[Key]:
    """Sessions whose books are wrong: drafts of theirs may be computed over KV of other tokens."""
    slots = Counter(slot for session in store.sessions.values() for slot in slots_of(session))
    slots.update(store.loans.slots())
    found = set()
    for key, session in store.sessions.items():
        own = all(slots[slot] == 1 and slot in store.table.taken for slot in slots_of(session))
        if not own or session.key != key or not _well_formed(session, store.context):
            found.add(key)
    return found


def _well_formed(session: Session, context: int) -> bool:
    try:
        session.check()
    except (AssertionError, LookupError):
        return False
    return max([session.total, *(branch.total for branch in session.branches)]) <= context
