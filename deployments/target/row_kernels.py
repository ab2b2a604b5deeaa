"""Compiled loops over rows of the vocabulary on CPUs, which read logits where they are and write nothing but results.

torch makes a pass through memory of every operation, and the keyed race alone is some forty of them: at 40 rows of 49,152
logits, more time than the model's forward pass. numba compiles these loops on first use and keeps them beside this file
(call :func:`warm_up` at start, not in a step); they hold no interpreter lock.
"""

import math
from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance.candidates import Candidates
from deployments.chain.acceptance.nkl import ONE_HOT, OVERFULL, REST
from deployments.chain.noise import GOLDEN, key_words

ROUNDING = 1e-4  # a bound in other arithmetic may not refuse what the value itself lets pass

_U = numba.uint64  # unsigned indices: no wrap-around checks
_F, _I, _W = np.float32, np.int32, np.uint32
_LOG2E = _F(1.0 / math.log(2.0))
_MANTISSA, _BIAS = _I(23), _F(127.0)
# 2**f on [0, 1): interpolation at Chebyshev nodes, relative error below 4e-6
_C0, _C1, _C2, _C3, _C4 = (_F(c) for c in (1.00000352, 0.69298845, 0.24163789, 0.05168599, 0.01367763))
_ROOM = 80.0  # e**80 times a vocabulary is still a float32
_MOST = np.float32(127.0 + _ROOM / math.log(2.0)).view(np.int32)

_BLOCK = 256  # tokens whose upper bounds are compared at a time
_FIXED = 16  # fractional bits of the bounds
_TO_FIXED = _F((1 << _FIXED) / math.log(2.0))
_SLACK = 64  # of the bounds' rounding, in their unit: 2**-10
_LARGEST = _F(1.0e9)  # in the same unit, of a logit; none that matters is as far from 0
_EXCLUDED = -1.0e9  # no bound of a logit of -inf is above it
_CERTAIN = 9.8e8  # and none of one that was cut to the largest is below this
_TOP_U = 1.0 - 2.0**-24  # as in deployments.chain.noise


def _compiled(function: Any) -> Any:
    # sums may be reordered, which vectors need; NaN and infinities keep their meaning
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return numba.njit(function, **options)


@_compiled
def _bits(number):  # type: ignore[no-untyped-def]
    return np.float32(number).view(np.int32)


@_compiled
def _from_bits(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits).view(np.float32)


@_compiled
def _sum(logits, row, reference):  # type: ignore[no-untyped-def]
    """Largest logit of a row and the logarithm of its sum of exponentials; NaN where :func:`sums` says."""
    mass, most = _F(0.0), _I(0)
    for i in range(_U(logits.shape[1])):
        y = (logits[row, _U(i)] - reference) * _LOG2E + _BIAS
        y = _F(0.0) if y < _F(0.0) else y  # NaN stays
        most = _I(max(most, _bits(y)))  # floats from 0 on, infinity and NaN are ordered as their bits are
        whole = _I(y)
        f = y - _F(whole)
        power = (((_C4 * f + _C3) * f + _C2) * f + _C1) * f + _C0
        mass += power * _from_bits(_I(whole << _MANTISSA))
    if most > _MOST or not (mass > _F(0.0)):
        return np.nan, np.nan
    start = np.float64(reference)
    highest = start + (np.float64(_from_bits(most)) - np.float64(_BIAS)) / np.float64(_LOG2E)
    return highest, start + math.log(np.float64(mass))


@_compiled
def _wide_sum(logits, row):  # type: ignore[no-untyped-def]
    """The same of any row, slowly; NaN where a logit is NaN or infinite upwards."""
    highest, mass = -np.inf, 0.0
    for i in range(_U(logits.shape[1])):
        logit = np.float64(logits[row, _U(i)])
        if not (logit < np.inf):
            return np.nan, np.nan
        highest = max(highest, logit)
    for i in range(_U(logits.shape[1])):
        mass += math.exp(np.float64(logits[row, _U(i)]) - highest)
    return highest, highest + math.log(mass)


@_compiled
def _sums(logits, rows, reference, highest, log_sum):  # type: ignore[no-untyped-def]
    for n in range(_U(rows.shape[0])):
        highest[n], log_sum[n] = _sum(logits, _U(rows[n]), reference[n])
        if math.isnan(log_sum[n]):
            highest[n], log_sum[n] = _wide_sum(logits, _U(rows[n]))


