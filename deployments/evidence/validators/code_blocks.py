"""Fenced code in Markdown."""

import re
import textwrap
from collections.abc import Collection
from dataclasses import dataclass

FENCE = re.compile(r"[ \t]{0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)")


@dataclass(frozen=True, slots=True)
class Block:
    """Code between fences."""

    language: str  # as written after the fence, in lower case; "" where nothing is
    code: str
    closed: bool = True  # False: the text ends before the closing fence


def blocks(text: str) -> list[Block]:
    """Fenced blocks in their order. One pass over the lines."""
    found: list[Block] = []
    fence, language, lines = "", "", list[str]()
    for line in text.splitlines():
        stripped = line.strip()
        if fence:
            if stripped.startswith(fence) and not stripped.strip(fence[0]):
                found.append(Block(language, textwrap.dedent("\n".join(lines)) + "\n"))
                fence, lines = "", []
            else:
                lines.append(line)
        elif (opening := FENCE.match(line)) and "`" not in line[opening.end() :]:
            fence, language = opening[1], opening[2].lower()
    if fence:
        found.append(Block(language, textwrap.dedent("\n".join(lines)) + "\n", closed=False))
    return found


def code_of(text: str, languages: Collection[str]) -> list[Block]:
    """What in ``text`` is code of one of ``languages``: its blocks, else those of no language, else the whole text.

    Empty when every block is of another language.
    """
    found = blocks(text)
    if not found:
        return [Block("", textwrap.dedent(text.strip("\n")) + "\n")]
    named = [block for block in found if block.language in languages]
    return named or [block for block in found if not block.language]
