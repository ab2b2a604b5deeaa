"""The target's last hidden states of a shard, computed once and kept beside it: float16 rows in the order of its tokens."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from scripts.distil_lib.shards import Written
from scripts.distil_lib.target import Target

BATCH_TOKENS = 4096  # of one pass of the target


def padded(sequences: Sequence[Written]) -> torch.Tensor:
    """Token ids int64 ``[B, S]``, zeros at the end of shorter ones."""
    ids = np.zeros((len(sequences), max(len(sequence.ids) for sequence in sequences)), np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence.ids)] = sequence.ids
    return torch.from_numpy(ids)


def groups(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Places of items of like length, such that a padded group has at most ``tokens`` tokens (or one item)."""
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda each: lengths[each]):
        if found and (len(found[-1]) + 1) * lengths[place] <= tokens:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def shard_features(
    folder: Path, name: str, sequences: Sequence[Written], target: Target
) -> list[npt.NDArray[np.float16]]:
    """Features of every sequence of a shard, ``[n, hidden]`` each (read from disk as they are used); made if not there."""
    lengths = [len(sequence.ids) for sequence in sequences]
    shape = (sum(lengths), target.shape.hidden)
    path = folder / f"{name}.npy"
    rows = _open(path, shape)
    if rows is None:
        _make(path, shape, sequences, target)
        rows = _open(path, shape)
        assert rows is not None
    ends = np.cumsum(lengths)
    return [rows[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _open(path: Path, shape: tuple[int, int]) -> npt.NDArray[np.float16] | None:
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError):
        return None
    return rows if rows.shape == shape and rows.dtype == np.float16 else None


def _make(path: Path, shape: tuple[int, int], sequences: Sequence[Written], target: Target) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = [len(sequence.ids) for sequence in sequences]
    starts = np.cumsum([0, *lengths])
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    rows = np.lib.format.open_memmap(temporary, "w+", np.float16, shape)
    for group in groups(lengths, BATCH_TOKENS):
        found = target.features(padded([sequences[place] for place in group])).float().clamp(-65504, 65504)
        for place, one in zip(group, found.cpu().numpy(), strict=True):
            rows[starts[place] : starts[place] + lengths[place]] = one[: lengths[place]]
    rows.flush()
    del rows
    os.replace(temporary, path)
