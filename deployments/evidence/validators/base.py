"""What a validator is: a pure, bounded look at a text that ends in a tag."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import msgspec

Verdict = Literal["valid", "invalid", "unknown"]
Context = Mapping[str, Any]  # "question": str, "today": "YYYY-MM-DD", "finished": bool; all optional

MAX_TEXT = 16 * 1024  # characters, the router's bound of a draft
MAX_WHY = 240


class Tag(msgspec.Struct, frozen=True):
    """What a validator thinks of a text. ``unknown`` is neither praise nor blame: it could not tell, or not in time."""

    tag: Verdict
    why: str = ""
    failure: str = ""  # why there is no verdict, in one word for counting ("raised", "hung", …); "" when there is one

    def __post_init__(self) -> None:
        if len(self.why) > MAX_WHY:
            msgspec.structs.force_setattr(self, "why", self.why[: MAX_WHY - 1] + "…")


VALID = Tag("valid")


def invalid(why: str) -> Tag:
    return Tag("invalid", why)


def unknown(why: str, failure: str = "") -> Tag:
    return Tag("unknown", why, failure)


class ParameterError(ValueError):
    """A validator that does not exist or was given what it does not take; the message names it and what there is."""


class Validator(Protocol):
    """One kind of check with its parameters."""

    name: ClassVar[str]
    isolated: ClassVar[bool]  # whether it must run where it can be killed: it may hang, crash or hold the interpreter
    whole: ClassVar[bool]  # whether it judges the text as a whole, so that a cut one proves nothing
    operator_only: ClassVar[frozenset[str]]  # parameters that the configuration may set and a request may not

    def check(self, text: str, context: Context) -> Tag:
        """Judge ``text``, at most :data:`MAX_TEXT` characters. What it raises counts as unknown."""


def judge(validator: Validator, text: str, context: Context) -> Tag:
    """:meth:`Validator.check` with its bounds: long texts and exceptions are unknown, and so is a cut text found wanting.

    A validator that ``raised`` or ``lied`` (returned what is no tag) says so in the tag's ``failure``.
    """
    if len(text) > MAX_TEXT:
        return unknown(f"text of {len(text)} characters; at most {MAX_TEXT} are checked")
    try:
        tag = validator.check(text, context)
    except (RecursionError, MemoryError) as error:
        return unknown(f"too deeply nested ({type(error).__name__})")
    except Exception as error:
        return unknown(f"{type(error).__name__}: {error}", "raised")
    if not isinstance(tag, Tag):
        return unknown(f"returned {type(tag).__name__}, which is no tag", "lied")
    if tag.tag == "invalid" and validator.whole and context.get("finished") is False:
        return unknown(f"the draft was cut: {tag.why}")
    return tag
