"""Whether a text is JSON as RFC 8259 has it."""

import json
from typing import Any, ClassVar, NoReturn

import msgspec

from deployments.evidence.validators.base import VALID, Context, Tag, invalid, unknown
from deployments.evidence.validators.code_blocks import Block, code_of

LANGUAGES = ("json",)
MAX_DIGITS = 4000  # Python refuses longer integers; JSON does not


class JsonSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fenced JSON blocks, or the whole text without them, must each be one JSON value."""

    name: ClassVar[str] = "json_syntax"
    isolated: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    operator_only: ClassVar[frozenset[str]] = frozenset()

    def check(self, text: str, context: Context) -> Tag:
        found = code_of(text, LANGUAGES)
        if not found:
            return unknown("no JSON")
        for block in found:
            try:
                parse(block.code)
            except ValueError as error:
                return objection(block, error)
        return VALID


def parse(text: str) -> Any:
    """The value. NaN, Infinity and text after the value are errors, as the RFC has it.

    Raises:
        ValueError: where it is not JSON, with the position.
        RecursionError: nested deeper than Python goes.
    """
    return json.loads(text, parse_constant=_no_constant, parse_int=_integer)


def objection(block: Block, error: ValueError) -> Tag:
    """The tag of a block that does not parse; one that the text's end cut off is unknown."""
    return invalid(f"not JSON: {error}") if block.closed else unknown(f"the last block is not closed: {error}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)
