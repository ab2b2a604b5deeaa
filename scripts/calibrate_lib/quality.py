"""Every setting's answers to every item, from a pair of models for which time plays no part."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from scripts.bench_lib import settings as engines
from scripts.bench_lib.child import Child, python
from scripts.bench_lib.engine import ROOT
from scripts.calibrate_lib.answers import Answer, Pair
from scripts.calibrate_lib.item_sets import Item
from scripts.calibrate_lib.knobs import REFERENCES, Setting
from scripts.calibrate_lib.pair import Models
from scripts.calibrate_lib.store import Cell, Store, cell_key

LOAD_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 900.0  # a set on a busy machine
MODEL_LEN = 1024  # prompts and answers of the sets are far shorter


class Sentences(Protocol):
    """What compares answers by meaning: :class:`hw.onnx.sentences.SentenceModel`."""

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Rows of length 1, one a text."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn and drafts are made, the same for every cell of a run."""

    temperature: float
    batch: int
    tokens: int  # drafted in a round
    top_k: int
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__}


@dataclass(frozen=True)
class Task:
    """One cell that is not measured yet."""

    key: str
    setting: Setting
    items: Sequence[Item]

    @property
    def weight(self) -> float:
        """About how long it takes, relative to others; without drafts there is no draft to wait for."""
        tokens = sum(item.max_tokens for item in self.items)
        return 1.3 * tokens if self.setting.policy is not None else float(tokens)


def tasks(
    settings: Sequence[Setting], sets: Mapping[str, Sequence[Item]], sampling: Sampling, store: Store
) -> list[Task]:
    """What is missing, set by set: what is interrupted leaves whole sets, each with its own lossless answers first."""
    found: dict[str, Task] = {}
    for items in sets.values():
        for setting in (REFERENCES[1], REFERENCES[0], *settings):
            key = cell_key(setting, items, sampling.as_dict())
            if key not in store.cells:
                found.setdefault(key, Task(key, setting, items))
    return list(found.values())


class PairProcess:
    """A child process that answers, on one core: a second thread would make sums in another order."""

    def __init__(self, models: Models, sampling: Sampling, core: int, log: Path) -> None:
        self._models, self._sampling = models, sampling
        command = python("scripts.calibrate_lib.worker")
        self._child = Child(f"pair-{core}", command, engines.engine_environment((core,)), (core,), log, ROOT)

    def load(self, more: Mapping[str, Any]) -> float:
        """Seconds it took. Raises ``ChildError``."""
        answer = self._child.ask(
            LOAD_TIMEOUT_S,
            command="load",
            target=str(self._models.target),
            draft=str(self._models.draft),
            provider=self._models.provider,
            dtype=self._sampling.dtype,
            max_model_len=MODEL_LEN,
            batch=self._sampling.batch,
            tokens=self._sampling.tokens,
            top_k=self._sampling.top_k,
            more=dict(more),
        )
        return float(answer["seconds"])

    def answer(self, items: Sequence[Item], setting: Setting) -> list[Answer]:
        """Answer every item, not scored yet."""
        answered = self._child.ask(
            ANSWER_TIMEOUT_S,
            command="answer",
            prompts=[item.prompt for item in items],
            max_tokens=[item.max_tokens for item in items],
            seeds=[item.seed for item in items],
            temperature=self._sampling.temperature,
            batch=self._sampling.batch,
            enabled=setting.policy is not None,
            policy=setting.given,
        )["answers"]
        return [msgspec.convert({"id": i.id, **a}, Answer) for i, a in zip(items, answered, strict=True)]

    def score(self, items: Sequence[Item], answers: Sequence[Answer]) -> list[float]:
        """The target's negative log-likelihood of each answer in nats."""
        nll: list[float] = self._child.ask(
            ANSWER_TIMEOUT_S,
            command="score",
            prompts=[item.prompt for item in items],
            answers=[answer.tokens for answer in answers],
        )["nll"]
        return nll

    def stop(self) -> None:
        self._child.stop()


def measure(
    task: Task, process: PairProcess, store: Store, sampling: Sampling, sentences: Sentences | None, commit: str
) -> Cell:
    """One cell, complete. What equals the lossless answer needs no second look."""
    started = time.monotonic()
    own_cell = store.cells.get(cell_key(REFERENCES[1], task.items, sampling.as_dict()))
    own = {answer.id: answer for answer in own_cell.answers} if own_cell is not None else {}
    answers = process.answer(task.items, task.setting)
    pairs = [Pair(item, own.get(item.id, answer), answer) for item, answer in zip(task.items, answers, strict=True)]
    new = [pair for pair in pairs if not _known(pair)]
    nll = dict(
        zip(
            [pair.item.id for pair in new],
            process.score([pair.item for pair in new], [pair.other for pair in new]) if new else [],
            strict=True,
        )
    )
    near = likeness(pairs, sentences)
    answers = [
        msgspec.structs.replace(pair.other, nll=nll.get(pair.item.id, pair.own.nll), similarity=near.get(pair.item.id))
        for pair in pairs
    ]
    if own:
        answers = [answer.beside(own[answer.id]) for answer in answers]
    seconds = round(time.monotonic() - started, 1)
    return Cell(setting=task.setting.name, set=task.items[0].set, answers=answers, commit=commit, seconds=seconds)


def likeness(pairs: Sequence[Pair], sentences: Sentences | None) -> dict[str, float]:
    """Cosine of each answer and the lossless one, by item; empty without a sentence model. Equal texts are alike without one."""
    if sentences is None:
        return {}
    changed = [pair for pair in pairs if pair.own.text != pair.other.text]
    rows = sentences.embed([text for pair in changed for text in (pair.own.text, pair.other.text)])
    cosines = np.einsum("nd,nd->n", rows[0::2], rows[1::2]) if changed else []
    near = {pair.item.id: 1.0 for pair in pairs}
    near.update({pair.item.id: round(float(value), 5) for pair, value in zip(changed, cosines, strict=True)})
    return near


def pairs_of(
    setting: Setting, sets: Mapping[str, Sequence[Item]], sampling: Sampling, store: Store
) -> dict[str, list[Pair]]:
    """What is there of a setting beside the lossless answers, by set; sets of which a half is missing are left out."""
    found = {}
    for name, items in sets.items():
        own = store.cells.get(cell_key(REFERENCES[1], items, sampling.as_dict()))
        other = store.cells.get(cell_key(setting, items, sampling.as_dict()))
        if own is not None and other is not None:
            rows = zip(items, own.answers, other.answers, strict=True)
            found[name] = [Pair(item, its_own, answer.whole(its_own)) for item, its_own, answer in rows]
    return found


def _known(pair: Pair) -> bool:
    return pair.own.nll is not None and pair.own.tokens == pair.other.tokens
