"""What a source of whole answers is.

Sources are called from several worker threads at once. Whoever calls them waits only so long: a source that hangs costs a
thread and its circuit, never an answer (:mod:`.runner`).
"""

import hashlib
from typing import Protocol

from deployments.chain.answer.candidate import Candidate, Question

MAX_QUESTION_CHARS = 16_384  # of a longer question only so many of its first characters are looked at
MAX_MESSAGES = 64  # of a longer conversation only so many of its last messages are looked at
MAX_ANSWER_CHARS = 16_384  # a longer answer is not remembered, a longer draft is refused


class Source(Protocol):
    """Drafts whole answers. What crosses requests stays within a tenant; tenant "" shares nothing."""

    name: str

    def draft(self, question: Question) -> Candidate | None:
        """What this source would answer, of any length up to ``MAX_ANSWER_CHARS``; None where it has nothing to say.

        May raise anything: the question is then answered without it.
        """

    def learn(self, question: Question, answer: str) -> None:
        """A question was answered, with this text; the tenant's later questions may be drafted from it."""

    def stats(self) -> dict[str, float]:
        """Sizes now and counts since the start, by name."""

    def close(self) -> None:
        """Let go of files and threads."""


def standalone(question: Question) -> bool:
    """Whether the question can be understood without the conversation: it is the first thing the user says."""
    return sum(role == "user" for role, _ in question.messages) <= 1


def instructions(question: Question) -> bytes:
    """A digest, 16 bytes, of what the system was told: answers under other instructions are other answers."""
    said = "\0".join(text for role, text in question.messages if role in ("system", "developer"))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
