"""The draft's model calls: a token for each of several lines, several tokens of one, a copy of KV.

Work on a line is always the same: compute its first token without KV. Behind the frontier that is catching up, at the frontier
it tells the next guess; so lines that catch up, draft, and run ahead share batched single-token steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from deployments.draft.calibration import Calibration
from deployments.draft.choose import BadLogits, Logits, choose
from deployments.draft.health import count_rows, next_move, useful_slots, worth_copying
from deployments.draft.lines import Branch, Line, Session
from deployments.draft.model import StepModel
from deployments.draft.schedule import Start
from deployments.draft.sessions import SessionStore

logger = logging.getLogger(__name__)

LARGEST_CHUNK = 256  # scratch memory of a prefill grows with it, speed no more
SMALLEST_CHUNK = 8  # smaller ones read the weights once for too few tokens
_COPY_S = 1e-5  # of one position's KV, before any was timed
_ALPHA = 0.2
_LONG_COPY = 64  # positions; a shorter copy takes mostly the call, which tells little about a long one


class Runner:
    """Computes lines of a store. A line that fails is dropped: a branch alone, a session with all it has.

    ``vocab_size``: tokens from there on are never chosen; ``token_ids``, ascending, are those of a model that has logits for some only.
    ``slice_s``: longest call that reads a prompt between messages. ``counts`` is the engine's.
    """

    def __init__(
        self,
        model: StepModel,
        store: SessionStore,
        calibration: Calibration,
        *,
        vocab_size: int,
        token_ids: npt.NDArray[np.int32] | None = None,
        top_k: int,
        slice_s: float,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self.model = model
        self.copy_s = _COPY_S  # seconds to copy the KV of one position
        self._store = store
        self._calibration = calibration
        self._token_ids = token_ids[: np.searchsorted(token_ids, vocab_size)] if token_ids is not None else None
        self._features = token_ids is not None  # such a model keeps features of positions beside their KV
        self._width = vocab_size if self._token_ids is None else len(self._token_ids)  # logits to choose from
        self._top_k = top_k
        self.slice_s = slice_s  # longest call that reads a prompt between messages
        self._clock = clock
        self.counts = counts
        self._scratch = np.empty(self._width, np.float32)
        self._gap = model.costs.bridged_gap(model.slots)

    def advance(self, lines: Iterable[Line], until: float = float("inf")) -> bool:
        """Compute one more token of each line together; False when there are none or no time."""
        rows = sorted(lines, key=lambda line: line.slot)
        started = self._clock()
        if not rows or started + self.model.costs.decode(len(rows)) > until:
            return False
        try:
            self._decode(rows)
            self.model.costs.saw_decode(len(rows), self._clock() - started)
        except Exception:
            for line in rows:  # find the one that fails: the others go on
                if not line.live:
                    continue
                if len(rows) == 1:
                    self._drop(line)
                    continue
                try:
                    self._decode([line])
                except Exception:
                    self._drop(line)
        return True

    def read(self, session: Session, count: int) -> None:
        """Compute the next ``count`` tokens of one session in one call."""
        tokens = session.unread(count)
        started = self._clock()
        try:
            logits = self.model.prefill(session.slot, tokens, session.computed)
            self._computed(session, count, logits)
        except Exception:
            self._drop(session)
            return
        self.model.costs.saw_prefill(count, self._clock() - started)
        self.counts["prefills"] += 1
        self.counts["prefill_tokens"] += count

    def read_slice(self, session: Session, budget_s: float = float("inf"), slice_s: float | None = None) -> int:
        """Read the next slice of a session's tokens in one call; how many: 0 when not even the smallest fits ``budget_s``."""
        costs = self.model.costs
        if costs.prefill(SMALLEST_CHUNK) > budget_s:
            return 0
        fitting = costs.prefill_fitting(min(slice_s or self.slice_s, budget_s))
        # computing the last token of a session nobody wants drafts of would guess one
        unread = session.pending if session.active else session.pending - 1
        count = min(unread, max(SMALLEST_CHUNK, min(fitting, LARGEST_CHUNK)))
        self.read(session, count)
        return count

    def start(self, what: Start) -> Branch | None:
        """Start a branch: a slot with the KV of the main line up to there. None when no slot is to be had."""
        session = what.session
        lent = self._store.lend(session, worth_copying(self.model.costs, self.copy_s, 1))
        if lent is None:
            return None
        self.copy(session.slot, lent.slot, what.start, min(lent.valid, what.start))
        branch = Branch(session, what.start, what.token, what.rank, lent.slot, what.start)
        session.branches.append(branch)
        self.counts["branches_started"] += 1
        return branch

    def pack(self, steps: int) -> bool:
        """Make the next copy that brings sessions in use side by side, if ``steps`` of them pay for it. False when none does."""
        move = next_move(self._store, worth_copying(self.model.costs, self.copy_s, steps))
        if move is None:
            return False
        self.copy(move.line.slot, move.target, move.line.computed, move.start)
        self._store.relocate(move.line, move.target)
        self.counts["moves"] += 1
        return True

    def copy(self, source: int, target: int, length: int, start: int) -> None:
        """Copy the KV of positions ``[start, length)`` of one slot to another."""
        if length <= start:
            if self._features:  # those the target sent of positions that have no KV yet
                self.model.move(source, target, length, length)
            return
        started = self._clock()
        self.model.move(source, target, length, start)
        count = length - start
        weight = _ALPHA * min(count / _LONG_COPY, 1.0)
        self.copy_s += weight * ((self._clock() - started) / count - self.copy_s)
        self.counts["copied_positions"] += count

    def _decode(self, rows: list[Line]) -> None:
        slots = [line.slot for line in rows]
        count_rows(slots, useful_slots(self._store.sessions.values()), self._gap, self.counts)
        logits = self.model.decode(
            slots,
            [line.next_token() for line in rows],
            [line.computed for line in rows],
        )
        self.counts["decodes"] += 1
        for line, row in zip(rows, logits, strict=True):
            if line.live:  # not when its session was dropped for a row before
                self._computed(line, 1, row)

    def _computed(self, line: Line, count: int, logits: Logits) -> None:
        """Record that ``count`` more tokens have KV; at the frontier ``logits`` tell the next guess."""
        if line.pending == count:
            sampling = line.sampling
            try:
                top_k = self._top_k if sampling.probs else 0
                choice = choose(logits[: self._width], sampling, line.total, top_k, self._scratch, self._token_ids)
            except BadLogits:
                self._drop(line)
                return
            choice.confidence = self._calibration.confidence(sampling.temperature <= 0.0, choice.margin)
            line.guess.append(choice)
            if isinstance(line, Branch):
                self.counts["branch_tokens"] += 1
        line.computed += count
        if isinstance(line, Session):
            line.moved = True

    def _drop(self, line: Line) -> None:
        if isinstance(line, Branch):
            logger.debug("a branch of session %s failed", line.session.key, exc_info=True)
            self.counts["branches_failed"] += 1
            self._store.discard(line)
            return
        logger.exception("the draft failed on session %s", line.key)
        self.counts["dropped"] += 1
        self._store.close(line.key)
