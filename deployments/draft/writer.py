"""Writes whole answers between the messages of the token chain: many requests, one model call at a time.

Every request has its prompt read once; then its rows, and those of other requests, decode together. A call reads a slice of a
prompt, copies a slice of its KV, or computes one token of each of several rows; a message that arrives meanwhile waits for that.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from deployments.chain.protocol import CONTEXT_FULL, DEADLINE, ERROR, NO_SLOT, Sampling
from deployments.draft.answer_job import NO_PLACE, AnswerJob, Row
from deployments.draft.answer_queue import AnswerQueue
from deployments.draft.answers import BUSY, CANCELLED, Emit, WriteRequest, Writing
from deployments.draft.calibration import Calibration
from deployments.draft.choose import BadLogits, Choice, Logits, choose
from deployments.draft.loans import KeptPrompt
from deployments.draft.runner import LARGEST_CHUNK, SMALLEST_CHUNK, Runner
from deployments.draft.sessions import GREEDY, SessionStore

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """A model call that could be made: what it is expected to take, and the making of it."""

    seconds: float
    make: Callable[[], None]
    steps: bool  # it decodes


class Writer:
    """Answers of a store's free slots. :meth:`submit` may be called from any thread, the rest belongs to the drafting one.

    At most half of the slots are written in, so that answers cannot keep sessions out. ``vocab_size``: tokens from there on
    are never written. ``refuses``: why nothing is, where that is so.
    """

    def __init__(
        self,
        store: SessionStore,
        runner: Runner,
        calibration: Calibration,
        settings: Writing,
        *,
        vocab_size: int,
        clock: Callable[[], float],
        refuses: str = "",
    ) -> None:
        self._store = store
        self._runner = runner
        self.slice_s = runner.slice_s
        self._calibration = calibration
        self._settings = settings
        self._vocab_size = vocab_size
        self._clock = clock
        self._counts: Counter[str] = runner.counts
        self._refuses = refuses
        self._most = max(1, store.table.slots // 2)
        self._queue = AnswerQueue(settings.waiting)
        self._running: list[AnswerJob] = []
        self._stepped = False  # the last call decoded
        self._scratch = np.empty(vocab_size, np.float32)

    # --- any thread -----------------------------------------------------------------------------------------------

    def submit(self, request: WriteRequest, emit: Emit) -> AnswerJob:
        """Queue a request; ``emit`` gets each answer as it ends, in the drafting thread, unless the request is cancelled.

        What is refused is emitted before this returns. Raises ValueError for tokens the model does not know.
        """
        if max(request.prompt) >= self._store.vocab_size:
            raise ValueError(f"request for answers: prompt ids must be below {self._store.vocab_size}")
        job = AnswerJob(
            request,
            emit,
            until=self._clock() + request.deadline_s,
            context=self._store.context,
            diversity=self._settings.diversity,
        )
        if self._refuses:
            self._end(job, self._refuses)
        elif len(request.prompt) >= self._store.context:
            self._end(job, CONTEXT_FULL)
        elif not self._queue.put(job):
            self._end(job, BUSY)
        return job

    @property
    def waits(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._running or len(self._queue))

    # --- the drafting thread --------------------------------------------------------------------------------------

    def next(self, now: float, longest_s: float) -> Call | None:
        """The next call to make, of at most ``longest_s`` if that can be; None where there is none.

        Requests that it would make late end here.
        """
        self.expire(now)
        while True:
            self._start()
            # a request that reads its prompt must not keep others waiting for long
            setup = self._setup(longest_s if len(self._running) == 1 else min(longest_s, self.slice_s))
            step = self._step(longest_s)
            # neither a newcomer nor those who write keep the other waiting
            call = setup if step is None or (setup is not None and self._stepped) else step
            late = [job for job in self._running if call is not None and job.until < now + call.seconds]
            if not late:
                return call
            for job in late:
                self._close(job, DEADLINE)

    def make(self, call: Call) -> None:
        """Make a call that :meth:`next` just returned."""
        self._stepped = call.steps
        call.make()

    def expire(self, now: float) -> None:
        """Hand over what there is of requests that are at their deadline, and drop those nobody waits for."""
        for job in [job for job in self._running if job.cancelled or job.until <= now]:
            self._close(job, CANCELLED if job.cancelled else DEADLINE)
        for job in self._queue.over(now):
            self._end(job, CANCELLED if job.cancelled else NO_SLOT if job.blocked else DEADLINE)

    def mend(self) -> None:
        """Check which slots are written in; where that is wrong, drop what is written and free all of them."""
        try:
            self.check()
        except AssertionError:
            logger.exception("the books of what this draft writes were wrong; requests dropped: %d", len(self._running))
            self._counts["integrity_violations"] += 1
            for job in self._running:
                self._end(job, ERROR)
                self._queue.leave(job)
            self._running.clear()
            for slot in list(self._store.loans.writing):
                self._store.give_back(slot)

    def stats(self) -> dict[str, float]:
        """Gauges: requests that wait and are worked on, slots written in, prompts kept."""
        loans = self._store.loans
        return {
            "answers_waiting": float(len(self._queue)),
            "answers_running": float(len(self._running)),
            "answer_slots": float(len(loans.writing)),
            "prompts_kept": float(len(loans.kept)),
        }

    def check(self) -> None:
        """Assert that the slots written in are those of its rows and that every request is well formed."""
        rows = [row for job in self._running for row in job.holders]
        assert sorted(row.slot for row in rows) == sorted(self._store.loans.writing)
        for job in self._running:
            assert not job.ended
            job.check()
        self._queue.check(self._running)

    # --- slots ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Give slots to rows that wait for one, and start requests, as far as there are slots."""
        for job in self._running:
            if job.reading:
                continue
            for row in job.waiting:
                if not self._place(row):
                    return
        while (first := self._queue.first()) is not None and self._begin(first):
            self._running.append(self._queue.take())

    def _begin(self, job: AnswerJob) -> bool:
        """Give a request the slot in which its prompt is read; False when there is none."""
        row = job.rows[0]
        room = len(self._store.loans.writing) < self._most
        reused = self._store.loans.reuse(job.request.tenant, job.prompt) if room else None
        if reused is not None:
            # the last token is computed in any case: its logits tell the first of the answer
            row.slot, row.copied = reused[0], min(reused[1], len(job.prompt) - 1)
            job.read = row.copied
            self._counts["answer_tokens_reused"] += job.read
            return True
        job.blocked = not self._place(row)
        return not job.blocked

    def _place(self, row: Row) -> bool:
        slot = self._store.borrow() if len(self._store.loans.writing) < self._most else None
        if slot is None:
            return False
        row.slot, row.copied = slot, 0
        return True

    def _release(self, job: AnswerJob, row: Row, *, good: bool = True) -> None:
        """The slot of a row that ended: for one that waits for it, or else free; the last of a request keeps its prompt."""
        slot, copied = row.slot, row.copied
        row.slot, row.copied = NO_PLACE, 0
        waiting = job.waiting
        if slot == NO_PLACE:
            return
        if good and waiting:
            waiting[0].slot, waiting[0].copied = slot, copied
        elif good and copied and not job.holders:
            prompt = KeptPrompt(slot, job.request.tenant, job.prompt[:copied], self._clock())
            self._store.keep(prompt, self._settings.kept)
        else:
            self._store.give_back(slot)

    # --- ends -----------------------------------------------------------------------------------------------------

    def _close(self, job: AnswerJob, reason: str) -> None:
        """End a request that is worked on, whatever it has."""
        good = reason != ERROR
        self._end(job, reason)
        for row in job.holders:
            self._release(job, row, good=good)
        self._settle(job)

    def _end(self, job: AnswerJob, reason: str) -> None:
        for row in job.rows:
            if not row.ended:
                self._counts[f"answer:{reason}"] += 1
                job.end(row, reason=reason)

    def _settle(self, job: AnswerJob) -> None:
        if job.ended and job in self._running:
            self._running.remove(job)
            self._queue.leave(job)

    # --- calls ----------------------------------------------------------------------------------------------------

    def _setup(self, slice_s: float) -> Call | None:
        """A slice of a prompt to read, or of its KV to copy, for the oldest request that needs one."""
        costs = self._runner.model.costs
        for job in self._running:
            if job.reading:
                fitting = max(SMALLEST_CHUNK, min(costs.prefill_fitting(slice_s), LARGEST_CHUNK))
                count = min(len(job.prompt) - job.read, fitting)
                return Call(costs.prefill(count), partial(self._read, job, count), False)
            pair = job.copying()
            if pair is not None:
                row, source = pair
                fitting = max(SMALLEST_CHUNK, int(slice_s / self._runner.copy_s))
                stop = min(len(job.prompt), row.copied + fitting)
                seconds = self._runner.copy_s * (stop - row.copied)
                return Call(seconds, partial(self._copy, row, source, stop), False)
        return None

    def _step(self, slice_s: float) -> Call | None:
        """A token of each row that can have one, the oldest request's first, as many as fit the slice."""
        costs = self._runner.model.costs
        rows = [(job, row) for job in self._running for row in job.ready()]
        while len(rows) > 1 and costs.decode(len(rows)) > slice_s:
            rows.pop()
        return Call(costs.decode(len(rows)), partial(self._decode, rows), True) if rows else None

    def _read(self, job: AnswerJob, count: int) -> None:
        (reader,) = job.holders
        tokens = job.prompt[job.read : job.read + count]
        costs, started = self._runner.model.costs, self._clock()
        try:
            logits = self._runner.model.prefill(reader.slot, tokens, job.read)
            costs.saw_prefill(count, self._clock() - started)
        except Exception:
            logger.exception("the draft failed to read a prompt of %d tokens", len(job.prompt))
            self._close(job, ERROR)
            return
        self._counts["answer_tokens_read"] += count
        job.read = reader.copied = job.read + count
        if job.reading:
            return
        for row in job.rows:  # all answers begin with what follows the prompt
            self._choose(job, row, logits)
        self._settle(job)

    def _copy(self, row: Row, source: Row, stop: int) -> None:
        self._runner.copy(source.slot, row.slot, stop, row.copied)
        row.copied = stop

    def _decode(self, rows: list[tuple[AnswerJob, Row]]) -> None:
        rows = sorted(rows, key=lambda pair: pair[1].slot)
        costs, started = self._runner.model.costs, self._clock()
        try:
            self._compute(rows)
            costs.saw_decode(len(rows), self._clock() - started)
        except Exception:
            for job, row in rows:  # find the one that fails: the others go on
                if row.ended:
                    continue
                if len(rows) == 1:
                    self._drop(job, row)
                    continue
                try:
                    self._compute([(job, row)])
                except Exception:
                    self._drop(job, row)
        for job in dict.fromkeys(job for job, _ in rows):
            self._settle(job)

    def _compute(self, rows: list[tuple[AnswerJob, Row]]) -> None:
        logits = self._runner.model.decode(
            [row.slot for _, row in rows],
            [row.choices[-1].token for _, row in rows],
            [job.position(row) for job, row in rows],
        )
        self._counts["answer_steps"] += 1
        self._counts["answer_rows"] += len(rows)
        for (job, row), each in zip(rows, logits, strict=True):
            self._choose(job, row, each)

    def _choose(self, job: AnswerJob, row: Row, logits: Logits) -> None:
        """Choose a row's next token; where the answer ends with it, so does the row."""
        try:
            choice = self._choice(logits[: self._vocab_size], row.sampling, job.position(row) + 1, job.request.top_k)
        except BadLogits:
            self._drop(job, row)
            return
        self._counts["answer_tokens"] += 1
        if not job.take(row, choice):
            self._counts["answers"] += 1
            self._release(job, row)

    def _choice(self, logits: Logits, sampling: Sampling, position: int, top_k: int) -> Choice:
        """The token at ``position``, with its candidates at temperature 1."""
        as_asked = sampling.temperature in (0.0, 1.0)
        choice = choose(logits, sampling, position, top_k if as_asked else 0, self._scratch)
        if top_k and not as_asked:
            likely = choose(logits, GREEDY, position, top_k, self._scratch)
            choice.ids, choice.probs = likely.ids, likely.probs
        choice.confidence = self._calibration.confidence(sampling.temperature <= 0.0, choice.margin)
        return choice

    def _drop(self, job: AnswerJob, row: Row) -> None:
        logger.exception("the draft failed on an answer")
        self._counts[f"answer:{ERROR}"] += 1
        job.end(row, reason=ERROR)
        self._release(job, row)
