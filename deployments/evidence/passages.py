"""A document cut into passages: paragraphs, each with the headings above it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.evidence.sentences import sentence_ends

MAX_CHARS = 1_000  # of one passage; what is longer is cut between sentences. The sentence model reads some 1,200
MAX_HEADINGS_CHARS = 200

_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
_FENCE = re.compile(r"\s*(```+|~~~+)")
_RULE = re.compile(r"\s*([-*_=])(\s*\1){2,}\s*$")  # a line across the page, or under a heading


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document that can stand on its own."""

    headings: tuple[str, ...]  # from the document's title down
    text: str

    @property
    def embedded(self) -> str:
        """What the sentence model reads: a paragraph often says "it" of what its heading names."""
        above = " > ".join(self.headings)[:MAX_HEADINGS_CHARS]
        return f"{above}\n{self.text}" if above else self.text


def passages(text: str) -> Iterator[Passage]:
    """The passages of a Markdown or plain text document, in order."""
    headings: list[tuple[int, str]] = []
    for block in _blocks(text):
        heading = _HEADING.match(block)
        if heading is not None and "\n" not in block:
            level = len(heading[1])
            headings = [(depth, title) for depth, title in headings if depth < level]
            headings.append((level, heading[2]))
            continue
        above = tuple(title for _, title in headings if title)
        for piece in _pieces(block):
            yield Passage(above, piece)


def _blocks(text: str) -> Iterator[str]:
    """Headings, paragraphs, and fenced code. What ends in a colon keeps what it announces."""
    block: list[str] = []
    fence = ""
    blank = False
    for line in text.splitlines():
        opening = _FENCE.match(line)
        if fence:
            block.append(line)
            if opening is not None and opening[1].startswith(fence):
                fence = ""
            continue
        if not line.strip() or _RULE.match(line):
            blank = True
            continue
        heading = _HEADING.match(line) is not None
        if block and (heading or (blank and not block[-1].rstrip().endswith(":"))):
            yield "\n".join(block)
            block = []
        blank = False
        if heading:
            yield line
            continue
        block.append(line.rstrip())
        if opening is not None:
            fence = opening[1]
    if block:
        yield "\n".join(block)


def _pieces(block: str) -> Iterator[str]:
    """The block, between its sentences cut into pieces of at most ``MAX_CHARS``; a longer sentence is cut anywhere."""
    begin = end = 0
    for sentence in sentence_ends(block):
        if sentence - begin > MAX_CHARS and end > begin:
            yield block[begin:end].strip()
            begin = end
        while sentence - begin > MAX_CHARS:
            yield block[begin : begin + MAX_CHARS].strip()
            begin += MAX_CHARS
        end = sentence
    if block[begin:].strip():
        yield block[begin:].strip()
