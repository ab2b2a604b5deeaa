"""Which positions of two drafts say the same."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deployments.chain.answer.candidate import Candidate

Pairs = list[tuple[int, int]]
Spelling = tuple[str, npt.NDArray[np.int64]]  # a text and where in it each token ends


@dataclass(frozen=True, slots=True)
class Alignment:
    """Of two drafts of ``n`` and ``m`` tokens."""

    pairs: Pairs  # positions with the same token, ascending in both
    respelled: tuple[int, int]  # further positions of each with the same text in other tokens


def align(a: Candidate, b: Candidate) -> Alignment:
    """A longest common subsequence of the tokens; between its parts, text that is equal although its tokens are not.

    ``align(a, b)`` and ``align(b, a)`` name the same pairs. Needs ``O(n m)`` steps, in numpy rows, beyond what the drafts
    begin and end with in common.
    """
    if (b.tokens, b.text) < (a.tokens, a.text):  # where several subsequences are longest, both orders take the same
        turned = align(b, a)
        return Alignment([(i, j) for j, i in turned.pairs], (turned.respelled[1], turned.respelled[0]))
    pairs = common(a.tokens, b.tokens)
    return Alignment(pairs, _respelled(a, b, pairs) if a.ends and b.ends else (0, 0))


def common(a: tuple[int, ...], b: tuple[int, ...]) -> Pairs:
    """Positions of a longest common subsequence."""
    shorter = min(len(a), len(b))
    head = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - head) if a[-1 - i] != b[-1 - i]), shorter - head)
    pairs = [(i, i) for i in range(head)]
    pairs += [(head + i, head + j) for i, j in _longest(a[head : len(a) - tail], b[head : len(b) - tail])]
    return pairs + [(len(a) - i, len(b) - i) for i in range(tail, 0, -1)]


def _longest(a: tuple[int, ...], b: tuple[int, ...]) -> Pairs:
    if not a or not b:
        return []
    other = np.asarray(b)
    lengths = np.zeros((len(a) + 1, len(b) + 1), np.int32)  # of the longest of a[:i] and b[:j]
    for i, token in enumerate(a):
        row = np.maximum(lengths[i, 1:], lengths[i, :-1] + (other == token))
        lengths[i + 1, 1:] = np.maximum.accumulate(row)
    pairs, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif lengths[i - 1, j] >= lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def _respelled(a: Candidate, b: Candidate, pairs: Pairs) -> tuple[int, int]:
    """Positions in the gaps between pairs whose tokens end at the same places of the same text."""
    count = [0, 0]
    for (i, j), (next_i, next_j) in pairwise([(-1, -1), *pairs, (len(a.tokens), len(b.tokens))]):
        if next_i - i > 1 and next_j - j > 1:
            x, y = _same(_spelling(a, i + 1, next_i), _spelling(b, j + 1, next_j))
            count = [count[0] + x, count[1] + y]
            # of what is left: what it ends with, read backwards
            x, y = _same(_backwards(_spelling(a, i + 1 + x, next_i)), _backwards(_spelling(b, j + 1 + y, next_j)))
            count = [count[0] + x, count[1] + y]
    return count[0], count[1]


def _spelling(candidate: Candidate, start: int, end: int) -> Spelling:
    """Text of the tokens ``start:end`` and where in it each ends."""
    begin = candidate.ends[start - 1] if start else 0
    ends = np.asarray(candidate.ends[start:end], np.int64) - begin
    return candidate.text[begin : begin + (int(ends[-1]) if len(ends) else 0)], ends


def _backwards(spelling: Spelling) -> Spelling:
    text, ends = spelling
    return text[::-1], np.concatenate([(len(text) - ends[:-1])[::-1], [len(text)]]) if len(ends) else ends


def _same(a: Spelling, b: Spelling) -> tuple[int, int]:
    """How many tokens of each the longest common beginning takes that ends with a token of both."""
    length = next((i for i, (x, y) in enumerate(zip(a[0], b[0], strict=False)) if x != y), min(len(a[0]), len(b[0])))
    shared = np.intersect1d(a[1][a[1] <= length], b[1][b[1] <= length])
    if not len(shared) or not shared[-1]:
        return 0, 0
    return int(np.searchsorted(a[1], shared[-1], "right")), int(np.searchsorted(b[1], shared[-1], "right"))
