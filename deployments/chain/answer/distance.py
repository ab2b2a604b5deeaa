"""How far apart two drafts are: 0, they say the same with the same confidence, to 1, they have nothing in common.

The mean over the positions of the longer draft. A position at which both have the same token costs the symmetrised NKL of
the two distributions there, ``(NKL(a ‖ b) + NKL(b ‖ a)) / 2`` (:mod:`~deployments.chain.acceptance.nkl`). Where a draft has
no usable probabilities (a rule, a look-up), or where the same text is spelled in other tokens, both are certain of what
they say and the position costs 0. All other positions cost 1, however alike the distributions are: two samples of one model
that part have the *same* distribution where they part, and say the contrary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance import nkl
from deployments.chain.answer.alignment import align
from deployments.chain.answer.candidate import Candidate

Matrix = npt.NDArray[np.float64]


def matrix(candidates: Sequence[Candidate], vocab_size: int) -> Matrix:
    """All distances ``[K, K]``: symmetric, zeros on the diagonal."""
    count = len(candidates)
    result = np.zeros((count, count))
    for i in range(count):
        for j in range(i):
            result[i, j] = result[j, i] = distance(candidates[i], candidates[j], vocab_size)
    return result


def distance(a: Candidate, b: Candidate, vocab_size: int) -> float:
    """Of two drafts. One without tokens is compared by its text as a whole."""
    longest = max(len(a.tokens), len(b.tokens))
    if a.text == b.text and not (a.tokens and b.tokens):
        return 0.0
    if not a.tokens or not b.tokens:
        return 1.0
    found = align(a, b)
    alone = max(len(x.tokens) - n for x, n in zip((a, b), found.respelled, strict=True)) - len(found.pairs)
    return min(1.0, (float(pair_costs(a, b, found.pairs, vocab_size).sum()) + alone) / longest)


def pair_costs(a: Candidate, b: Candidate, pairs: Sequence[tuple[int, int]], vocab_size: int) -> Matrix:
    """Symmetrised NKL at each of ``pairs``, ``[len(pairs)]``; 0 where either says nothing of what else it might have said."""
    if not pairs or a.top_ids is None or b.top_ids is None or a.top_probs is None or b.top_probs is None:
        return np.zeros(len(pairs))
    ours, theirs = (np.asarray(side) for side in zip(*pairs, strict=True))
    ids_a, probs_a = a.top_ids[ours].astype(np.int64), a.top_probs[ours].astype(np.float64)
    ids_b, probs_b = b.top_ids[theirs].astype(np.int64), b.top_probs[theirs].astype(np.float64)
    both = nkl.usable(ids_a, probs_a, vocab_size) & nkl.usable(ids_b, probs_b, vocab_size)
    there = _directed(ids_a, probs_a, ids_b, probs_b, vocab_size)
    back = _directed(ids_b, probs_b, ids_a, probs_a, vocab_size)
    result: Matrix = np.where(both, (there + back) / 2, 0.0)
    return result


def _directed(ids: Matrix, probs: Matrix, other_ids: Matrix, other_probs: Matrix, vocab_size: int) -> Matrix:
    """NKL ``[n]`` of ``ids, probs [n, k]`` from what is known of the other, ``[n, j]``: the formula of ``nkl.py`` for two drafts.

    A token that the other does not name has an equal part of what its named ones leave, and no more than the least of them.
    """
    entry, other_entry = probs > 0, other_probs > 0
    same = (ids[:, :, None] == other_ids[:, None, :]) & other_entry[:, None, :]  # [n, k, j]
    known = (same * other_probs[:, None, :]).sum(axis=-1)  # [n, k]
    missing = entry & ~same.any(axis=-1)
    tail = np.clip(1.0 - other_probs.sum(axis=-1), 0.0, 1.0)
    least = np.where(other_entry, other_probs, 1.0).min(axis=-1, initial=1.0)
    part = np.maximum(np.minimum(tail / (missing.sum(axis=-1) + 1), least), nkl.REST)
    q = np.where(missing, part[:, None], known)  # of the tokens that are named here
    own = np.clip(1.0 - probs.sum(axis=-1), 0.0, 1.0)
    rest = np.maximum(1.0 - np.where(entry, q, 0.0).sum(axis=-1), nkl.REST)
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = np.where(entry, probs * np.log(probs / q), 0.0).sum(axis=-1)
        divergence += np.where(own > 0, own * np.log(own / rest), 0.0)
    result: Matrix = np.clip(divergence / nkl.log_vocabulary(vocab_size), 0.0, 1.0)
    return result
