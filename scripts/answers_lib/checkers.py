"""Reading an answer out of a text, and whether it is the right one. Pure functions; a text that cannot be read is wrong.

A *reading* is the answer itself in one normal form ("43", "yes"), so that two texts can be said to answer alike.
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Literal

Check = Literal["exact", "number", "choice", "contains"]

NUMBER = re.compile(r"(?<![\w.,])[-\N{MINUS SIGN}]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d])")
CONCLUSION = re.compile(
    r"\b(?:answer|result|output|sum|product|difference|quotient|total)(?: \w+){0,6}? (?:is|equals|will be):?|\banswer:|=",
    re.IGNORECASE,
)
OPENING = re.compile(rf"[\s$€`\"']*({NUMBER.pattern})(?: is the\b|\s*[.!\n]|\s*$)")
LEAD = re.compile(
    r"^(?:(?:so|therefore|then|thus),? )?(?:the )?(?:correct |final )?answer(?: is)?:? |^it is |^it's ", re.IGNORECASE
)
ARTICLE = re.compile(r"\b(?:the|a|an)\b ?")


def normal(text: str) -> str:
    """Lower case, single spaces, no punctuation around words, no articles."""
    words = re.sub(r"[^\w\s'-]+", " ", text.lower())
    return " ".join(ARTICLE.sub("", " ".join(words.split())).split()).strip("' -")


def number(text: str, asked: str = "") -> str | None:
    """The number a text settles on, as plain digits.

    After the last ``=`` or "answer is", if there is one. Else numbers that ``asked`` holds are left out where others remain ("There are
    180 minutes in 3 hours"), and it is the one the text opens with ("43 is the sum"), or the last.
    """
    plain = text.replace("**", "").replace("\N{MINUS SIGN}", "-")
    found = list(NUMBER.finditer(plain))
    concluded = [match.end() for match in CONCLUSION.finditer(plain)]
    if concluded and (after := [item for item in found if item.start() >= concluded[-1]]):
        return _digits(after[0][0])
    repeated = {_digits(item[0]) for item in NUMBER.finditer(asked)}
    found = [item for item in found if _digits(item[0]) not in repeated] or found
    if not found:
        return None
    opening = OPENING.match(plain)
    return _digits(found[0][0] if opening and opening.end(1) == found[0].end() else found[-1][0])


def _digits(written: str) -> str:
    value = Decimal(written.replace(",", "").replace("\N{MINUS SIGN}", "-")).normalize()
    return f"{value:f}" if value else "0"


def choice(text: str, options: Sequence[str]) -> str | None:
    """The one of ``options`` that a text names; of several the one it opens with, else the first after "answer is"."""
    told = f" {normal(text)} "
    named = _places(told, options)
    if len(named) == 1 or (named and named[0][0] == 0):
        return named[0][1]
    concluded = told.rfind(" answer is ")
    later = _places(told[concluded:], options) if concluded >= 0 else []
    return later[0][1] if later else None


def _places(told: str, options: Sequence[str]) -> list[tuple[int, str]]:
    return sorted((place, option) for option in options if (place := told.find(f" {normal(option)} ")) >= 0)


def exact(text: str) -> str | None:
    """The first line, without "The answer is", in normal form."""
    lines = [line for line in text.splitlines() if line.strip()]
    return (normal(LEAD.sub("", lines[0].strip())) or None) if lines else None


def contains(text: str, gold: str) -> str | None:
    """The gold answer if a text has it as whole words; else the text's first line, which is another answer."""
    return normal(gold) if f" {normal(gold)} " in f" {normal(text)} " else exact(text)


def read(check: Check, text: str, gold: str, options: Sequence[str] = (), asked: str = "") -> str | None:
    """What ``text`` answers to ``asked``, None where it does not. Only ``contains`` looks at the gold answer."""
    readers: dict[str, Callable[[], str | None]] = {
        "exact": lambda: exact(text),
        "number": lambda: number(text, asked),
        "choice": lambda: choice(text, options),
        "contains": lambda: contains(text, gold),
    }
    return readers[check]()


def target(check: Check, gold: str) -> str:
    """The reading of a right answer."""
    match check:
        case "number":
            return number(gold) or gold
        case "choice":
            return gold
    return normal(gold)
