"""Drafts that come with a request instead of from a source: a predicted answer, or candidates of the answer chain."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Top = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]  # ids and probabilities [L, k] of the likeliest tokens

MAX_DRAFTS = 8  # with one request
MAX_TOKENS = 2_048  # of one draft
MAX_CHARACTERS = 65_536  # of all that are given as text, together


def problem(draft: Sequence[int], vocab_size: int) -> str:
    """Why a draft cannot be used; empty where it can. An empty draft can: it proposes nothing."""
    if len(draft) > MAX_TOKENS:
        return f"a draft has at most {MAX_TOKENS} tokens, this one {len(draft)}"
    wrong = next((token for token in draft if not 0 <= token < vocab_size), None)
    return "" if wrong is None else f"token {wrong} is outside the vocabulary of {vocab_size} tokens"


def top_of(length: int, ids: bytes, probs: bytes) -> Top | None:
    """From little-endian int32 and float16 ``[length, k]``, off the wire; None where that is not what they are."""
    width, rest = divmod(len(ids), 4 * length) if length else (0, 0)
    if rest or not width or len(probs) != 2 * length * width:
        return None
    shape = (length, width)
    return (
        np.frombuffer(ids, "<i4").reshape(shape).astype(np.int32),
        np.frombuffer(probs, "<f2").reshape(shape).astype(np.float32),
    )
