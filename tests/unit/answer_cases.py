"""What tests of whole answers share: requests, a plain loop over the same model, and an engine run to the end."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from deployments.chain.protocol import Sampling
from deployments.draft.answer_job import AnswerJob
from deployments.draft.answers import Answer, read_request
from deployments.draft.choose import choose
from deployments.draft.engine import DraftEngine
from tests.unit.draft_fakes import VOCAB, FakeModel, check_kv

PROMPT = [3, 14, 15, 9, 26, 5]


def reference(prompt: list[int], length: int, sampling: Sampling, stop: Iterable[int] = ()) -> list[int]:
    """One answer by a model that does nothing else."""
    model = FakeModel(slots=1, context=512)
    tokens: list[int] = []
    logits = model.prefill(0, prompt, 0)
    while len(tokens) < length:
        token = choose(logits, sampling, len(prompt) + len(tokens), 0).token
        if token in stop:
            break
        tokens.append(token)
        logits = model.decode([0], [token], [len(prompt) + len(tokens) - 1])[0]
    return tokens


def softmax_after(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The model's distribution at temperature 1 behind ``tokens``, ``[VOCAB]``."""
    logits = FakeModel(slots=1, context=512).prefill(0, tokens, 0).astype(np.float64)
    weights: np.ndarray[Any, np.dtype[np.float64]] = np.exp(logits - logits.max())
    return weights / weights.sum()


class Asked:
    """Requests to one engine and the answers that came."""

    def __init__(self, drafter: DraftEngine) -> None:
        self.drafter = drafter
        self.jobs: list[AnswerJob] = []
        self.answers: list[dict[int, Answer]] = []

    def ask(self, prompt: list[int] | None = None, **more: Any) -> dict[int, Answer]:
        """Submit a request; the dict returned gets its answers by index as they end."""
        answers: dict[int, Answer] = {}

        def emit(answer: Answer) -> None:
            assert answer.index not in answers
            answers[answer.index] = answer

        self.answers.append(answers)
        given = {"prompt": PROMPT if prompt is None else prompt, "top_k": 0, "deadline_s": 100.0, **more}
        self.jobs.append(self.drafter.write(read_request(given), emit))
        return answers

    def run(self) -> None:
        """Call by call until nothing is left, the books and the KV checked after each."""
        while self.drafter.idle(1e-9):
            self.check()
        self.check()

    def check(self) -> None:
        self.drafter.check_integrity()
        check_kv(self.drafter)


def greedy() -> Sampling:
    return Sampling(0.0, 0)


def some_prompt(seed: int, length: int) -> list[int]:
    """``length`` tokens of the fake vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]
