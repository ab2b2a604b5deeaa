"""The prompt sets: original text kept in the repository, read from ``scripts/prompts/*.jsonl``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "prompts"
MEASURED_SETS = ("prose", "copy", "json", "code")
MIXED_SET = "mixed"  # the measured ones in turn, so that a batch holds every kind
WARMUP_SET = "warmup"


@dataclass(frozen=True)
class Prompt:
    """One chat to answer."""

    id: str
    set: str
    messages: tuple[dict[str, str], ...]


def load_prompts(name: str, folder: Path = FOLDER) -> list[Prompt]:
    """Read one set; raises ``ValueError`` naming the line when it is not what it should be.

    The prompts of the mixed set keep the name of the set they come from.
    """
    if name == MIXED_SET:
        return in_turn([load_prompts(each, folder) for each in MEASURED_SETS])
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.jsonl"))
        raise ValueError(f"no prompt set {name!r} in {folder}; there are: {', '.join(known) or 'none'} and {MIXED_SET}")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompts.append(_prompt(json.loads(line), name, f"{path.name}:{number}"))
    if not prompts:
        raise ValueError(f"prompt set {path} is empty")
    return prompts


def in_turn(sets: Sequence[list[Prompt]]) -> list[Prompt]:
    """One prompt of each set after another; longer sets go on alone at the end."""
    return [prompt for row in zip_longest(*sets) for prompt in row if prompt is not None]


def _prompt(record: dict[str, Any], name: str, where: str) -> Prompt:
    if record.get("set") != name:
        raise ValueError(f"{where}: set is {record.get('set')!r}, expected {name!r}")
    messages = record.get("messages") or []
    if not record.get("id") or not messages or any(not m.get("content", "").strip() for m in messages):
        raise ValueError(f"{where}: needs an id and messages with content")
    return Prompt(record["id"], name, tuple(messages))


def prompts_for(prompts: list[Prompt], batch: int, repetition: int, at_least: int = 4) -> list[Prompt]:
    """The prompts of one repetition: whole groups of ``batch``, other ones than in the repetition before.

    Small batches get several groups so that one easy prompt does not decide the figure. Slices of different repetitions
    are disjoint as long as the set is large enough, and wrap around it then.
    """
    if not 1 <= batch <= len(prompts):
        raise ValueError(f"batch {batch} needs 1..{len(prompts)} prompts")
    count = batch * max(1, -(-at_least // batch))
    start = repetition * count
    return [prompts[(start + index) % len(prompts)] for index in range(count)]
