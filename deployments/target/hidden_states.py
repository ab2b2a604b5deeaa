"""The target's last hidden states, for drafts that were trained on them: out of each step's batch, kept for a while, sent with commits.

vLLM shows them to ``GPUModelRunner.propose_draft_token_ids``, but not to a proposer of ours: that method is wrapped. They are what the
LM head multiplies, after the final norm. Where no connected draft asked for them, nothing is copied and nothing is kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.chain.faults import FaultPolicy
from deployments.kv import HIDDEN

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.float16]

_LARGEST = 65280.0  # that float16 and bfloat16 both have
_LEAST_ROWS = 64  # of a request's memory


class Piece(NamedTuple):
    """Rows of a batch that are of one request's committed positions."""

    request: str
    position: int  # of the first
    row: int  # of the batch
    length: int


class Kept:
    """Rows of one request, of consecutive positions: at most the last ``most``."""

    def __init__(self, size: int, most: int) -> None:
        self.start = 0  # position of the first
        self.count = 0
        self._most = most
        self._rows: Rows = np.empty((0, size), np.float16)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def put(self, position: int, rows: Rows) -> None:
        """Add rows of the positions from ``position`` on. What is not connected with them goes: it was of use together only.

        A request that was preempted computes its positions again: what is there of them is replaced.
        """
        rows, position = rows[-self._most :], position + max(0, len(rows) - self._most)
        if not self.start <= position <= self.start + self.count:
            self.start, self.count = position, 0
        stop = max(self.start + self.count, position + len(rows))
        surplus = max(0, stop - self.start - self._most)
        if surplus:
            surplus = min(self.count, max(surplus, self._most // 4))  # seldom, since it moves the rest
            self._rows[: self.count - surplus] = self._rows[surplus : self.count].copy()
            self.start, self.count = self.start + surplus, self.count - surplus
        self._reserve(stop - self.start)
        at = position - self.start
        skipped = max(0, -at)  # replaced ones that no longer have a place
        self._rows[at + skipped : at + len(rows)] = rows[skipped:]
        self.count = max(self.count, at + len(rows))

    def rows(self, first: int, stop: int) -> tuple[int, Rows]:
        """What there is of positions ``[first, stop)``, and the position it starts at; a view."""
        begin = min(max(first, self.start), self.start + self.count)
        end = min(max(stop, begin), self.start + self.count)
        return begin, self._rows[begin - self.start : end - self.start]

    def _reserve(self, count: int) -> None:
        if count > len(self._rows):
            larger = np.empty(
                (min(max(2 * count, _LEAST_ROWS), max(self._most, count)), self._rows.shape[1]), np.float16
            )
            larger[: self.count] = self._rows[: self.count]
            self._rows = larger


class HiddenStates:
    """One engine's. Used from the engine's thread.

    ``size``: values of a position. ``wanted(request)``: whether a draft that takes them may draft for it.
    """

    def __init__(self, size: int, wanted: Callable[[str], bool], faults: FaultPolicy) -> None:
        self.size = size
        self.row_bytes = 2 * size
        self.counts: Counter[str] = Counter()
        self._wanted = wanted
        self._faults = faults
        self._takers: frozenset[str] = frozenset()
        self._kept: dict[str, Kept] = {}
        self._held = 0  # bytes of all requests
        self._left = faults.hidden_message_bytes  # of the messages of this step

    def install(self, runner: GPUModelRunner) -> None:
        """Look at the hidden states of every step of this runner, before drafts are asked."""
        propose = runner.propose_draft_token_ids

        def propose_with_hidden(
            scheduled: Any, sampled: Any, sampling: Any, hidden_states: Any, *more: Any, **named: Any
        ) -> Any:
            if self._takers:
                try:
                    self.saw(self.pieces(runner, sampled), hidden_states)
                except Exception:  # drafts do without, the step goes on
                    logger.exception("hidden states could not be kept; none are sent until drafts connect anew")
                    self.counts["failed"] += 1
                    self.connect([])
            return propose(scheduled, sampled, sampling, hidden_states, *more, **named)

        runner.propose_draft_token_ids = propose_with_hidden

    def connect(self, endpoints: Iterable[Mapping[str, Any]]) -> None:
        """Take note of which drafts asked for hidden states; where none did, what is kept goes."""
        self._takers = frozenset(str(end["name"]) for end in endpoints if end.get("kv") == HIDDEN)
        if not self._takers:
            self._kept.clear()
            self._held = 0

    def reaches(self, draft: str) -> bool:
        """Whether a draft replica takes them."""
        return draft in self._takers

    def next_step(self) -> None:
        """A new message goes to each draft: it has room again."""
        self._left = self._faults.hidden_message_bytes

    # --- what a step computed -------------------------------------------------------------------------------------

    def pieces(self, runner: GPUModelRunner, sampled: Sequence[Sequence[int]]) -> list[Piece]:
        """Rows of the step that just ended, of requests that want them; ``sampled``: what each request of the batch committed.

        A request with new tokens has hidden states up to the one before the last of these; the positions of rejected drafts lie
        behind. One without is still reading its prompt, whose positions are all committed.
        """
        batch = runner.input_batch
        first_rows = runner.query_start_loc.np
        found = []
        for index, request in enumerate(batch.req_ids):
            if not self._wanted(request):
                continue
            position, row = int(batch.num_computed_tokens_cpu[index]), int(first_rows[index])
            end = int(batch.num_tokens_no_spec[index]) - (1 if sampled[index] else 0)
            stop = min(position + int(first_rows[index + 1]) - row, end)
            begin = max(position, end - self._faults.hidden_positions)  # what comes later would push the others out
            if begin < stop:
                found.append(Piece(request, begin, row + begin - position, stop - begin))
        return found

    def saw(self, pieces: Sequence[Piece], states: torch.Tensor) -> None:
        """Keep these rows of ``states [tokens, size]``: one copy from the device for all of them."""
        if not pieces:
            return
        began = time.perf_counter_ns()
        rows = _to_host([states[piece.row : piece.row + piece.length] for piece in pieces])
        at = 0
        for piece in pieces:
            self._keep(piece.request, piece.position, rows[at : at + piece.length])
            at += piece.length
        self.counts["positions"] += len(rows)
        self.counts["ns"] += time.perf_counter_ns() - began

    def _keep(self, request: str, position: int, rows: Rows) -> None:
        kept = self._kept.get(request)
        if kept is None:
            kept = self._kept[request] = Kept(self.size, self._faults.hidden_positions)
        before = kept.nbytes
        kept.put(position, rows)
        self._held += kept.nbytes - before
        if self._held > self._faults.hidden_bytes:
            self.forget(request)
            self.counts["memory"] += 1

    # --- what a draft is sent -------------------------------------------------------------------------------------

    def rows(self, request: str, first: int, stop: int) -> tuple[bytes, int]:
        """What there is of positions ``[first, stop)`` and fits the message: little-endian float16, and where it starts."""
        kept = self._kept.get(request)
        if kept is None or first >= stop:
            return b"", 0
        began = time.perf_counter_ns()
        start, found = kept.rows(first, stop)
        room = self._left // self.row_bytes
        if len(found) > room:
            self.counts["message_full"] += 1
            start, found = start + len(found) - room, found[len(found) - room :]
        data = found.astype("<f2", copy=False).tobytes()
        self._left -= len(data)
        self.counts["sent"] += len(found)
        self.counts["ns"] += time.perf_counter_ns() - began
        return data, start if data else 0

    def forget(self, request: str) -> None:
        """A request ended."""
        kept = self._kept.pop(request, None)
        if kept is not None:
            self._held -= kept.nbytes

    def stats(self) -> dict[str, float]:
        """Positions copied from the device and sent to drafts, ms for both, bytes held now; what was not sent, by reason."""
        totals = {name: self.counts[name] for name in ("positions", "sent", "ns")}
        missed = {f"hidden_not_sent:{name}": float(n) for name, n in self.counts.items() if name not in totals}
        return missed | {
            "hidden_positions": float(totals["positions"]),
            "hidden_sent": float(totals["sent"]),
            "hidden_ms": totals["ns"] / 1e6,
            "hidden_held_bytes": float(self._held),
        }


def _to_host(parts: Sequence[torch.Tensor]) -> Rows:
    """Parts of a step's hidden states as float16 ``[rows, size]`` in the host's memory."""
    import torch

    joined = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    rows: Rows = joined.clamp(-_LARGEST, _LARGEST).to(torch.float16).cpu().numpy()
    return rows