@_compiled
def _claims(token, ids, probs, vocab_size):  # type: ignore[no-untyped-def]
    """:func:`deployments.chain.acceptance.nkl.usable` and ``named`` of one token."""
    total, most, said = _F(0.0), _F(0.0), False
    for i in range(ids.shape[0]):
        if not (probs[i] >= 0):
            return False
        if probs[i] > 0:
            if ids[i] < 0 or ids[i] >= vocab_size:
                return False
            for j in range(i):
                if probs[j] > 0 and ids[j] == ids[i]:
                    return False
            said = said or ids[i] == token
        total += probs[i]
        most = max(most, probs[i])
    return said and total > 0 and total <= OVERFULL and most < ONE_HOT


@_compiled
def _is_near(logits, row, theirs, ids, probs, limit, mask):  # type: ignore[no-untyped-def]
    """Whether one token's NKL is below its limit: ``at_least`` and ``from_logits`` of :mod:`deployments.chain.acceptance.nkl`."""
    apart, named, spread = 0.0, 0.0, 0.0
    reference = logits[row, theirs]
    for i in range(ids.shape[0]):
        p = np.float64(probs[i])
        if p > 0:
            logit = logits[row, ids[i]]
            apart += p * (math.log(p) - np.float64(logit))
            named += p
            reference = max(reference, logit)
    tail = min(max(1.0 - named, 0.0), 1.0)
    if tail > 0:
        spread = tail * math.log(tail)
    share = 1.0 / math.log(max(np.float64(logits.shape[1]), 2.0))
    least, start = 0.0, np.float64(reference)
    for i in range(ids.shape[0]):
        if probs[i] > 0:
            least += math.exp(np.float64(logits[row, ids[i]]) - start)
    least = max(start + math.log(max(least, 1e-300)), np.float64(logits[row, theirs]))
    if not ((apart + named * least + spread) * share < limit + ROUNDING):  # NaN, too
        return False
    highest, log_sum = _sum(logits, row, reference)
    if math.isnan(log_sum):
        highest, log_sum = _wide_sum(logits, row)
        if math.isnan(log_sum):
            return False
    top = min(math.exp(highest - log_sum), 1.0)
    if not (top <= mask):
        return False
    rest = 1.0
    for i in range(ids.shape[0]):
        if probs[i] > 0:
            rest -= math.exp(np.float64(logits[row, ids[i]]) - log_sum)
    value = (apart + named * log_sum + spread - tail * math.log(max(rest, REST))) * share
    return min(max(value, 0.0), 1.0) < limit


@_compiled
def _near(logits, matched, rows, request, token, theirs, ids, probs, limit, mask, result):  # type: ignore[no-untyped-def]
    ended = -1
    for n in range(rows.shape[0]):
        if request[n] == ended:
            continue
        row = _U(rows[n])
        possible = logits[row, token[n]]
        if (
            limit[n] > 0
            and -np.inf < possible < np.inf
            and _claims(token[n], ids[n], probs[n], matched.shape[1])
            and _is_near(matched, row, theirs[n], ids[n], probs[n], limit[n], mask[n])
        ):
            result[n] = True
        else:
            ended = request[n]


@_compiled
def _exclude_below(logits, floor, out):  # type: ignore[no-untyped-def]
    for row in range(_U(logits.shape[0])):
        least = floor[row]
        for i in range(_U(logits.shape[1])):
            logit = logits[row, i]
            out[row, i] = _F(-np.inf) if logit < least else logit


@_compiled
def _hash(token, k1, k2):  # type: ignore[no-untyped-def]
    """:func:`deployments.chain.noise.log_exponential`'s 31 bits, in 32-bit unsigned arithmetic."""
    x = _W(_W(_W(token) * _W(GOLDEN)) ^ k1)
    for k in (k2, _W(0)):
        x = _W(x ^ _W(x >> _W(16)))
        x = _W(x * _W(0x7FEB352D))
        x = _W(x ^ _W(x >> _W(15)))
        x = _W(x * _W(0x846CA68B))
        x = _W(_W(x ^ _W(x >> _W(16))) ^ k)
    return _W(x >> _W(1))


