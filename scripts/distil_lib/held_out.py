"""Prompts that training must never see: those the project measures with, and a share of its own that the live figure uses."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from scripts.answers_lib import questions as answer_questions
from scripts.bench_lib import prompts as bench_prompts
from scripts.calibrate_lib import item_sets

HELD_SHARE = 32  # one prompt of so many is held out of training, whichever run or machine makes it
_FILES = (
    (bench_prompts.FOLDER, "*.jsonl"),
    (item_sets.FOLDER, "*.yaml"),
    (Path(answer_questions.__file__).parent, "*.yaml"),
)
_LETTERS = 8  # a shorter string in those files is a name or a key, not a prompt


def prompt_hash(text: str) -> str:
    """16 hex digits of what a prompt says: letters and digits in lower case, whatever stands between them is one space."""
    words = re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def held_out(hashed: str) -> bool:
    """Whether a prompt is for measuring only. Decided by its hash, so that it never changes sides."""
    return int(hashed, 16) % HELD_SHARE == 0


def measured_prompts(files: tuple[tuple[Path, str], ...] = _FILES) -> frozenset[str]:
    """Hashes of every text in the prompt and gold sets the project measures with. Raises ValueError for a folder without any."""
    found = set()
    for folder, pattern in files:
        paths = sorted(folder.glob(pattern))
        if not paths:
            raise ValueError(f"{folder} has no {pattern}: what must stay out of training is not known")
        for path in paths:
            found |= {prompt_hash(text) for text in _texts(path) if len(text) >= _LETTERS}
    return frozenset(found)


def _texts(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        for line in text.splitlines():
            if line.strip():
                yield from _strings(json.loads(line))
    else:
        yield from _strings(yaml.safe_load(text))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
