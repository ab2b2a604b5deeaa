"""The question set: original questions with answers a program can check, each in five wordings."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import yaml

from scripts.answers_lib import checkers
from scripts.answers_lib.checkers import Check

SHIPPED = Path(__file__).with_name("questions.yaml")
WORDINGS = 5


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One question in its wordings."""

    id: str
    kind: str
    gold: str
    check: Check
    ask: tuple[str, ...]
    text: str = ""  # what the question is about
    code: str = ""  # likewise, a Python program
    options: tuple[str, ...] = ()  # of ``choice``
    compute: str = ""  # a Python expression with the value gold

    def prompt(self, wording: int, instruction: str) -> str:
        """What is sent: text or code, the question, how to answer."""
        about = f"```python\n{self.code}```\n" if self.code else f"{self.text}\n" if self.text else ""
        return f"{about}{self.ask[wording]} {instruction}"

    def read(self, text: str, wording: int = 0) -> str | None:
        """The answer in ``text`` to that wording, in normal form; None where there is none to be found."""
        asked = f"{self.text}\n{self.code}\n{self.ask[wording]}"
        return checkers.read(self.check, text, self.gold, self.options, asked)

    @cached_property
    def right(self) -> str:
        """The reading of a right answer."""
        return checkers.target(self.check, self.gold)


class QuestionSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Questions, and for each kind the sentence that says how to answer."""

    instructions: dict[str, str]
    questions: tuple[Question, ...]

    def prompt(self, question: Question, wording: int) -> str:
        return question.prompt(wording, self.instructions[question.kind])

    def chosen(self, kinds: Sequence[str] | None, each: int | None) -> tuple[Question, ...]:
        """Those of ``kinds`` (None: all), the first ``each`` of every kind (None: all).

        Raises:
            ValueError: no such kind.
        """
        for kind in kinds or ():
            if kind not in self.instructions:
                raise ValueError(f"no kind {kind!r}; known: {', '.join(self.instructions)}")
        found: list[Question] = []
        for kind in self.instructions:
            if kinds is None or kind in kinds:
                found += [question for question in self.questions if question.kind == kind][:each]
        return tuple(found)


def load(path: Path = SHIPPED) -> QuestionSet:
    """Read and check a set.

    Raises:
        ValueError: naming the question and what is wrong with it.
    """
    content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = msgspec.convert(content, QuestionSet)
    seen: set[str] = set()
    for question in found.questions:
        if wrong := _wrong(question, found.instructions, seen):
            raise ValueError(f"{path}: {question.id}: {wrong}")
        seen.add(question.id)
    return found


def _wrong(question: Question, instructions: dict[str, str], seen: set[str]) -> str:
    if question.id in seen:
        return "there are two of that id"
    if question.kind not in instructions:
        return f"no kind {question.kind!r}; known: {', '.join(instructions)}"
    if len(question.ask) != WORDINGS or len(set(question.ask)) != WORDINGS:
        return f"needs {WORDINGS} different wordings"
    if question.read(question.gold) != question.right:
        return f"its own gold answer {question.gold!r} does not pass its check"
    return ""
