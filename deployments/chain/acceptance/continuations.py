"""What is compared where the draft says another token than the target: the words that differ, in the text around them.

At a mismatch the target has said one token of its own. What it draws at later positions is conditioned on the draft's token,
so how it would have gone on by itself is not known. It is taken to go on as the draft does::

    draft's    … before |draft[t]| draft[t+1:] …
    target's   … before |own[t]  | draft[t+1:] …

or, where its token comes a little later in the draft, to leave out what is before that, if those are words that say little
(``|to improve|`` against ``|improve|``): others would be additions that the target never made. Both are widened to whole words. Where a word reaches the end of what is known, behind the draft is the target's own next token;
if the word may go on even behind that, the two are not comparable.
"""

import re
from collections.abc import Callable, Sequence

Phrase = tuple[str, str, str]  # what comes before, the words that are meant, what comes after
Decode = Callable[[Sequence[int]], str]

BEFORE = 16  # tokens of text before a mismatch that are looked at: the current line
AFTER = 8  # tokens of the draft behind it
SKIPPED = 2  # tokens of the draft the target may leave out
FILLERS = frozenset(
    {"a", "an", "the", "to", "of", "that", "which", "who", "also", "just", "so", "then", "very", "quite", "really"}
)
BROKEN = "\ufffd"  # half a character

_LETTERS_BEFORE = re.compile(r"[\w'’-]+$")
_LETTERS_AFTER = re.compile(r"[\w'’-]+")


def continuations(
    decode: Decode, committed: Sequence[int], draft: Sequence[int], offset: int, own: int, behind: int | None
) -> tuple[Phrase, Phrase] | None:
    """The draft's and the target's phrase at ``draft[offset]``, where the target drew ``own``; None: not comparable.

    ``committed`` are (at least the last ``BEFORE``) tokens before the draft, ``behind`` is the target's draw behind the whole
    draft, None if that ends the answer. Not comparable are words without a letter (layout, punctuation), cut-off words and
    characters, and whatever a tokenizer does not decode piece by piece.
    """
    held = [*committed[-BEFORE:], *draft[:offset]]
    cut = len(held) > BEFORE or len(committed) > BEFORE
    held = held[-BEFORE:]
    skipped = _skipped(decode, draft, offset, own)
    first = offset + skipped + 1
    rest = [*draft[first : first + AFTER]]
    ended = False
    if first + AFTER >= len(draft):
        rest, ended = (rest, True) if behind is None else ([*rest, behind], False)

    before = decode(held)
    parts = [_parts(decode, held, words, rest, before) for words in ([*draft[offset:first]], [own])]
    if parts[0] is None or parts[1] is None or parts[0][1] != parts[1][1]:
        return None
    words, after = (parts[0][0], parts[1][0]), parts[0][1]
    before = _line(before, cut)
    if any(BROKEN in part for part in (before, *words, after)):
        return None
    widened = _whole_words(before, words, after)
    if widened is None:
        return None
    before, words, after = widened
    if not after and not ended and any(_LETTERS_BEFORE.search(text) for text in words):
        return None
    if not all(any(letter.isalpha() for letter in text) and "\n" not in text for text in words):
        return None
    return (before, words[0], after), (before, words[1], after)


def _skipped(decode: Decode, draft: Sequence[int], offset: int, own: int) -> int:
    """How many tokens of the draft the target is taken to leave out before ``own``."""
    later = draft[offset + 1 : offset + 1 + SKIPPED]
    if own not in later:
        return 0
    skipped = later.index(own) + 1
    return skipped if FILLERS.issuperset(decode(draft[offset : offset + skipped]).lower().split()) else 0


def _parts(decode: Decode, held: list[int], words: list[int], rest: list[int], before: str) -> tuple[str, str] | None:
    """Texts of ``words`` and of ``rest`` as they follow ``held``."""
    until, everything = decode([*held, *words]), decode([*held, *words, *rest])
    if not until.startswith(before) or not everything.startswith(until):
        return None
    return until[len(before) :], everything[len(until) :]


def _line(before: str, cut: bool) -> str:
    """The current line; without the word it begins with, if the text was cut there."""
    line = before.rfind("\n") + 1
    if line or not cut:
        return before[line:]
    space = before.find(" ")
    return before[space + 1 :] if space >= 0 else before


def _whole_words(before: str, words: tuple[str, str], after: str) -> tuple[str, tuple[str, str], str] | None:
    """Move parts of words that began before them, or end behind them, into both; and spaces around them out."""
    one, other = words
    started = _LETTERS_BEFORE.search(before)
    if started and any(_LETTERS_AFTER.match(text) for text in words):
        one, other, before = started[0] + one, started[0] + other, before[: started.start()]
    going_on = _LETTERS_AFTER.match(after)
    if going_on and any(_LETTERS_BEFORE.search(text) for text in (one, other)):
        one, other, after = one + going_on[0], other + going_on[0], after[going_on.end() :]
    if not one.strip() or not other.strip():
        return None
    spaces = one[: len(one) - len(one.lstrip())]
    if other.startswith(spaces):
        before, one, other = before + spaces, one[len(spaces) :], other[len(spaces) :]
    return before, (one, other), after
