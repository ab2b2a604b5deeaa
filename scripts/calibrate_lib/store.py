"""What was measured, in one JSON file that is written anew after every cell: a run goes on where another one ended.

A cell is one setting on one set of items. It is kept under a digest of all its answers depend on besides the two models: the
items, the policy, how they were sampled. The models and the versions of what computes them are the file's *conditions*.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from scripts.calibrate_lib.answers import Answer
from scripts.calibrate_lib.item_sets import Item, digest
from scripts.calibrate_lib.knobs import Setting

FORMAT = 1


class OtherConditions(ValueError):
    """The file holds another pair's measurements, or none of this tool's."""


class Cell(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answers of one setting to one set."""

    setting: str
    set: str
    answers: list[Answer]
    commit: str = ""  # of the code that it was measured with
    seconds: float = 0.0


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One setting's turn in one round of the speed measurement: tokens a second on each prompt set."""

    setting: str
    tokens_per_s: dict[str, float]
    accepted: int
    drafted: int
    relaxed: int


class Round(msgspec.Struct, kw_only=True):
    """All settings once, directly after one another, on the same prompts."""

    key: str  # of what was measured and how
    turns: list[Speed]
    commit: str = ""
    other_load: float = 0.0  # share of the machine that other programs took just before


@dataclass
class Store:
    """``conditions``: what every cell of the file has in common."""

    path: Path
    conditions: dict[str, Any]
    cells: dict[str, Cell] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, conditions: dict[str, Any], *, fresh: bool = False) -> "Store":
        """What is kept in ``path``; empty where there is no file, or with ``fresh``.

        Raises:
            OtherConditions: it holds what was measured under others; names them.
        """
        store = cls(path, conditions)
        if fresh or not path.exists():
            return store
        hint = f"choose another --out, or --fresh to measure {path.name} anew"
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise OtherConditions(f"{path}: has format {content['format']}, this is {FORMAT}; {hint}")
            other = [
                f"{name} {content['conditions'].get(name)}, now {value}"
                for name, value in conditions.items()
                if content["conditions"].get(name) != value
            ]
            if other:
                raise OtherConditions(f"{path}: was measured with {'; '.join(other)}; {hint}")
            store.cells = {key: msgspec.convert(cell, Cell) for key, cell in content["cells"].items()}
            store.rounds = msgspec.convert(content["rounds"], list[Round])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, OtherConditions):
                raise
            raise OtherConditions(f"{path}: is not a result of scripts/calibrate ({error}); {hint}") from None
        return store

    def save(self, **more: Any) -> None:
        """Write everything, and ``more`` at its head, in one move."""
        content = {
            "format": FORMAT,
            **more,
            "conditions": self.conditions,
            "cells": msgspec.to_builtins(self.cells),
            "rounds": msgspec.to_builtins(self.rounds),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(_lines(content))
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def rounds_of(self, key: str) -> list[Round]:
        return [item for item in self.rounds if item.key == key]


def cell_key(setting: Setting, items: Sequence[Item], sampling: Mapping[str, Any]) -> str:
    """Names a cell by what its answers depend on; settings that say the same share it."""
    what = ["plain"] if setting.policy is None else ["policy", setting.given]
    return _hash([what, digest(items), dict(sampling)])


def round_key(settings: Sequence[Setting], prompts: Sequence[str], how: Mapping[str, Any]) -> str:
    """Names a round of the speed measurement; what is compared in it has to be measured together."""
    return _hash([[setting.name for setting in settings], [s.given for s in settings], list(prompts), dict(how)])


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=10).hexdigest()


def _lines(content: Mapping[str, Any]) -> str:
    """JSON with an answer a line: a difference between two runs is one between lines."""
    head = json.dumps({name: value for name, value in content.items() if name not in ("cells", "rounds")}, indent=1)
    cells = [
        f'  "{key}": {json.dumps(_answers_last(cell))[: -len("null}")]}[\n   '
        + ",\n   ".join(json.dumps(answer) for answer in cell["answers"])
        + "\n  ]}"
        for key, cell in content["cells"].items()
    ]
    rounds = [f"  {json.dumps(item)}" for item in content["rounds"]]
    return f'{head[:-2]},\n "cells": {{\n{_joined(cells)} }},\n "rounds": [\n{_joined(rounds)} ]\n}}\n'


def _answers_last(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in cell.items() if name != "answers"}, "answers": None}


def _joined(lines: Sequence[str]) -> str:
    return ",\n".join(lines) + "\n" if lines else ""
