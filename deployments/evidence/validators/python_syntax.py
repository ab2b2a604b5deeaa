"""Whether Python code compiles. Nothing is executed."""

import warnings
from typing import ClassVar

import msgspec

from deployments.evidence.validators.base import VALID, Context, Tag, invalid, unknown
from deployments.evidence.validators.code_blocks import code_of

LANGUAGES = ("python", "py", "python3")


class PythonSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fenced Python blocks must compile, each by itself; a text without any fence is taken as code from start to end."""

    name: ClassVar[str] = "python_syntax"
    isolated: ClassVar[bool] = True  # the compiler can be made to take seconds, and to exhaust the C stack
    whole: ClassVar[bool] = True
    operator_only: ClassVar[frozenset[str]] = frozenset()

    unfenced: bool = True  # False: a text without fences is unknown, not code

    def check(self, text: str, context: Context) -> Tag:
        found = code_of(text, LANGUAGES)
        if not found:
            return unknown("no Python code")
        if not self.unfenced and "```" not in text and "~~~" not in text:
            return unknown("no fenced code")
        if not any(block.code.strip() for block in found):
            return unknown("no code")
        for index, block in enumerate(found):
            why = _objection(block.code)
            if why:
                where = f"block {index + 1}, " if len(found) > 1 else ""
                return invalid(where + why) if block.closed else unknown(f"the last block is not closed: {why}")
        return VALID


def _objection(code: str) -> str:
    """Why the code does not compile; empty if it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<draft>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, OverflowError) as error:  # null bytes, numbers too large for the compiler
        return str(error)
    return ""
