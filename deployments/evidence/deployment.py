"""Evidence as a Serve deployment: drafts of whole answers, and checks of answers, each source under its deadline."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.faults import FaultPolicy
from deployments.config.models import Evidence
from deployments.evidence.build import make_length, make_sources
from deployments.evidence.metrics import Metrics
from deployments.evidence.runner import UNKNOWN, Runner, encodable
from deployments.evidence.source import MAX_ANSWER_CHARS, MAX_MESSAGES, MAX_QUESTION_CHARS, Source
from deployments.evidence.validators.build import build_validation
from deployments.evidence.validators.embedded import EmbeddedQueue
from deployments.evidence.validators.registry import Registry
from deployments.evidence.validators.validation import Validation


class EvidenceDeployment:
    """One replica. It alone writes its index: there is never a second one."""

    def __init__(self, spec: dict[str, Any], faults: dict[str, Any], target_model: str) -> None:
        """``spec`` is an :class:`Evidence` and ``faults`` a :class:`FaultPolicy`, both as plain values.

        Raises:
            IndexLocked: another process still has the index after ``faults.evidence_lock_s``.
            RulesError: the rules cannot be read.
            ParameterError: a configured validator cannot be loaded; the message names it.
        """
        settings, policy = Evidence.model_validate(spec), FaultPolicy(**faults)
        self._metrics = Metrics()
        # its processes end with this one
        self._validation = build_validation(settings.validators, policy, self._metrics.tagged)
        self._start(make_sources(settings, policy), target_model, policy)

    @classmethod
    def over(cls, sources: Sequence[Source], target_model: str, faults: FaultPolicy) -> "EvidenceDeployment":
        """The same over given sources, outside Serve."""
        self = cls.__new__(cls)
        registry = Registry()
        self._metrics = Metrics()
        self._validation = Validation(registry, EmbeddedQueue(registry, faults), faults, tagged=self._metrics.tagged)
        self._start(sources, target_model, faults)
        return self

    def _start(self, sources: Sequence[Source], target_model: str, faults: FaultPolicy) -> None:
        length = make_length(target_model)
        self._runners = {source.name: Runner(source, length, faults) for source in sources}

    async def draft(
        self, question: dict[str, Any], sources: list[str] | None, deadline_s: float
    ) -> list[dict[str, Any]]:
        """What the sources would answer, one entry for each of ``sources`` (None: all), in that order.

        Each has ``source``, ``text``, ``tokens`` (empty: nobody tokenised it yet), ``finished``, ``note`` and ``reason``:
        empty for a draft, else why there is none (:mod:`.runner`). Raises ValueError for what is no question.
        """
        asked = question_of(question)
        names = list(self._runners) if sources is None else list(dict.fromkeys(sources))
        return list(await asyncio.gather(*(self._ask(name, asked, deadline_s) for name in names)))

    async def _ask(self, name: str, question: Question, deadline_s: float) -> dict[str, Any]:
        runner = self._runners.get(name)
        if runner is None:
            return entry(name, None, UNKNOWN)
        candidate, reason = await runner.draft(question, deadline_s)
        self._metrics.drafted(name, reason)
        return entry(name, candidate, reason)

    async def learn(self, question: dict[str, Any], answer: str) -> None:
        """Remember an answer for the tenant's later questions. Returns at once; raises ValueError for what is no question."""
        asked = question_of(question)
        if not asked.tenant or not answer.strip() or len(answer) > MAX_ANSWER_CHARS or not encodable(answer):
            return
        for runner in self._runners.values():
            runner.learn(asked, answer)

    async def validate(
        self, texts: list[str], validators: list[dict[str, Any]], budget_s: float, context: dict[str, Any]
    ) -> list[list[dict[str, str]]]:
        """For each text a tag from each validator (:class:`Validation`); a tag that is not there in time is ``unknown``."""
        return await self._validation.validate(texts, validators, budget_s, context)

    async def stats(self) -> dict[str, dict[str, float]]:
        """Sizes and counts of each source, and of ``validation``."""
        found: dict[str, dict[str, float]] = {name: runner.stats() for name, runner in self._runners.items()}
        return {**found, "validation": {name: float(count) for name, count in self._validation.stats().items()}}

    def close(self) -> None:
        """Finish what is being learned and let go of the index."""
        for runner in self._runners.values():
            runner.close()

    def __del__(self) -> None:
        if hasattr(self, "_runners"):
            self.close()


def question_of(question: dict[str, Any]) -> Question:
    """A question off the wire, cut to what sources look at. Raises ValueError naming what is wrong with it."""
    asked = msgspec.convert(question, Question)  # its error is a ValueError
    if asked.length < 1:
        raise ValueError(f"length must be at least 1, got {asked.length}")
    texts = [asked.text, asked.tenant, *(part for message in asked.messages[-MAX_MESSAGES:] for part in message)]
    if not all(map(encodable, texts)):
        raise ValueError("the question is not text")
    return Question(
        text=asked.text[:MAX_QUESTION_CHARS],
        messages=tuple((role, text[:MAX_QUESTION_CHARS]) for role, text in asked.messages[-MAX_MESSAGES:]),
        tenant=asked.tenant,
        length=asked.length,
    )


def entry(name: str, candidate: Candidate | None, reason: str) -> dict[str, Any]:
    """A draft, or why there is none, on the wire."""
    empty = functools.partial(Candidate, source=name, text="", finished=False)
    said = candidate if candidate is not None else empty()
    return {
        "source": name,
        "text": said.text,
        "tokens": list(said.tokens),
        "finished": said.finished,
        "note": said.note,
        "reason": reason,
    }