@_compiled
def _bound(logit, word):  # type: ignore[no-untyped-def]
    """No less than ``log2 (exp(logit) / E)`` in fixed point, up to a constant.

    ``E = -ln(1 - u) >= u``, and the bits of a float, read as an integer, are a lower bound of its logarithm.
    """
    fixed = logit * _TO_FIXED
    fixed = fixed if fixed > -_LARGEST else -_LARGEST
    fixed = fixed if fixed < _LARGEST else _LARGEST
    return _I(_I(fixed) - _I(_bits(_F(_I(word)) + _F(0.5)) >> _I(23 - _FIXED)))


@_compiled
def _race(logits, rows, k1, k2, winners):  # type: ignore[no-untyped-def]
    size = _U(logits.shape[1])
    constant = np.float64(127 + 31)  # what the bits of u * 2**31 hold beside log2 u
    for n in range(_U(rows.shape[0])):
        row, a, b = _U(rows[n]), k1[n], k2[n]
        best, least, winner = -np.inf, _I(_EXCLUDED) + _I(1), _U(0)
        start = _U(0)
        while start < size:
            stop = min(start + _U(_BLOCK), size)
            most = _I(-(1 << 31))
            for i in range(start, stop):
                most = _I(max(most, _bound(logits[row, i], _hash(i, a, b))))
            if most >= least:
                for i in range(start, stop):
                    logit, word = logits[row, i], _hash(i, a, b)
                    if _bound(logit, word) >= least:
                        u = min((np.float64(_I(word)) + 0.5) * 2.0**-31, _TOP_U)
                        score = np.float64(logit) - math.log(-math.log1p(-u))
                        if score > best:
                            best, winner = score, i
                            bits = (best / math.log(2.0) - constant) * (1 << _FIXED)
                            least = _I(min(max(bits, _EXCLUDED), _CERTAIN)) - _I(_SLACK)
            start = stop
        winners[n] = winner


def sums(
    logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], reference: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Largest logit, and logarithm of the sum of exponentials, of ``rows [N]`` of C-contiguous ``logits [R, V]``: ``[2, N]``.

    ``reference [N]``: any finite logit of each row. Rows with a logit 80 or more above it take ten times as long, those with one that is
    NaN or infinite upwards have NaN. Relative error of the sum below 1e-5.
    """
    result = np.empty((2, len(rows)))
    _sums(logits, rows, reference, result[0], result[1])
    return result


def near(
    found: Candidates,
    rows: npt.NDArray[np.int64],  # [N] of each candidate
    theirs: npt.NDArray[np.int64],  # [N] the tokens the target drew
    logits: npt.NDArray[np.float32],  # [R, V] as the target drew from
    matched: npt.NDArray[np.float32],  # [R, V] before truncation
) -> npt.NDArray[np.bool_]:
    """Which candidates ``[N]`` are near enough for their limits, and reachable through such; arrays C-contiguous.

    The rules of :mod:`deployments.chain.acceptance.nkl` in one loop: a row is summed only where nothing cheaper refuses.
    """
    result = np.zeros(len(rows), np.bool_)
    _near(
        logits, matched, rows, found.request, found.token, theirs, found.ids, found.probs, found.limit, found.mask, result
    )  # fmt: skip
    return result


def race(logits: npt.NDArray[np.float32], keys: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Winner of the exponential race of each row of C-contiguous ``logits [R, V]`` under ``R`` keys (seed, position): ``[R]``.

    ``argmax(logits - log_exponential(key))`` (:mod:`deployments.chain.noise`), with logarithms in float64 where they decide.
    """
    words = np.asarray([key_words(seed, position) for seed, position in keys], np.uint32).reshape(-1, 2)
    winners = np.empty(len(keys), np.int64)
    _race(logits, np.arange(len(keys)), words[:, 0].copy(), words[:, 1].copy(), winners)
    return winners


def exclude_below(
    logits: npt.NDArray[np.float32], floor: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    """``out = logits [R, V]`` with -inf where they are below ``floor [R]``; C-contiguous, ``out`` may be ``logits``."""
    _exclude_below(logits, floor, out)


def warm_up() -> None:
    """Compile, or load what was compiled before."""
    logits = np.zeros((1, 2), np.float32)
    sums(logits, np.zeros(1, np.int64), np.zeros(1, np.float32))
    race(logits, [(0, 0)])
    exclude_below(logits, np.zeros(1, np.float32), logits)
    one, share = np.zeros(1, np.int64), np.zeros(1)
    found = Candidates(one, one, one, np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), share, share)
    near(found, one, one, logits, logits)
