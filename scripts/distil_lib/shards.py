"""Shards: what a target wrote, as token ids. ``NAME.npz`` with ``NAME.json`` beside it; a shard is there whole or not at all.

The arrays: ``ids`` all sequences end to end (uint16, or uint32 where the vocabulary is larger), ``plen`` int32 tokens of each
that are prompt, ``tot`` int32 tokens of each, ``temps`` float32 temperature its answer was drawn at (0 greedy; -1: a text
that was given, nothing drawn). The JSON: ``hashes`` of the prompts in the same order, ``kinds`` of them, ``weights`` the
fingerprint of the target that wrote it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scripts.distil_lib.held_out import held_out

TEXT = -1.0  # temperature of a text that was given


class ShardError(Exception):
    """A folder of shards cannot be used; the text says which file and why."""


@dataclass(frozen=True, eq=False)
class Written:
    """One conversation: ``ids`` int64 ``[n]``, the first ``prompt`` of them given, the rest written by the target."""

    ids: npt.NDArray[np.int64]
    prompt: int
    temperature: float
    hashed: str
    kind: str = ""

    @property
    def answer(self) -> int:
        """How many tokens the target wrote."""
        return len(self.ids) - self.prompt


def write_shard(folder: Path, name: str, sequences: Sequence[Written], *, weights: str, vocabulary: int) -> None:
    """Write one shard into ``folder`` (created): first the JSON, then the arrays, whose being there makes it one."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "weights": weights,
        "hashes": [sequence.hashed for sequence in sequences],
        "kinds": [sequence.kind for sequence in sequences],
    }
    beside = folder / f".{name}.json"
    beside.write_text(json.dumps(about), encoding="utf-8")
    os.replace(beside, folder / f"{name}.json")
    dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    temporary = folder / f".{name}.npz"
    with temporary.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate([sequence.ids for sequence in sequences]).astype(dtype),
            plen=np.array([sequence.prompt for sequence in sequences], np.int32),
            tot=np.array([len(sequence.ids) for sequence in sequences], np.int32),
            temps=np.array([sequence.temperature for sequence in sequences], np.float32),
        )
    os.replace(temporary, folder / f"{name}.npz")


def shard_names(folder: Path) -> list[str]:
    """Names of the complete shards there, in order."""
    return sorted(path.stem for path in folder.glob("*.npz") if not path.name.startswith("."))


def known_hashes(folder: Path) -> set[str]:
    """Hashes of every prompt there."""
    return {hashed for name in shard_names(folder) for hashed in _about(folder, name)["hashes"]}


def read_shard(folder: Path, name: str, weights: str) -> list[Written]:
    """Its sequences. Raises ShardError when it is broken, or written by another target than the one of ``weights``."""
    about = _about(folder, name)
    if about.get("weights") != weights:
        raise ShardError(
            f"{folder / name}.npz was written by the target {str(about.get('weights'))[:16]}, this one is {weights[:16]}: "
            "a draft learns from its own target only"
        )
    try:
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            ids, plen, tot, temps = (arrays[key] for key in ("ids", "plen", "tot", "temps"))
    except (OSError, ValueError, KeyError) as error:
        raise ShardError(f"{folder / name}.npz cannot be read: {error}") from error
    hashes, kinds = about["hashes"], about.get("kinds") or [""] * len(about["hashes"])
    if not len(hashes) == len(plen) == len(tot) == len(temps) == len(kinds) or int(tot.sum()) != len(ids):
        raise ShardError(f"{folder / name}.npz and its JSON do not belong together")
    ends = np.cumsum(tot)
    return [
        Written(ids[end - total : end].astype(np.int64), int(prompt), float(temperature), hashed, kind)
        for end, total, prompt, temperature, hashed, kind in zip(ends, tot, plen, temps, hashes, kinds, strict=True)
    ]


def training(sequences: Sequence[Written]) -> Iterator[Written]:
    """Those that may be learned from."""
    return (sequence for sequence in sequences if not held_out(sequence.hashed))


def measuring(sequences: Sequence[Written]) -> Iterator[Written]:
    """Those that may only be measured with."""
    return (sequence for sequence in sequences if held_out(sequence.hashed))


def _about(folder: Path, name: str) -> dict[str, list[str]]:
    try:
        about = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        if not isinstance(about["hashes"], list):
            raise TypeError("hashes is no list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{folder / name}.json cannot be read: {error}") from error
    found: dict[str, list[str]] = about
    return found
