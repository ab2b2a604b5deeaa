"""What a text mentions: sentences, dates and numbers with their places. Every pattern is linear in the text."""

import calendar
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Literal

from dateutil import parser as dates

MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
MONTH = rf"(?:{MONTHS})[a-z]{{0,6}}\.?"
ISO = r"\d{4}-\d{1,2}-\d{1,2}"
WRITTEN = rf"\d{{1,2}}(?:st|nd|rd|th)?(?: of)? {MONTH},? \d{{4}}|{MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}"
SLASHED = r"\d{1,2}[/.]\d{1,2}[/.]\d{4}"
DATE = re.compile(
    rf"\b(?:(?P<iso>{ISO})|(?P<written>{WRITTEN})|(?P<slashed>{SLASHED})|(?P<month>{MONTH},? \d{{4}}))\b", re.I
)
NUMBER = re.compile(r"(?<![\w.,-])[-+]?(?:\d{1,3}(?:,\d{3}){1,6}|\d{1,30})(?:\.\d{1,30})?(?!\d|[.,]\d)")
NUMBER_COMMA = re.compile(r"(?<![\w.,-])[-+]?(?:\d{1,3}(?:\.\d{3}){1,6}|\d{1,30})(?:,\d{1,30})?(?!\d|[.,]\d)")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\S)|\n+")
NEGATION = re.compile(r"\b(?:not|no|never|neither|nor|without|isn't|wasn't|aren't|doesn't|cannot)\b", re.I)


@dataclass(frozen=True, slots=True)
class NumberMention:
    """A number as written."""

    value: Decimal
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DateMention:
    """A date as written, and every span of days that it can mean: none if there is no such day, two if it is ambiguous."""

    readings: tuple[tuple[date, date], ...]
    text: str
    start: int
    end: int


def sentences(text: str) -> list[str]:
    """Roughly: at line ends and after ``.!?`` with white space."""
    return [part for part in SENTENCE.split(text) if part.strip()]


def blanked(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """The text with spaces in place of ``spans``, so that all else stays where it is."""
    characters = list(text)
    for start, end in spans:
        characters[start:end] = " " * (end - start)
    return "".join(characters)


def find_dates(text: str, order: Literal["day", "month"] | None = None) -> list[DateMention]:
    """Dates with a year. ``order`` says what comes first in 3/4/2024; None: both are readings."""
    found = []
    for match in DATE.finditer(text):
        readings = tuple(dict.fromkeys(_readings(match, order)))
        if match["month"] and not readings:
            continue  # "Marching 1984": no month after all
        found.append(DateMention(readings, match[0], match.start(), match.end()))
    return found


def find_numbers(text: str, decimal: Literal[".", ","] = ".") -> Iterator[NumberMention]:
    """Numbers that are not part of a word, an identifier or a longer row of digits."""
    for match in (NUMBER if decimal == "." else NUMBER_COMMA).finditer(text):
        plain = match[0].replace(",", "") if decimal == "." else match[0].replace(".", "").replace(",", ".")
        try:
            yield NumberMention(Decimal(plain), match[0], match.start(), match.end())
        except InvalidOperation:  # no input is known; one number less is better than none
            continue


def _readings(match: re.Match[str], order: str | None) -> Iterator[tuple[date, date]]:
    text = match[0]
    try:
        if match["iso"]:
            year, month, day = map(int, text.split("-"))
            yield date(year, month, day), date(year, month, day)
            return
        if match["month"]:
            first = dates.parse(text, default=dates.parse("2000-01-01")).date().replace(day=1)
            yield first, first.replace(day=calendar.monthrange(first.year, first.month)[1])
            return
    except (ValueError, OverflowError):
        return
    for day_first in (True, False) if order is None else (order == "day",):
        try:
            read = dates.parse(text.replace(" of ", " "), dayfirst=day_first).date()
        except (ValueError, OverflowError):
            continue
        numbers = [int(part) for part in re.split(r"[/.]", text)] if match["slashed"] else []
        if not numbers or (read.day, read.month) == tuple(numbers[:2] if day_first else numbers[1::-1]):
            yield read, read  # dateutil swaps day and month where only that gives a date; we do not
