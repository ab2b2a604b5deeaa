"""The shape of a question: its text with the values taken out, and how an answer repeats them.

Values are numbers, quoted strings and names. "Convert 3 km to miles" and "Convert 40 km to miles" have one shape.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMBER = r"(?<![\w.])[-+]?[$€£¥]?\d+(?:[.,:/-]\d+)*%?"
_QUOTED = r"\"([^\"\n]{1,200})\"|“([^”\n]{1,200})”|`([^`\n]{1,200})`|(?<!\w)'([^'\n]{1,200})'(?!\w)|‘([^’\n]{1,200})’"
_NAME = r"\b[A-Z][\w’-]*(?:[ ][A-Z][\w’-]*)*"
_VALUE = re.compile(f"(?P<number>{_NUMBER})|(?P<quoted>{_QUOTED})|(?P<name>{_NAME})")
_SENTENCE_START = re.compile(r"(?:^|[.!?:]\s|\n)\s*[-*•]?\s*$")
MAX_VALUES = 32  # a question with more is rather a document


@dataclass(frozen=True, slots=True)
class Shape:
    """What is left of a question, and what was taken out of it, in order."""

    pattern: str  # lower case, one space between words, kinds of values in angle brackets that no question contains
    values: tuple[str, ...]  # quoted ones without their quotes


def shape_of(text: str) -> Shape | None:
    """The shape of a question; None where it has more than ``MAX_VALUES`` values."""
    pattern: list[str] = []
    values: list[str] = []
    at = 0
    for start, end, kind, value in _values(text):
        if len(values) == MAX_VALUES:
            return None
        pattern += [text[at:start], f"\0{kind}\0"]
        values.append(value)
        at = end
    pattern.append(text[at:])
    return Shape(" ".join("".join(pattern).lower().split()), tuple(values))


def _values(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Start, end, kind and value of each."""
    for match in _VALUE.finditer(text):
        if match["number"]:
            yield match.start(), match.end(), "number", match["number"]
        elif match["quoted"]:
            yield match.start(), match.end(), "quoted", match["quoted"][1:-1]
        else:
            start, words = match.start(), match[0].split(" ")
            # a sentence begins with a capital whatever it begins with: "Greet Anna", "Does Maria"
            begins = _SENTENCE_START.search(text, 0, start) is not None
            while words and (begins or words[0] == "I"):
                start += len(words.pop(0)) + 1
                begins = False
            if words:
                yield start, match.end(), "name", " ".join(words)


@dataclass(frozen=True, slots=True)
class Template:
    """An answer with the question's values taken out."""

    literals: tuple[str, ...]  # one more than slots
    slots: tuple[frozenset[int], ...]  # places in the question's values that the text here may stand for

    def merged(self, other: "Template") -> "Template | None":
        """What two answers to questions of one shape have in common; None where they differ in more than their values."""
        if self.literals != other.literals:
            return None
        slots = tuple(a & b for a, b in zip(self.slots, other.slots, strict=True))
        return Template(self.literals, slots) if all(slots) else None

    def filled(self, values: tuple[str, ...]) -> str | None:
        """The answer for other values; None where it is not certain which one belongs somewhere."""
        said = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            candidates = {values[place] for place in slot}
            if len(candidates) != 1:
                return None
            said += [candidates.pop(), literal]
        return "".join(said)


def template_of(answer: str, values: tuple[str, ...]) -> Template:
    """The answer with each whole occurrence of one of the question's values, as it is spelled there, taken out."""
    if not values:
        return Template((answer,), ())
    longest_first = sorted(set(values), key=len, reverse=True)
    found = re.compile("|".join(_whole(value) for value in longest_first))
    literals: list[str] = []
    slots: list[frozenset[int]] = []
    at = 0
    for match in found.finditer(answer):
        literals.append(answer[at : match.start()])
        slots.append(frozenset(place for place, value in enumerate(values) if value == match[0]))
        at = match.end()
    return Template((*literals, answer[at:]), tuple(slots))


def _whole(value: str) -> str:
    """A pattern for the value where it is not part of a longer word or number."""
    before = r"(?<![\w.,])" if value[0].isalnum() else ""
    after = r"(?![\w]|[.,]\d)" if value[-1].isalnum() else ""
    return before + re.escape(value) + after
