"""Whether two questions that mean nearly the same may have one answer.

Sentence models call "Is there milk in the soup?" and "Is there ginger in the soup?" nearly the same. What they overlook is looked
for in the words, and in doubt the questions differ: an answer that is not drafted costs nothing.
"""

import difflib
import re

from deployments.chain.acceptance.guard import objection

_WORD = re.compile(r"\w+(?:['’]\w+)?")
_NAME = re.compile(r"(?<=[\w,;)] )[A-Z][\w’-]*")  # not at the beginning of a sentence, where a capital says nothing
# Words that may take another's place without asking for something else; all others may not.
_FORM_WORDS = """
a an the this that these those i we you me us my our your it its they there is are was were be been am do does did has have had
can could will would shall should may might must of in on at to for from with by as and or what which who whom whose how when
where why please tell give show say name list find calculate compute get much many kindly
"""
_FORM = frozenset(_FORM_WORDS.split())


def same_question(one: str, other: str) -> bool:
    """Whether nothing in the words says that the questions differ: no number, negation, opposite, name, or swapped word."""
    left, right = one.lower(), other.lower()
    if objection(left, right):
        return False
    ours, theirs = _WORD.findall(left), _WORD.findall(right)
    if not _names(one) <= set(theirs) or not _names(other) <= set(ours):
        return False
    return not _swapped(ours, theirs)


def _names(text: str) -> set[str]:
    return {name.lower() for name in _NAME.findall(text)} - {"i", "i’m", "i’d", "i’ll", "i’ve"}


def _swapped(ours: list[str], theirs: list[str]) -> bool:
    """Whether the questions are the same but for one place, where each says something of its own."""
    differ = [
        (ours[a:b], theirs[c:d])
        for kind, a, b, c, d in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
        if kind != "equal"
    ]
    if len(differ) != 1:
        return False
    return all(any(word not in _FORM for word in side) for side in differ[0])
