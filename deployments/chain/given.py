"""Drafts that come with a request instead of from a source: a predicted answer, or candidates of the answer chain."""

from collections.abc import Sequence

MAX_DRAFTS = 8  # with one request
MAX_TOKENS = 2_048  # of one draft
MAX_CHARACTERS = 65_536  # of all that are given as text, together


def problem(draft: Sequence[int], vocab_size: int) -> str:
    """Why a draft cannot be used; empty where it can. An empty draft can: it proposes nothing."""
    if len(draft) > MAX_TOKENS:
        return f"a draft has at most {MAX_TOKENS} tokens, this one {len(draft)}"
    wrong = next((token for token in draft if not 0 <= token < vocab_size), None)
    return "" if wrong is None else f"token {wrong} is outside the vocabulary of {vocab_size} tokens"
