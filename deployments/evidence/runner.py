"""Asks one source under a deadline, holds what it says against what it may say, and counts what comes of it."""

import asyncio
import logging
import time
from collections import Counter

from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy
from deployments.evidence.sentences import Length
from deployments.evidence.source import MAX_ANSWER_CHARS, Source
from deployments.evidence.threads import Busy, Threads

logger = logging.getLogger(__name__)

# Why there is no draft. All but the first are faults of the source or of its load, and counted as such.
NO_MATCH = "no_match"
DEADLINE = "deadline_missed"
CIRCUIT = "circuit_open"
BUSY = "busy"
RAISED = "raised"
WRONG_TYPE = "wrong_type"
NOT_TEXT = "not_text"
TOO_LONG = "too_long"
UNKNOWN = "unknown_source"

_NOTE_CHARS = 200


class Runner:
    """One source and its threads. Used from one event loop."""

    def __init__(self, source: Source, length: Length, faults: FaultPolicy) -> None:
        self.name = source.name
        self._source = source
        self._length = length
        self._faults = faults
        self._circuit = Circuit(faults)
        self._drafting = Threads(f"draft-{self.name}", faults.evidence_threads, faults.evidence_queue)
        self._learning = Threads(f"learn-{self.name}", 1, faults.evidence_learn_queue)
        self._counts: Counter[str] = Counter()
        self._time_s = 0.0

    async def draft(self, question: Question, deadline_s: float) -> tuple[Candidate | None, str]:
        """A draft, or why there is none. Returns within ``deadline_s`` and ``faults.evidence_deadline_s``."""
        began = time.monotonic()
        candidate, reason = await self._draft(question, min(deadline_s, self._faults.evidence_deadline_s))
        self._time_s += time.monotonic() - began
        self._counts["drafts" if candidate is not None else f"miss:{reason}"] += 1
        return candidate, reason

    async def _draft(self, question: Question, deadline_s: float) -> tuple[Candidate | None, str]:
        began = time.monotonic()
        if deadline_s <= 0:
            return None, DEADLINE
        if not self._circuit.allows(began):
            return None, CIRCUIT
        try:
            call = self._drafting.submit(lambda: self._ask(question), began + deadline_s)
        except Busy:
            return None, BUSY
        try:
            candidate, reason = await asyncio.wait_for(asyncio.wrap_future(call), deadline_s)
        except TimeoutError:
            candidate, reason = None, DEADLINE
        if reason in ("", NO_MATCH):
            self._circuit.success()
        else:
            self._circuit.failure(time.monotonic())
        return candidate, reason

    def _ask(self, question: Question) -> tuple[Candidate | None, str]:
        """Runs on a thread of the source."""
        try:
            said = self._source.draft(question)
        except Exception:
            logger.warning("source %s failed", self.name, exc_info=True)
            return None, RAISED
        if said is None:
            return None, NO_MATCH
        return self._checked(said, question)

    def _checked(self, said: object, question: Question) -> tuple[Candidate | None, str]:
        """The draft under this source's name and cut to the length asked for, or what is wrong with it."""
        if not isinstance(said, Candidate):
            return None, WRONG_TYPE
        if not isinstance(said.text, str) or not isinstance(said.note, str) or not isinstance(said.finished, bool):
            return None, WRONG_TYPE
        if len(said.text) > MAX_ANSWER_CHARS:
            return None, TOO_LONG
        if not encodable(said.text) or not encodable(said.note):
            return None, NOT_TEXT
        text, whole = self._length.cut(said.text, question.length)
        if not text:
            return None, NO_MATCH
        return Candidate(
            source=self.name, text=text, finished=whole and said.finished, note=said.note[:_NOTE_CHARS]
        ), ""

    def learn(self, question: Question, answer: str) -> None:
        """Let the source remember an answer, some time after this call; it is forgotten where too many wait."""
        try:
            self._learning.submit(lambda: self._teach(question, answer))
        except Busy:
            self._counts[f"forgotten:{BUSY}"] += 1

    def _teach(self, question: Question, answer: str) -> None:
        try:
            self._source.learn(question, answer)
        except Exception:
            logger.warning("source %s could not learn", self.name, exc_info=True)
            self._counts[f"forgotten:{RAISED}"] += 1
        else:
            self._counts["learned"] += 1

    def stats(self) -> dict[str, float]:
        """``drafts``, ``miss:REASON``, ``learned``, ``forgotten:REASON``, calls under way, and the source's own."""
        asked = sum(count for name, count in self._counts.items() if name == "drafts" or name.startswith("miss:"))
        return {
            **self._source.stats(),
            **self._counts,
            "mean_ms": 1000 * self._time_s / asked if asked else 0.0,
            "working": self._drafting.working,
            "learning": self._learning.working,
            "circuit_open": float(self._circuit.open),
        }

    def close(self) -> None:
        """Finish what is being learned, within ``faults.drain_timeout_s``, and close the source."""
        self._drafting.close()
        self._learning.close(self._faults.drain_timeout_s)
        self._source.close()


def encodable(text: str) -> bool:
    """Whether the string is text: no half of a surrogate pair, no NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
