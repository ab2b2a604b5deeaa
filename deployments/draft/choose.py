"""Choosing a draft token from logits, and the few probabilities that go with it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.chain.noise import log_exponential
from deployments.chain.protocol import Sampling
from deployments.draft.calibration import RANKS

CANDIDATES = 32  # how many likely tokens race at temperature > 0; the rest win too rarely to pay for hashing them
HINT_CONFIDENCE = 0.8  # of a token that another source proposed
NO_RACE = -1.0  # margin of a token that this draft did not choose
_GROUPS = 384

Logits = npt.NDArray[np.float32]


class BadLogits(ArithmeticError):
    """The model returned something that is not a distribution."""


@dataclass(slots=True)
class Choice:
    """A drafted token, how it won, and the model's most likely tokens at its position, most likely first."""

    token: int
    ids: npt.NDArray[np.int32]  # [k]
    probs: npt.NDArray[np.float16]  # [k], rounded down so that a row never sums to more than 1
    margin: float = NO_RACE  # logits (divided by the temperature, less the noise) between the winner and the next
    runners: tuple[int, ...] = ()  # who came next in the same race, best first; at most RANKS
    confidence: float = HINT_CONFIDENCE  # probability that the target agrees, given that it did with all before


_NO_IDS = np.empty(0, np.int32)
_NO_PROBS = np.empty(0, np.float16)


def hinted(token: int) -> Choice:
    """A token that another source proposed: no race, no candidates, no probabilities."""
    return Choice(token, _NO_IDS, _NO_PROBS)


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


def choose(
    logits: Logits,
    sampling: Sampling,
    position: int,
    top_k: int,
    scratch: Logits | None = None,
    token_ids: npt.NDArray[np.int32] | None = None,
) -> Choice:
    """Choose the token for ``position`` from ``logits [V]`` the way the target will.

    Greedy at temperature 0; above, the race of :mod:`deployments.chain.noise` with the target's noise among what its top-k
    and top-p keep. ``top_k`` probabilities are those of the temperature-matched softmax over everything (temperature 1 when
    greedy). ``token_ids [V]``, ascending: which token each logit is of; None: its place says it. ``scratch [V]`` is overwritten: an array of a vocabulary's size is otherwise mapped and faulted in anew each
    time. Raises :class:`BadLogits`. The caller sets the confidence.
    """
    greedy = sampling.temperature <= 0.0
    likely = most_likely(logits, max(top_k, 1 + RANKS if greedy else CANDIDATES))
    highest = logits[likely[0]]
    if not np.isfinite(highest):
        raise BadLogits(f"logit {highest} at position {position}")
    scale = np.float32(1.0 if greedy else 1.0 / sampling.temperature)
    total = 0.0
    if top_k or not (greedy or sampling.top_p >= 1.0):
        weights = np.subtract(logits, highest, out=scratch)
        if scale != 1.0:
            weights *= scale
        np.exp(weights, out=weights)
        total = float(weights.sum())
    if greedy:
        winners = likely[: 1 + RANKS]
        scores = logits[winners]
    else:
        racing = _kept(logits, likely[:CANDIDATES], sampling, scale, total)
        raced = racing if token_ids is None else token_ids[racing]
        results = logits[racing] * scale - log_exponential(sampling.seed, position, raced)
        order = np.argsort(-results, kind="stable")[: 1 + RANKS]
        winners, scores = racing[order], results[order]
    margin = float(scores[0] - scores[1]) if len(scores) > 1 else float("inf")
    token, *runners = (winners if token_ids is None else token_ids[winners]).tolist()
    ids, probs = _NO_IDS, _NO_PROBS
    if top_k:
        shown = likely[:top_k] if token_ids is None else token_ids[likely[:top_k]]
        ids, probs = shown.astype(np.int32), _round_down(weights[likely[:top_k]] / np.float32(total))
    return Choice(token, ids, probs, margin, tuple(runners))


def _kept(
    logits: Logits, likely: npt.NDArray[np.int64], sampling: Sampling, scale: np.float32, total: float
) -> npt.NDArray[np.int64]:
    """Of ``likely`` (most likely first) what top-k and then top-p keep; at least the first, with all that tie with the last.

    A token is kept iff those strictly more likely hold less than ``top_p`` of the mass that top-k left. ``total`` is the
    whole vocabulary's mass relative to the most likely token; where top-k reaches past ``likely`` it stands for what top-k
    left, which differs by the mass of tokens too unlikely to race.
    """
    if 0 < sampling.top_k < len(likely):
        likely = likely[: np.count_nonzero(logits[likely] >= logits[likely[sampling.top_k - 1]])]
    if sampling.top_p >= 1.0:
        return likely
    mass: npt.NDArray[np.float32] = np.exp((logits[likely] - logits[likely[0]]) * scale)
    whole = float(mass.sum()) if 0 < sampling.top_k <= CANDIDATES else total
    before = np.cumsum(mass) - mass
    last = max(int(np.count_nonzero(before < sampling.top_p * whole)), 1) - 1
    return likely[: np.count_nonzero(logits[likely] >= logits[likely[last]])]


def _round_down(probs: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    half = probs.astype(np.float16)
    over = half.astype(np.float32) > probs
    half[over] = np.nextafter(half[over], np.float16(0.0))
    # one token with all the mass leaves the others what float16 rounding may not add to it
    if half.astype(np.float32).sum() > 1.0:
        half[0] = np.nextafter(half[0], np.float16(0.0))
    return half
