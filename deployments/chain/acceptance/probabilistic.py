"""A mismatch passes with a probability that falls in a straight line from 1 at NKL 0 to 0 at the threshold of :mod:`.nkl`.

What ``nkl`` refuses is refused here, too; of the rest, the nearer the distributions, the more passes. The coin is a function
of (seed, position), so that an answer does not depend on what else is in the batch or how its drafts were cut.
"""

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance import nkl
from deployments.chain.acceptance.evidence import Bools, Evidence, Floats, Ints
from deployments.chain.acceptance.policy import Policy

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
COIN = 0x636F696E  # keeps the coins apart from the sampling noise of the same seed


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """:func:`deployments.chain.noise.splitmix64` on arrays."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


def coins(seeds: Ints, positions: Ints) -> npt.NDArray[np.float32]:
    """Uniform ``[...]`` in [0, 1), in steps of 2**-24, for sequence ``positions`` of requests with ``seeds``."""
    with np.errstate(over="ignore"):
        word = _splitmix64(_splitmix64(seeds.astype(np.uint64) ^ np.uint64(COIN)) ^ positions.astype(np.uint64))
    result: npt.NDArray[np.float32] = (word >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return result


def thinned(limit: Floats, uniform: Floats) -> Floats:
    """Threshold ``[...]`` below which an NKL passes with the coin ``uniform``: ``P(NKL < δ (1 - u)) = 1 - NKL / δ``."""
    return limit * (1.0 - uniform)


def passes(policy: Policy, evidence: Evidence) -> Bools:
    """Mismatches that pass, ``[B, T]``."""
    return nkl.below(policy, evidence, thinned(nkl.thresholds(policy, evidence), evidence.uniform))
