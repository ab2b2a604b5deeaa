"""A run of matches counts only if it is long: a short one is more likely chance than understanding.

``block`` stands on another rule, which says what matches. Where the leading run of matches is shorter than ``min_block_len``,
no mismatch passes, and the draft counts exactly as far as it says what the target says itself: cutting that as well
would cost speed and change no token.
"""

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance.evidence import Bools


def run_length(matches: Bools) -> npt.NDArray[np.int64]:
    """Length of the leading run of matches, ``[B]`` from ``[B, T]``."""
    result: npt.NDArray[np.int64] = np.cumprod(matches, axis=1).sum(axis=1).astype(np.int64)
    return result


def keep_long(own: Bools, passing: Bools, min_block_len: int | npt.NDArray[np.int64]) -> Bools:
    """Of the mismatches that pass ``[B, T]``, those in rows whose leading run of ``own`` or passing tokens is long enough.

    ``min_block_len`` is one for all rows or ``[B, 1]``.
    """
    long: Bools = run_length(own | passing)[:, None] >= min_block_len
    return passing & long
