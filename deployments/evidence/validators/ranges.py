"""Whether the numbers and dates a text mentions lie where they should."""

import re
from datetime import date, timedelta
from decimal import Decimal
from typing import ClassVar, Literal

import msgspec

from deployments.evidence.validators.base import VALID, Context, Tag, invalid, unknown
from deployments.evidence.validators.mentions import (
    DateMention,
    NumberMention,
    blanked,
    find_dates,
    find_numbers,
    sentences,
)

RELATIVE = re.compile(r"today(?:([+-])(\d{1,5}))?")
MAX_RULES = 16
SPACES = 4  # between a number and its unit


class NumberRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers with ``unit`` directly after (or before) them, in sentences with ``word``; without either, all numbers."""

    min: float | None = None
    max: float | None = None
    integer: bool = False
    unit: str = ""  # "%", "kg", "€"
    word: str = ""  # "discount"

    def __post_init__(self) -> None:
        if self.min is None and self.max is None and not self.integer:
            raise ValueError("numbers: a rule needs min, max or integer")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"numbers: min {self.min:g} is above max {self.max:g}")

    def applies(self, sentence: str) -> bool:
        return not self.word or re.search(rf"\b{re.escape(self.word)}\b", sentence, re.IGNORECASE) is not None

    def concerns(self, sentence: str, mention: NumberMention) -> bool:
        """Whether it has the unit, at most a few spaces away."""
        if not self.unit:
            return True
        cut = len(self.unit)
        after = sentence[mention.end : mention.end + cut + SPACES].lstrip(" ")
        before = sentence[max(0, mention.start - cut - SPACES) : mention.start].rstrip(" ")
        follows = after[:cut].lower() == self.unit.lower() and not (
            self.unit[-1].isalpha() and after[cut : cut + 1].isalpha()
        )
        return follows or before.lower().endswith(self.unit.lower())

    def objection(self, mention: NumberMention) -> str:
        if self.min is not None and mention.value < Decimal(str(self.min)):
            return f"{mention.text} is below {self.min:g}"
        if self.max is not None and mention.value > Decimal(str(self.max)):
            return f"{mention.text} is above {self.max:g}"
        if self.integer and mention.value != mention.value.to_integral_value():
            return f"{mention.text} is not an integer"
        return ""


class DateRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dates with a year. A bound is ``YYYY-MM-DD``, ``today``, or ``today+30`` (days)."""

    min: str | None = None
    max: str | None = None
    order: Literal["day", "month"] | None = (
        None  # of 3/4/2024; None: a date that reads two ways is unknown where it matters
    )

    def __post_init__(self) -> None:
        for value in (self.min, self.max):
            if value is not None:
                bound(value, date(2000, 1, 1))

    def objection(self, mention: DateMention, today: date) -> str | None:
        """Why not; empty if it fits; None where that depends on how it is read."""
        if not mention.readings:
            return f"{mention.text}: there is no such day"
        found = {self._outside(first, last, today) for first, last in mention.readings}
        if "" in found:
            return "" if len(found) == 1 else None
        return f"{mention.text} is {sorted(found)[0]}"

    def _outside(self, first: date, last: date, today: date) -> str:
        if self.min is not None and last < (least := bound(self.min, today)):
            return f"before {least}"
        if self.max is not None and first > (latest := bound(self.max, today)):
            return f"after {latest}"
        return ""


class Ranges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every number that a rule concerns must lie in its range, every date in ``dates``. A text with neither is unknown."""

    name: ClassVar[str] = "ranges"
    isolated: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    operator_only: ClassVar[frozenset[str]] = frozenset()

    numbers: tuple[NumberRange, ...] = ()
    dates: DateRange | None = None
    decimal: Literal[".", ","] = "."

    def __post_init__(self) -> None:
        if not self.numbers and self.dates is None:
            raise ValueError("ranges: needs numbers or dates")
        if len(self.numbers) > MAX_RULES:
            raise ValueError(f"numbers: at most {MAX_RULES} rules")

    def check(self, text: str, context: Context) -> Tag:
        today = date.fromisoformat(context["today"]) if "today" in context else date.today()
        seen = 0
        doubt = ""
        for sentence in sentences(text):
            mentioned = find_dates(sentence, self.dates.order if self.dates else None)
            for mention in mentioned if self.dates is not None else ():
                seen += 1
                why = self.dates.objection(mention, today) if self.dates is not None else ""
                if why:
                    return invalid(why)
                doubt = f"{mention.text} can be read two ways" if why is None else doubt
            rules = [rule for rule in self.numbers if rule.applies(sentence)]
            # the numbers inside a date are none of their own
            rest = blanked(sentence, ((mention.start, mention.end) for mention in mentioned)) if rules else ""
            for number in find_numbers(rest, self.decimal):
                for rule in rules:
                    if rule.concerns(sentence, number):
                        seen += 1
                        if why := rule.objection(number):
                            return invalid(why)
        if doubt:
            return unknown(doubt)
        return VALID if seen else unknown("nothing in it has a range")


def bound(text: str, today: date) -> date:
    """``YYYY-MM-DD``, ``today``, ``today-7``.

    Raises:
        ValueError: anything else.
    """
    relative = RELATIVE.fullmatch(text)
    try:
        if relative is None:
            return date.fromisoformat(text)
        days = int(relative[2] or 0)
        return today + timedelta(days=-days if relative[1] == "-" else days)
    except (ValueError, OverflowError):
        raise ValueError(f"dates: {text!r} is no bound; write YYYY-MM-DD, today, or today+30") from None
