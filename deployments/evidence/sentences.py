"""Where sentences end, and how much of a text fits into a number of tokens."""

import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

CHARS_A_TOKEN = 3  # of English and code, with a vocabulary of tens of thousands; rather too few
MAX_CHARS_A_TOKEN = 64  # longer tokens are runs of spaces or dashes

_END = re.compile(r"[.!?…][\"'”’)\]]*(?=\s|$)|[。！？]|\n\s*\n|(?<=[^\s])\n(?=\s*(?:[-*+•]|\d+[.)])\s)")
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|cf|vs|etc|approx|no|nr|fig|art|sec|dr|mr|mrs|ms|prof|st)|\b[A-Z])\.$", re.I
)
_INITIAL = 16  # characters looked back for an abbreviation


def sentence_ends(text: str) -> Iterator[int]:
    """Offsets just behind each sentence, paragraph or list item, in order; the end of the text is always the last."""
    last = 0
    for match in _END.finditer(text):
        end, dot = match.end(), match.start() + 1
        if text[dot - 1] == "." and _ABBREVIATION.search(text[max(0, dot - _INITIAL) : dot]):
            continue
        if end < len(text) and text[last:end].strip():
            yield end
            last = end
    yield len(text)


class Length:
    """Measures text in the target's tokens."""

    def __init__(self, tokenizer: Path | None) -> None:
        """``tokenizer`` is the target's ``tokenizer.json``; without one, tokens are estimated from characters."""
        self._tokenizer = Tokenizer.from_file(str(tokenizer)) if tokenizer is not None and tokenizer.is_file() else None

    def cut(self, text: str, tokens: int) -> tuple[str, bool]:
        """The whole sentences of ``text`` that fit into ``tokens``, and whether that is all of it.

        Where not even the first sentence fits, as many words of it as do; the text is never empty for ``tokens`` >= 1
        unless it was.
        """
        text = text.strip()
        limit = self._fitting(text, tokens)
        if limit >= len(text):
            return text, True
        end = 0
        for sentence in sentence_ends(text):
            if sentence > limit:
                break
            end = sentence
        if not end:
            end = limit
            if text[limit - 1].isalnum() and text[limit].isalnum():
                end = max(text.rfind(" ", 0, limit), text.rfind("\n", 0, limit))
            end = end if end > 0 else limit
        return text[:end].rstrip(), False

    def _fitting(self, text: str, tokens: int) -> int:
        """How many characters of the text are covered by its first ``tokens`` tokens."""
        if self._tokenizer is None:
            return tokens * CHARS_A_TOKEN
        beginning = text[: (tokens + 1) * MAX_CHARS_A_TOKEN]  # reading the rest could not change where the cut is
        offsets = self._tokenizer.encode(beginning, add_special_tokens=False).offsets
        return int(offsets[tokens - 1][1]) if len(offsets) > tokens else len(beginning)
