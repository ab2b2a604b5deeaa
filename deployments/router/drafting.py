"""Collecting drafts of one answer: everybody at once, each with a deadline, and no longer than until two agree."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from deployments.api.answers import MODEL, AnswerPlan, Sources
from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.answer.consensus import Consensus, decide
from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy
from deployments.router.calls import Calls, Plain, Unavailable

logger = logging.getLogger(__name__)

# Why a source gave no draft. The first two are no failures.
NO_MATCH = "no_match"
NOT_NEEDED = "not_needed"  # two others had agreed
DEADLINE = "deadline_missed"
CIRCUIT = "circuit_open"
NO_REPLICA = "no_replica"
RAISED = "raised"
BAD_ANSWER = "bad_answer"
EMPTY = "empty"
HARMLESS = (NO_MATCH, NOT_NEEDED)

GIVEN = "given"  # who drafts that came with a request are from
OWN_TIME = 0.95  # of a deadline: a draft model then answers with what it has, and the rest is for the way back
MOST_CHARACTERS = 16_384  # of a draft

Tell = Callable[[str, Plain], None]  # what happened, and its details
Found = tuple[list[Candidate], dict[str, str]]


class Lie(Exception):
    """An answer that is not what its source promised."""


@dataclass(slots=True)
class Drafts:
    """What there is so far for one request."""

    candidates: list[Candidate] = field(default_factory=list)
    tags: list[list[Plain]] = field(default_factory=list)  # of each candidate that was checked
    reasons: dict[str, str] = field(default_factory=dict)  # who gave no draft, or only part of one, and why
    samples: dict[str, int] = field(default_factory=dict)  # asked of each draft model

    @property
    def invalid(self) -> set[int]:
        return {index for index, tags in enumerate(self.tags) if any(tag.get("tag") == "invalid" for tag in tags)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What sources are asked for one request."""

    question: Question
    prompt: list[int]
    plan: AnswerPlan
    temperature: float
    seed: int
    top_k: int
    stop: list[int]


