"""Which draft replica serves a session."""

import hashlib
from collections.abc import Sequence


def choose(session: str, drafts: Sequence[str]) -> str:
    """Rendezvous hashing: the same session goes to the same draft, and few move when drafts come and go.

    Raises ValueError when there is no draft.
    """
    if not drafts:
        raise ValueError("no draft to choose from")
    return max(drafts, key=lambda name: hashlib.blake2b(f"{name}\0{session}".encode(), digest_size=8).digest())
