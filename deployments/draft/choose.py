"""Choosing a draft token from logits, and the few probabilities that go with it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.chain.noise import race
from deployments.chain.protocol import Sampling

CANDIDATES = 32  # how many likely tokens race at temperature > 0; the rest win too rarely to pay for hashing them
_GROUPS = 384

Logits = npt.NDArray[np.float32]


class BadLogits(ArithmeticError):
    """The model returned something that is not a distribution."""


class Choice(NamedTuple):
    """A drafted token with the model's most likely tokens at its position, most likely first."""

    token: int
    ids: npt.NDArray[np.int32]  # [k]
    probs: npt.NDArray[np.float16]  # [k], rounded down so that a row never sums to more than 1


_NO_IDS = np.empty(0, np.int32)
_NO_PROBS = np.empty(0, np.float16)


def most_likely(logits: Logits, k: int) -> npt.NDArray[np.int64]:
    """Ids of the ``min(k, V)`` largest of ``logits [V]``, largest first, equal ones by id. Raises :class:`BadLogits` on NaN.

    The vocabulary is dealt out to groups. The k-th largest of the groups' maxima bounds the k-th largest logit from below,
    so only groups whose maximum reaches it hold candidates: far less to sort than a whole vocabulary.
    """
    rows = len(logits) // _GROUPS
    if k > _GROUPS or rows < 2:
        candidates = np.arange(len(logits))
        if np.isnan(logits).any():
            raise BadLogits("a logit is not a number")
    else:
        # column c is the group of ids c, c + _GROUPS, …: maxima of columns are the fast direction in memory
        dealt = logits[: rows * _GROUPS].reshape(rows, _GROUPS)
        maxima = dealt.max(axis=0)
        rest = np.arange(rows * _GROUPS, len(logits))
        if np.isnan(maxima).any() or np.isnan(logits[rest]).any():
            raise BadLogits("a logit is not a number")
        bound = np.partition(maxima, _GROUPS - k)[_GROUPS - k]
        columns = np.flatnonzero(maxima >= bound)
        row, column = np.nonzero(dealt[:, columns] >= bound)
        candidates = np.concatenate([row * _GROUPS + columns[column], rest])
    # candidates ascend (row by row, columns in order), so a stable sort breaks ties by id
    return candidates[np.argsort(-logits[candidates], kind="stable")[:k]]


def choose(logits: Logits, sampling: Sampling, position: int, top_k: int, scratch: Logits | None = None) -> Choice:
    """Choose the token for ``position`` from ``logits [V]`` the way the target will.

    Greedy at temperature 0; above, the race of :mod:`deployments.chain.noise` with the target's noise. ``top_k``
    probabilities are those of the temperature-matched softmax (temperature 1 when greedy). ``scratch [V]`` is overwritten:
    an array of a vocabulary's size is otherwise mapped and faulted in anew each time. Raises :class:`BadLogits`.
    """
    greedy = sampling.temperature <= 0.0
    if greedy and not top_k:
        token = int(logits.argmax())
        if not np.isfinite(logits[token]):
            raise BadLogits(f"logit {logits[token]} at position {position}")
        return Choice(token, _NO_IDS, _NO_PROBS)
    likely = most_likely(logits, top_k if greedy else max(CANDIDATES, top_k))
    if not np.isfinite(logits[likely[0]]):
        raise BadLogits(f"logit {logits[likely[0]]} at position {position}")
    scale = np.float32(1.0 if greedy else 1.0 / sampling.temperature)
    if greedy:
        token = int(likely[0])
    else:
        racing = likely[:CANDIDATES]
        token = int(racing[race(logits[racing] * scale, racing, sampling.seed, position)])
    if not top_k:
        return Choice(token, _NO_IDS, _NO_PROBS)
    weights = np.subtract(logits, logits[likely[0]], out=scratch)
    if scale != 1.0:
        weights *= scale
    np.exp(weights, out=weights)
    probs = weights[likely[:top_k]] / weights.sum()
    return Choice(token, likely[:top_k].astype(np.int32), _round_down(probs))


def _round_down(probs: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    half = probs.astype(np.float16)
    over = half.astype(np.float32) > probs
    half[over] = np.nextafter(half[over], np.float16(0.0))
    # one token with all the mass leaves the others what float16 rounding may not add to it
    if half.astype(np.float32).sum() > 1.0:
        half[0] = np.nextafter(half[0], np.float16(0.0))
    return half
