"""Templates: a question of the same shape was answered before, so the answer may have the same shape, too.

One earlier answer proves nothing: "Is 7 prime?" was answered "Yes". Two earlier questions with different values whose answers
differ in nothing but those values do. A question with the very same values gets its last answer.
"""

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deployments.chain.answer.candidate import Candidate, Question
from deployments.evidence.shape import Shape, Template, shape_of, template_of
from deployments.evidence.source import MAX_ANSWER_CHARS, instructions, standalone

Key = tuple[bytes, str]  # digest of the system messages, pattern of the question


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what is remembered, in memory."""

    tenants: int = 1_000  # the one used longest ago is forgotten first
    shapes: int = 256  # of one tenant; the one used longest ago is forgotten first
    answers: int = 4  # of one shape; the oldest is forgotten first
    answer_chars: int = 4_000  # longer answers are not remembered
    turns: int = 16  # of the conversation itself, only so many of its last answers are looked at


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer and the values of its question."""

    values: tuple[str, ...]
    answer: str
    template: Template


class TemplateSource:
    """Drafts from the conversation itself and from what the tenant asked before."""

    name = "templates"

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = Limits() if limits is None else limits
        self._tenants: OrderedDict[str, OrderedDict[Key, deque[Answered]]] = OrderedDict()
        self._lock = threading.Lock()

    def draft(self, question: Question) -> Candidate | None:
        shape = shape_of(question.text)
        if shape is None or not shape.pattern:
            return None
        here = list(self._conversation(question, shape))
        known = [*self._remembered(question, shape), *here]
        text = same_values(known, shape) or same_shape(known, shape)
        if text is None:
            return None
        where = "this conversation" if here else "earlier answers"
        return Candidate(source=self.name, text=text, note=f"shape of {len(known)} answers, {where}")

    def _remembered(self, question: Question, shape: Shape) -> list[Answered]:
        """Oldest first."""
        if not question.tenant or not standalone(question):
            return []
        with self._lock:
            shapes = self._tenants.get(question.tenant)
            key = (instructions(question), shape.pattern)
            if shapes is None or key not in shapes:
                return []
            self._tenants.move_to_end(question.tenant)
            shapes.move_to_end(key)
            return list(shapes[key])

    def _conversation(self, question: Question, shape: Shape) -> Iterator[Answered]:
        """Earlier answers in this conversation to questions of this shape, oldest first."""
        turns = question.messages[-2 * self._limits.turns - 1 :]
        for (asker, asked), (answerer, answer) in itertools.pairwise(turns):
            if asker == "user" and answerer == "assistant" and len(answer) <= self._limits.answer_chars:
                earlier = shape_of(asked)
                if earlier is not None and earlier.pattern == shape.pattern:
                    yield Answered(earlier.values, answer, template_of(answer, earlier.values))

    def learn(self, question: Question, answer: str) -> None:
        if not question.tenant or not standalone(question) or not answer.strip():
            return
        shape = shape_of(question.text)
        if shape is None or len(answer) > min(self._limits.answer_chars, MAX_ANSWER_CHARS):
            return
        answered = Answered(shape.values, answer, template_of(answer, shape.values))
        with self._lock:
            shapes = self._tenants.setdefault(question.tenant, OrderedDict())
            self._tenants.move_to_end(question.tenant)
            key = (instructions(question), shape.pattern)
            answers = shapes.setdefault(key, deque(maxlen=self._limits.answers))
            shapes.move_to_end(key)
            for same in [known for known in answers if known.values == shape.values]:
                answers.remove(same)
            answers.append(answered)
            while len(shapes) > self._limits.shapes:
                shapes.popitem(last=False)
            while len(self._tenants) > self._limits.tenants:
                self._tenants.popitem(last=False)

    def stats(self) -> dict[str, float]:
        with self._lock:
            tenants = list(self._tenants.values())
            return {"tenants": len(tenants), "shapes": sum(len(shapes) for shapes in tenants)}

    def close(self) -> None:
        """Nothing is held."""


def same_values(known: Sequence[Answered], shape: Shape) -> str | None:
    """The last answer to the very same question."""
    return next((one.answer for one in reversed(known) if one.values == shape.values), None)


def same_shape(known: Sequence[Answered], shape: Shape) -> str | None:
    """What the last answers say about these values, where two for different values agree in all but those."""
    if not shape.values or len(known) < 2:
        return None
    latest = known[-1]
    for earlier in reversed(known[:-1]):
        template = latest.template.merged(earlier.template)
        if template is not None and earlier.values != latest.values:
            return template.filled(shape.values)
    return None
