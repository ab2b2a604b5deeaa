"""Earlier questions of each tenant and how they were answered, on disk and bounded."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.chain.answer.candidate import Question
from deployments.evidence.index import Index, IndexFull
from deployments.evidence.source import instructions

Floats = npt.NDArray[np.float32]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One question and its answer."""

    question: str
    answer: str
    at: float  # seconds since 1970


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what is remembered. Beyond them, what was used longest ago is forgotten first."""

    answers: int = 256  # of one tenant
    all_answers: int = 20_000
    age_s: float = 30 * 24 * 3600.0
    looked_at: int = 8  # of the nearest questions, until one is the same


class History:
    """Answers in an index whose groups are tenants, so that a search cannot leave its tenant.

    The order of use is kept in memory; after a restart it is the order of learning.
    """

    def __init__(self, index: Index, limits: Limits | None = None, now: Callable[[], float] = time.time) -> None:
        self._index = index
        self._limits = Limits() if limits is None else limits
        self._now = now
        self._lock = threading.Lock()
        self._used: OrderedDict[str, _Known] = OrderedDict()  # by key; the one used last at the end
        self._tenants: dict[str, OrderedDict[str, None]] = {}
        self.evicted = 0
        for tenant, key in index.items():
            held = index.get(key)
            if held is not None:
                self._use(key, _Known(tenant, _decoder.decode(held[0]).at))

    def find(self, question: Question, vector: Floats) -> list[tuple[Answer, float]]:
        """Answers to the tenant's questions nearest to this one, and how near, best first."""
        if not question.tenant:
            return []
        hits = self._index.search(vector, question.tenant, self._limits.looked_at)
        oldest = self._now() - self._limits.age_s
        decoded = [(_decoder.decode(hit.value), hit) for hit in hits if hit.key.startswith(_prefix(question))]
        return [(answer, hit.similarity) for answer, hit in decoded if answer.at >= oldest]

    def used(self, question: Question, answer: Answer) -> None:
        """An answer was of use."""
        key = _key(question, answer.question)
        with self._lock:
            if key in self._used:
                self._use(key, self._used[key])

    def learn(self, question: Question, answer: str, vector: Floats) -> None:
        """Remember an answer; an earlier one to the very same question is replaced. ``vector`` is ``[dimensions]``.

        Raises what :meth:`Index.put` raises, but for a full index, where the oldest is forgotten.
        """
        if not question.tenant:
            return
        key, now = _key(question, question.text), self._now()
        value = _encoder.encode(Answer(question.text, answer, now))
        with self._lock:
            if key not in self._used:
                self._make_room(question.tenant)
            try:
                self._index.put(key, value, vector[None], question.tenant)
            except IndexFull:
                self._evict(next(iter(self._used)))
                self._index.put(key, value, vector[None], question.tenant)
            self._use(key, _Known(question.tenant, now))

    def prune(self) -> None:
        """Forget what is too old."""
        oldest = self._now() - self._limits.age_s
        with self._lock:
            for key in [key for key, known in self._used.items() if known.at < oldest]:
                self._evict(key)

    def _use(self, key: str, known: "_Known") -> None:
        self._used[key] = known
        self._used.move_to_end(key)
        answers = self._tenants.setdefault(known.tenant, OrderedDict())
        answers[key] = None
        answers.move_to_end(key)

    def _make_room(self, tenant: str) -> None:
        """For one more."""
        while len(self._tenants.get(tenant, ())) >= self._limits.answers:
            self._evict(next(iter(self._tenants[tenant])))
        while len(self._used) >= self._limits.all_answers:
            self._evict(next(iter(self._used)))

    def _evict(self, key: str) -> None:
        self._index.delete(key)
        known = self._used.pop(key)
        answers = self._tenants[known.tenant]
        del answers[key]
        if not answers:
            del self._tenants[known.tenant]
        self.evicted += 1

    def close(self) -> None:
        """Let go of the index."""
        self._index.close()

    def stats(self) -> dict[str, float]:
        return {"answers": len(self._used), "tenants": len(self._tenants), "evicted": self.evicted}


@dataclass(frozen=True, slots=True)
class _Known:
    tenant: str
    at: float  # seconds since 1970


def _prefix(question: Question) -> str:
    """Of the keys of a tenant's questions under the same instructions."""
    return hashlib.blake2b(instructions(question) + question.tenant.encode(), digest_size=16).hexdigest()


def _key(question: Question, text: str) -> str:
    return _prefix(question) + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
