"""The systems that are compared. Some are asked over HTTP; others are read off the drafts in the trace of one that is."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.answers_lib.questions import Question
from scripts.answers_lib.records import Record


@dataclass(frozen=True)
class System:
    """``chain`` is sent with each request; else ``derive`` makes the answer's reading from a record of ``chain``'s."""

    name: str
    title: str
    chain: dict[str, Any] | None = None
    derive: Callable[[Question, Record], str | None] | None = None


def draft(question: Question, record: Record) -> str | None:
    """What the first draft of the draft model answers, the greedy one at temperature 0."""
    texts = _written(record)
    return question.read(texts[0], record.wording) if texts else None


def majority(question: Question, record: Record) -> str | None:
    """The reading that most drafts of the draft model have; of equally many, the one that comes first."""
    readings = [question.read(text, record.wording) for text in _written(record)]
    counted = Counter(reading for reading in readings if reading is not None)  # keeps the order of first appearance
    return counted.most_common(1)[0][0] if counted else None


def _written(record: Record) -> list[str]:
    """Texts of the drafts of models, in the order of their samples."""
    drafts = [draft for draft in record.drafts if draft.source.startswith("model:")]
    return [draft.text for draft in sorted(drafts, key=lambda draft: int(draft.source.rpartition("#")[2] or 0))]


def systems(k: int) -> dict[str, System]:
    """All of them by name, for ``k`` drafts."""
    answer = {"mode": "answer", "k": k, "trace": True, "sources": ["model"]}
    found = [
        System("target", "the target alone, no drafts", {"enabled": False}),
        System("draft", "the draft alone, its greedy answer", derive=draft),
        System("majority", f"majority of {k} drafts", derive=majority),
        System("chain", "answer chain, lossless: drafts decide how fast the target's answer comes", answer),
        System(
            "chain_chat", "answer chain, policy chat: what the drafts agree on may stand", {**answer, "policy": "chat"}
        ),
        System(
            "chain_write", "answer chain, where drafts diverge the target sees them all", {**answer, "resolve": "write"}
        ),
    ]
    return {system.name: system for system in found}


def reading(system: System, question: Question, record: Record) -> str | None:
    """What the system answered, in normal form."""
    if system.derive is not None:
        return system.derive(question, record)
    return question.read(record.text, record.wording)


def asked(chosen: Sequence[System], every: dict[str, System]) -> list[System]:
    """Those to send requests to: derived ones need the chain's."""
    sent = [system for system in chosen if system.chain is not None]
    if any(system.derive is not None for system in chosen) and every["chain"] not in sent:
        sent.append(every["chain"])
    return sent
