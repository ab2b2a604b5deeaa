"""Is an answer right? Pure, and strict only in what was asked: small models like to say more than the answer."""

import ast
import json
import re
from typing import Any

from scripts.calibrate_lib.item_sets import Item

_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def score(item: Item, text: str) -> bool | None:
    """Whether ``text`` answers ``item``; None where the item has no right answer."""
    match item.check:
        case "none":
            return None
        case "number":
            return number(text) == float(item.gold)
        case "field":
            return says(text, item.gold) and not any(says(text, other) for other in item.others)
        case "python":
            return set(item.needs) <= defined(code(text))
        case "json":
            return _has_keys(code(text), item.needs)


def answer(item: Item, text: str) -> str:
    """What of ``text`` counts, for comparing two answers: case, space and talk around a number or a block of code do not."""
    match item.check:
        case "number":
            return str(number(text))
        case "python":
            return "\n".join(line.rstrip() for line in code(text).strip().splitlines())
        case "json":
            return _canonical_json(code(text))
    return " ".join(text.lower().split())


def number(text: str) -> float | None:
    """The last number in ``text``; None without one. ``1,200`` is a thousand two hundred."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return float(found[-1].replace(",", ""))
    except ValueError:  # a date or a version: 1.2.3
        return None


def says(text: str, words: str) -> bool:
    """Whether ``words`` occur in ``text`` as a whole: ``4`` is neither in ``14`` nor in ``4.5``."""
    pattern = rf"(?<![\w.:-]){re.escape(words.lower())}(?!\w|[.:,-]\d)"
    return re.search(pattern, text.lower()) is not None


def code(text: str) -> str:
    """The first fenced block, also one that was not closed; the whole text where there is none."""
    fenced = _FENCE.search(text)
    return fenced.group(1) if fenced else text


def defined(source: str) -> set[str]:
    """Functions and classes that Python ``source`` defines at its top level; none where it does not parse."""
    try:
        tree = ast.parse(source.strip("\n"))
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def _json(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return None


def _has_keys(source: str, needs: tuple[str, ...]) -> bool:
    value = _json(source)
    return isinstance(value, dict) and set(needs) <= set(value)


def _canonical_json(source: str) -> str:
    value = _json(source)
    return json.dumps(value, sort_keys=True) if value is not None else " ".join(source.split())
