"""A validator of the operator's own: a Python function named by its import path."""

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from deployments.evidence.validators.base import VALID, Context, Tag, invalid, unknown

Function = Callable[..., Any]


class Custom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``function(text, context, **parameters)`` returns True (valid), False (invalid), None (unknown), or such a value's
    name with a reason: ``("invalid", "rude")``. Only the configuration can name one; a request names the configured validator.
    """

    name: ClassVar[str] = "custom"
    isolated: ClassVar[bool] = True  # nobody knows what it does
    whole: ClassVar[bool] = False
    operator_only: ClassVar[frozenset[str]] = frozenset({"function", "parameters"})

    function: str  # "package.module:function"
    parameters: dict[str, Any] = {}

    def __post_init__(self) -> None:
        module, colon, name = self.function.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
            raise ValueError(f"function: {self.function!r} must be package.module:function")

    def check(self, text: str, context: Context) -> Tag:
        return tag_of(load(self.function)(text, dict(context), **self.parameters), self.function)


@lru_cache(maxsize=256)
def load(function: str) -> Function:
    """Import it. This runs the operator's code, so only validator processes do.

    Raises:
        ValueError: naming the function and what went wrong.
    """
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ValueError(f"{function} cannot be loaded: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ValueError(f"{function} is not callable")
    return found  # type: ignore[no-any-return]


def tag_of(value: Any, function: str) -> Tag:
    """What the function returned, as a tag."""
    match value:
        case Tag():
            return value
        case True:
            return VALID
        case False:
            return invalid(f"{function} says so")
        case None:
            return unknown(f"{function} cannot tell")
        case ("valid" | "invalid" | "unknown" as tag, str(why)):
            return Tag(tag, why)
    raise TypeError(
        f"{function} returned {type(value).__name__}; wanted True, False, None or a pair such as ('invalid', why)"
    )
