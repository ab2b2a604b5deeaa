"""Sampling noise that is a pure function of (seed, position, token).

The target samples by the exponential race: ``argmax_v  p_v / E_v`` with independent ``E_v ~ Exp(1)`` draws token ``v``
with probability ``p_v`` exactly (equivalent to Gumbel-max; Maddison et al., 2014). Keying ``E`` by seed and position makes
the draw at a position the same however many draft tokens were verified around it, which is what makes verification by
agreement lossless. A draft that knows the seed races with the same ``E`` over its own distribution, so that the two
agree far more often than independent samples would.

The hash is 32-bit "lowbias32" (Wellons, 2018) applied twice with two key words from splitmix64; the same integer
arithmetic runs in NumPy here and in torch in ``deployments.target.keyed_noise``, bit for bit.
"""

import numpy as np
import numpy.typing as npt

_M1 = 0x7FEB352D
_M2 = 0x846CA68B
GOLDEN = 0x9E3779B9
_MASK64 = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """One output of Vigna's splitmix64 for state ``x`` (both 64-bit unsigned)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def key_words(seed: int, position: int) -> tuple[int, int]:
    """Two independent 32-bit words for one position of one request."""
    word = splitmix64(splitmix64(seed & _MASK64) ^ (position & _MASK64))
    return word & 0xFFFFFFFF, word >> 32


def _lowbias32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(_M1)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(_M2)
    return x ^ (x >> np.uint32(16))


def log_exponential(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Return ``ln E`` for each token id, any shape.

    ``E = -ln(1 - u)`` with ``u`` in steps of 2**-31: the smallest values, which win the race, keep full relative precision.
    """
    k1, k2 = key_words(seed, position)
    with np.errstate(over="ignore"):
        x = token_ids.astype(np.uint32) * np.uint32(GOLDEN) ^ np.uint32(k1)
        x = _lowbias32(_lowbias32(x) ^ np.uint32(k2))
    u = ((x >> np.uint32(1)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    # float32 rounds the largest u up to 1; the largest representable value below keeps ln finite
    u = np.minimum(u, np.float32(1.0 - 2.0**-24))
    result: npt.NDArray[np.float32] = np.log(-np.log1p(-u)).astype(np.float32)
    return result


def race(log_probs: npt.NDArray[np.floating], token_ids: npt.NDArray[np.integer], seed: int, position: int) -> int:
    """Index of the winner among candidates ``[K]`` with unnormalised log probabilities ``[K]``."""
    return int(np.argmax(log_probs - log_exponential(seed, position, token_ids)))