class Drafting:
    """Asks sources. One for all requests: it remembers who does not answer."""

    def __init__(
        self,
        calls: Calls,
        tokenized: Callable[[Candidate], Candidate],
        vocab_size: int,
        faults: FaultPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self._tokenized, self._vocab_size = calls, tokenized, vocab_size
        self._faults, self._clock = faults, clock
        self._circuits: dict[str, Circuit] = {}

    async def collect(self, asked: Asked, sources: Sources, found: Drafts, tell: Tell) -> Consensus:
        """Add drafts of ``sources`` to ``found`` until two agree, or all have answered or missed their deadline.

        Drafts that the request brought are the first there are. ``tell`` hears of every draft and of every tag when it is there. Never raises for what a source does.
        """
        if not found.candidates:
            for index, text in enumerate(asked.plan.texts):
                candidate = Candidate(source=f"{GIVEN}#{index}", text=text[:MOST_CHARACTERS])
                self._add(candidate, asked.question.length, found, tell)
        tasks = {asyncio.create_task(self._ask(name, call)): name for name, call in self._asks(asked, sources, found)}
        pending = set(tasks)
        try:
            outcome = await self._outcome(asked, found, tell)
            while pending and outcome.outcome != "consensus":
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    candidates, reasons = task.result()
                    found.reasons |= reasons
                    for candidate in candidates:
                        self._add(candidate, asked.question.length, found, tell)
                outcome = await self._outcome(asked, found, tell)
            return outcome
        finally:
            for task in pending:
                task.cancel()
                found.reasons[tasks[task]] = NOT_NEEDED

    async def evidence(self, question: Question, sources: Sequence[str], deadline_s: float) -> Drafts:
        """What these sources without a model have, tokenised; for the token chain, which verifies whatever it is."""
        calls = [self._ask(name, lambda s=name: self._look_up(s, question, deadline_s)) for name in sources]  # type: ignore[misc]
        found = Drafts()
        for candidates, reasons in await asyncio.gather(*calls):
            found.candidates += map(self._tokenized, candidates)
            found.reasons |= reasons
        return found

    def _asks(
        self, asked: Asked, sources: Sources, found: Drafts
    ) -> Iterator[tuple[str, Callable[[], Coroutine[Any, Any, Found]]]]:
        """Calls to be made, by the name of the source. The drafts asked of models are dealt out in turn."""
        models = sources.models
        for place, model in enumerate(models):
            count = len(range(place, asked.plan.k, len(models)))
            if count:
                first = found.samples.get(model, 0)
                found.samples[model] = first + count
                yield f"{MODEL}:{model}", lambda m=model, n=count, f=first: self._write(m, n, f, asked)  # type: ignore[misc]
        for source in sources.evidence:
            yield source, lambda s=source: self._look_up(s, asked.question, self._faults.answer_evidence_s)  # type: ignore[misc]

    async def _ask(self, name: str, call: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
        circuit = self._circuits.setdefault(name, Circuit(self._faults))
        if not circuit.allows(self._clock()):
            return [], {name: CIRCUIT}
        try:
            found = await call()
        except Exception as error:
            reason = reason_of(error)
            if reason in (RAISED, BAD_ANSWER):
                logger.warning("%s gave no draft: %r", name, error)
            if reason != NO_REPLICA:  # known without a wait
                circuit.failure(self._clock())
            return [], {name: reason}
        circuit.success()
        return found

    async def _write(self, model: str, count: int, first: int, asked: Asked) -> Found:
        deadline_s = self._faults.answer_drafts_s
        request = {
            "prompt": asked.prompt,
            "k": count,
            "length": asked.question.length,
            "temperature": asked.temperature,
            "seed": (asked.seed + first) % (1 << 63),
            "top_k": asked.top_k,
            "stop": asked.stop,
            "tenant": asked.question.tenant,
            "deadline_s": OWN_TIME * deadline_s,
        }
        answers = await self._calls.write(model, request, deadline_s)
        if len(answers) > count:
            raise Lie(f"{len(answers)} answers, not {count}")
        candidates, reasons = [], {}
        for index, answer in enumerate(answers, first):
            name = f"{MODEL}:{model}#{index}"
            written = msgspec.convert(answer, Written)
            if written.reason:
                reasons[name] = written.reason
            elif not written.tokens:
                reasons[name] = EMPTY
            if written.tokens:
                candidates.append(written.candidate(name, self._vocab_size, asked.question.length))
        return candidates, reasons

    async def _look_up(self, source: str, question: Question, deadline_s: float) -> Found:
        entries = await self._calls.draft(msgspec.to_builtins(question), source, deadline_s)
        if len(entries) != 1:
            raise Lie(f"{len(entries)} entries, not 1")
        found = msgspec.convert(entries[0], LookedUp)
        if found.reason or not found.text.strip():
            return [], {source: found.reason or NO_MATCH}
        if len(found.text) > MOST_CHARACTERS:
            raise Lie(f"{len(found.text)} characters")
        return [Candidate(source=source, text=found.text, finished=found.finished, note=found.note)], {}

    def _add(self, candidate: Candidate, length: int, found: Drafts, tell: Tell) -> None:
        candidate = shortened(self._tokenized(candidate), length)
        if not candidate.text.strip() or not candidate.tokens:
            found.reasons[candidate.source] = EMPTY
            return
        found.candidates.append(candidate)
        tell("draft", {"index": len(found.candidates) - 1, **as_told(candidate)})

    async def _outcome(self, asked: Asked, found: Drafts, tell: Tell) -> Consensus:
        await self._tag(asked, found, tell)
        # some hundred milliseconds for many long drafts: not in the event loop
        return await asyncio.to_thread(
            decide, found.candidates, asked.plan.thresholds, vocab_size=self._vocab_size, invalid=found.invalid
        )

    async def _tag(self, asked: Asked, found: Drafts, tell: Tell) -> None:
        """Let validators look at the drafts they have not seen; what they do not say within their budget is unknown."""
        new = found.candidates[len(found.tags) :]
        if not new or not asked.plan.validators:
            return
        context = {
            "question": asked.question.text,
            "tenant": asked.question.tenant,
            "finished": [candidate.finished for candidate in new],
        }
        try:
            rows = await self._calls.validate(
                [candidate.text for candidate in new], asked.plan.validators, self._faults.answer_tags_s, context
            )
            tags = msgspec.convert(rows, list[list[Tag]])
            if len(tags) != len(new):
                raise Lie(f"tags of {len(tags)} texts, not {len(new)}")
        except Exception as error:
            reason = reason_of(error)
            if reason in (RAISED, BAD_ANSWER):
                logger.warning("drafts could not be validated: %r", error)
            found.reasons["validators"] = reason
            tags = [[Tag(str(spec["name"]), "unknown", reason) for spec in asked.plan.validators] for _ in new]
        for of_draft in tags:
            found.tags.append([msgspec.to_builtins(tag) for tag in of_draft])
            tell("tags", {"index": len(found.tags) - 1, "tags": found.tags[-1]})


class Written(msgspec.Struct, frozen=True):
    """One answer of a draft model, off the wire."""

    tokens: list[int]
    top_ids: bytes
    top_probs: bytes
    finished: bool
    reason: str = ""

    def candidate(self, source: str, vocab_size: int, length: int) -> Candidate:
        """Raises Lie for what cannot be."""
        count = len(self.tokens)
        if count > length or not all(0 <= token < vocab_size for token in self.tokens):
            raise Lie(f"{source}: {count} tokens, or some outside the vocabulary")
        width, rest = divmod(len(self.top_ids), 4 * count)
        if rest or len(self.top_probs) != 2 * count * width:
            raise Lie(f"{source}: {len(self.top_ids)} and {len(self.top_probs)} bytes for {count} tokens")
        ids = np.frombuffer(self.top_ids, "<i4").reshape(count, width) if width else None
        probs = np.frombuffer(self.top_probs, "<f2").reshape(count, width).astype(np.float32) if width else None
        tokens = tuple(self.tokens)
        return Candidate(source=source, text="", tokens=tokens, top_ids=ids, top_probs=probs, finished=self.finished)


class LookedUp(msgspec.Struct, frozen=True):
    """One entry of the evidence deployment, off the wire."""

    text: str = ""
    finished: bool = True
    note: str = ""
    reason: str = ""


class Tag(msgspec.Struct, frozen=True):
    """What one validator says of one draft."""

    validator: str
    tag: str
    why: str = ""


def reason_of(error: BaseException) -> str:
    """The label of a failed call."""
    if isinstance(error, Unavailable):
        return NO_REPLICA
    if isinstance(error, TimeoutError):
        return DEADLINE
    return BAD_ANSWER if isinstance(error, Lie | msgspec.ValidationError) else RAISED


def shortened(candidate: Candidate, length: int) -> Candidate:
    """At most ``length`` tokens of it."""
    if len(candidate.tokens) <= length:
        return candidate
    ends = candidate.ends[:length]
    return replace(
        candidate, tokens=candidate.tokens[:length], text=candidate.text[: ends[-1]], ends=ends, finished=False
    )


def as_told(candidate: Candidate) -> Plain:
    """A draft as traces show it."""
    return {
        "source": candidate.source,
        "text": candidate.text,
        "tokens": len(candidate.tokens),
        "finished": candidate.finished,
        "note": candidate.note,
    }
