"""Questions, an encoder whose vectors can be computed by hand, and sources that do what sources should not."""

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.chain.answer.candidate import Candidate, Question

WORDS = 64  # dimensions


def ask(text: str, tenant: str = "tenant", length: int = 64, before: Sequence[tuple[str, str]] = ()) -> Question:
    """A question, with the conversation before it."""
    return Question(text=text, messages=(*before, ("user", text)), tenant=tenant, length=length)


def wire(question: Question) -> dict[str, Any]:
    """As the router sends it."""
    return {
        "text": question.text,
        "messages": [list(message) for message in question.messages],
        "tenant": question.tenant,
        "length": question.length,
    }


class BagOfWords:
    """Texts with the same words have the same vector; each word is a direction."""

    dimension = WORDS

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str], budget_s: float = math.inf) -> npt.NDArray[np.float32]:
        self.texts += texts
        return np.stack([self._one(text) for text in texts])

    @staticmethod
    def _one(text: str) -> npt.NDArray[np.float32]:
        row = np.zeros(WORDS, np.float32)
        for word in "".join(c if c.isalnum() else " " for c in text.lower()).split():
            row[hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % WORDS] += 1
        norm = np.linalg.norm(row)
        return row / norm if norm else np.eye(1, WORDS, dtype=np.float32)[0]


class Fake:
    """A source that answers whatever its function returns."""

    def __init__(self, name: str, answer: Callable[[Question], Any]) -> None:
        self.name = name
        self._answer = answer
        self.learned: list[tuple[str, str]] = []
        self.closed = threading.Event()

    def draft(self, question: Question) -> Any:
        return self._answer(question)

    def learn(self, question: Question, answer: str) -> None:
        self.learned.append((question.text, answer))

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.closed.set()


def says(text: str, **fields: Any) -> Callable[[Question], Candidate]:
    """A source's function that always says the same."""
    return lambda _: Candidate(source="another", text=text, **fields)
