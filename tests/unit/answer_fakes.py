"""Fakes for the answer chain: words for tokens, and others that answer, hang, raise and lie as told."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from deployments.api.answers import AnswerPlan, Sources
from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.answer.consensus import Thresholds
from deployments.chain.faults import FaultPolicy
from deployments.config.answer import Answer
from deployments.router.answer_chain import AnswerChain
from deployments.router.answer_metrics import AnswerMetrics
from deployments.router.calls import Plain

FAULTS = FaultPolicy(
    answer_drafts_s=0.2, answer_evidence_s=0.1, answer_tags_s=0.1, answer_score_s=0.1, answer_given_s=0.1
)
VOCAB = 1000


class WordPrompts:
    """A token for each word, made up as words come."""

    specials = ("<|im_end|>",)

    def __init__(self) -> None:
        self.words: list[str] = ["<end>"]
        self.stop = [0]

    def id_of(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def ids(self, text: str) -> list[int]:
        return [self.id_of(word) for word in text.split()]

    def prompt(self, question: Question, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        return [token for _, text in question.messages for token in self.ids(text)]

    def tokenized(self, candidate: Candidate) -> Candidate:
        tokens = candidate.tokens or tuple(self.ids(candidate.text))
        words = [self.words[token] + " " for token in tokens]
        return replace(candidate, tokens=tokens, text="".join(words), ends=tuple(accumulate(map(len, words))))

    def count(self, text: str) -> int:
        return len(text.split())


class FakeCalls:
    """Each part is a text, a list of texts, an exception to raise, a number of seconds to hang, or whatever it lies."""

    def __init__(
        self,
        prompts: WordPrompts,
        *,
        write: Any = (),
        draft: Mapping[str, Any] | None = None,
        tags: Callable[[str], str] | Any = "valid",
        liking: Callable[[list[int]], float] | Any = -1.0,
    ) -> None:
        self._prompts, self._write, self._draft, self._tags, self._liking = prompts, write, draft or {}, tags, liking
        self.asked: list[tuple[str, Any]] = []
        self.learnt: list[tuple[Plain, str]] = []
        self.cancelled: list[str] = []

    async def _behave(self, name: str, how: Any) -> Any:
        if isinstance(how, Exception):
            raise how
        if isinstance(how, float):
            try:
                await asyncio.sleep(how)
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            raise TimeoutError
        return how

    async def write(self, draft: str, request: Plain, deadline_s: float) -> list[Plain]:
        self.asked.append((f"model:{draft}", request))
        how = self._write[draft] if isinstance(self._write, dict) else self._write
        async with asyncio.timeout(deadline_s):
            said = await self._behave(f"model:{draft}", how)
        if not isinstance(said, list | tuple):
            return said  # type: ignore[no-any-return]
        return [self.written(text) if isinstance(text, str) else text for text in said[: request["k"]]]

    def written(self, text: str, **changes: Any) -> Plain:
        ids = self._prompts.ids(text)
        top_ids = np.asarray([[token, 999] for token in ids], "<i4").tobytes()
        top_probs = np.full((len(ids), 2), 0.4, "<f2").tobytes()
        return {"tokens": ids, "top_ids": top_ids, "top_probs": top_probs, "finished": True, "reason": "", **changes}

    async def draft(self, question: Plain, source: str, deadline_s: float) -> list[Plain]:
        self.asked.append((source, question))
        async with asyncio.timeout(deadline_s):
            said = await self._behave(source, self._draft.get(source, ""))
        if not isinstance(said, str):
            return said  # type: ignore[no-any-return]
        return [{"source": source, "text": said, "tokens": [], "finished": True, "note": "", "reason": ""}]

    async def validate(
        self, texts: Sequence[str], validators: Sequence[Plain], budget_s: float, context: Plain
    ) -> list[list[Plain]]:
        self.asked.append(("validators", list(texts)))
        async with asyncio.timeout(budget_s):
            how = await self._behave("validators", self._tags)
        if not callable(how) and not isinstance(how, str):
            return how  # type: ignore[no-any-return]
        tag = how if callable(how) else lambda text: how
        return [[{"validator": spec["name"], "tag": tag(text), "why": ""} for spec in validators] for text in texts]

    async def score(
        self, prompt: list[int], drafts: list[list[int]], top_k: int, deadline_s: float, tenant: str
    ) -> list[Plain]:
        self.asked.append(("score", drafts))
        async with asyncio.timeout(deadline_s):
            how = await self._behave("score", self._liking if not isinstance(self._liking, float) else [self._liking])
        if isinstance(how, str):
            return [{"logprobs": [], "reason": how} for _ in drafts]
        like = how if callable(how) else lambda draft: how[0]
        return [{"logprobs": [like(draft)] * len(draft), "top_ids": b"", "reason": ""} for draft in drafts]

    async def learn(self, question: Plain, answer: str, deadline_s: float) -> None:
        self.learnt.append((question, answer))


class Tally:
    """A counter or a histogram that can be looked at."""

    def __init__(self) -> None:
        self.values: list[tuple[dict[str, str], float]] = []

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((tags, value))

    observe = inc


class FakeMetrics(AnswerMetrics):
    """Metrics that can be looked at, by name."""

    def __init__(self) -> None:
        self.made: dict[str, Tally] = {}

        def make(name: str, *_: Any) -> Tally:
            return self.made.setdefault(name, Tally())

        super().__init__(make, make)

    @property
    def failures(self) -> set[tuple[str, str]]:
        return {(tags["part"], tags["reason"]) for tags, _ in self.made["chain_answer_failures_total"].values}

    @property
    def outcomes(self) -> list[str]:
        return [tags["outcome"] for tags, _ in self.made["chain_answer_total"].values]


def plan(**changes: Any) -> AnswerPlan:
    """Three drafts of model ``a``, rules and retrieval."""
    fields: dict[str, Any] = {
        "k": 3,
        "length": 16,
        "thresholds": Thresholds(),
        "resolve": "choose",
        "sources": Sources(models=("a",), evidence=()),
        "escalate": None,
        "validators": (),
        "scaffold": False,
        "trace": True,
        "events": False,
        "temperature": None,
    }
    return AnswerPlan(**{**fields, **changes})


def chain(calls: FakeCalls, prompts: WordPrompts, metrics: FakeMetrics, **changes: Any) -> AnswerChain:
    """An answer chain over fakes."""
    fields: dict[str, Any] = {"vocab_size": VOCAB, "max_model_len": 400, **changes}
    settings = fields.pop("settings", Answer())
    return AnswerChain(calls, prompts, settings, FAULTS, metrics, **fields)  # type: ignore[arg-type]
