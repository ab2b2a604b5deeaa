"""The target's own answers, made once and kept in ``results/``: what every candidate is led along."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

FORMAT = 1
SEED = 1000  # of the first sampled answer; each has its own
GREEDY, SAMPLED = "greedy", "sampled"
TEMPERATURES = {GREEDY: 0.0, SAMPLED: 1.0}


class Answers(msgspec.Struct, kw_only=True):
    """Of all prompts, in their order.

    ``reading_s``: seconds the target takes from a prompt to its first token. ``manifest``: hex of what its KV is, empty where that
    cannot be moved. ``kv``: which prompts' KV is in :func:`kv_file`. ``vocab_size``: tokens from there on do not exist.
    """

    format: int
    sets: list[str]
    prompts: list[list[int]]
    seeds: list[int]
    limit: int  # most tokens of an answer
    greedy: list[list[int]]
    sampled: list[list[int]]
    reading_s: list[float]
    vocab_size: int
    manifest: str = ""
    kv_type: str = ""
    kv: list[bool] = []

    def of(self, kind: str) -> list[list[int]]:
        return self.greedy if kind == GREEDY else self.sampled

    def seed(self, kind: str, index: int) -> int:
        return self.seeds[index] if kind == SAMPLED else 0


@dataclass(frozen=True)
class Folder:
    """Where answers of one key lie. Their KV is what the prompts said: it stays on this machine."""

    path: Path
    key: str

    @property
    def file(self) -> Path:
        return self.path / f"{self.key}.json"

    def kv_file(self, index: int) -> Path:
        return self.path / f"{self.key}-kv-{index}.npy"

    def features_file(self, kind: str, index: int) -> Path:
        return self.path / f"{self.key}-hidden-{kind}-{index}.npy"

    def load(self) -> Answers | None:
        """What is kept; None where it is not there, not whole, or of another version."""
        try:
            answers = msgspec.json.decode(self.file.read_bytes(), type=Answers)
        except (OSError, msgspec.DecodeError):
            return None
        there = all(self.kv_file(index).is_file() for index, written in enumerate(answers.kv) if written)
        return answers if answers.format == FORMAT and there else None

    def save(self, answers: Answers) -> None:
        """In one move, after the KV files were written."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path, prefix=".answers")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(answers))
        os.replace(temporary, self.file)

    def has_features(self, answers: Answers) -> bool:
        """Whether the target's hidden states of all answers are there."""
        return all(self.features_file(kind, i).is_file() for kind in TEMPERATURES for i in range(len(answers.prompts)))
