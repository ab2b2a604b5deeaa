"""Batches to learn from, out of a folder of shards that may grow while it is read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from scripts.distil_lib.draft import Sample
from scripts.distil_lib.features import groups, padded, shard_features
from scripts.distil_lib.held_out import held_out, measured_prompts
from scripts.distil_lib.shards import ShardError, Written, measuring, read_shard, shard_names, training
from scripts.distil_lib.target import Target

POOL = 2  # shards whose sequences are mixed; training waits until the features of these are there
SHORTEST = 8  # answer tokens
DROPPED_SHARE = 0.25  # of sequences whose first features are dropped, as those of a cached prefix are


@dataclass(eq=False)
class Batch:
    """``ids`` int64 ``[B, S]``, ``features`` ``[B, S, hidden]`` (the target's, of those positions), ``prompts``, ``lengths``
    int64 ``[B]``, ``dropped`` int64 ``[B]``: features of so many first positions are not to be given to the draft."""

    ids: torch.Tensor
    features: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor
    dropped: torch.Tensor

    @property
    def given(self) -> torch.Tensor:
        """Features with the dropped ones zero."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return self.features * (places[None] >= self.dropped[:, None])[..., None]

    @property
    def answers(self) -> int:
        """Answer tokens in it."""
        return int((self.lengths - self.prompts).sum())


@dataclass
class Place:
    """Where a feed is: enough to go on from there. ``names``: the shards of the present pool."""

    pool: int = -1
    batch: int = 0
    names: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)


class Feed:
    """Endless batches: new shards first, all of them again and again after that, never a sequence that is held out."""

    def __init__(
        self, folder: Path, target: Target, *, tokens: int, longest: int, seed: int, place: Place | None = None
    ) -> None:
        """``tokens`` of a padded batch at most; sequences are cut at ``longest``. Raises ShardError where nothing is there."""
        self._folder, self._target, self._tokens, self._longest, self._seed = folder, target, tokens, longest, seed
        self._measured = measured_prompts()
        self.place = place or Place()
        if not shard_names(folder):
            raise ShardError(f"{folder} has no shards: scripts/distil generate writes them")

    def __iter__(self) -> Iterator[Batch]:
        while True:
            place = self.place
            if not place.names:
                place.pool, place.batch = place.pool + 1, 0
                place.names = self._next_names()
            random = np.random.default_rng([self._seed, place.pool])
            batches = self._batches(random)
            while place.batch < len(batches):
                found = batches[place.batch]
                place.batch += 1  # before it is used: a state saved afterwards goes on with the next one
                yield self._batch(found, np.random.default_rng([self._seed, place.pool, place.batch]))
            place.seen += [name for name in place.names if name not in place.seen]
            place.names = []

    def _next_names(self) -> list[str]:
        there = shard_names(self._folder)
        new = [name for name in there if name not in self.place.seen]
        if new:
            return new[:POOL]
        random = np.random.default_rng([self._seed, self.place.pool, 1])
        return sorted(random.choice(there, min(POOL, len(there)), replace=False).tolist())

    def _batches(self, random: np.random.Generator) -> list[list[tuple[Written, npt.NDArray[np.float16]]]]:
        pool = []
        for name in self.place.names:
            sequences = read_shard(self._folder, name, self._target.weights)
            rows = shard_features(self._folder / "features", name, sequences, self._target)
            allowed = {id(sequence) for sequence in training(sequences) if sequence.hashed not in self._measured}
            pool += [
                (sequence, row)
                for sequence, row in zip(sequences, rows, strict=True)
                if id(sequence) in allowed and min(len(sequence.ids), self._longest) - sequence.prompt >= SHORTEST
            ]
        # Of like length, but not always with the same ones.
        lengths = [min(len(sequence.ids), self._longest) for sequence, _ in pool]
        found = groups([int(length + random.integers(0, 12)) for length in lengths], self._tokens)
        return [[pool[place] for place in found[each]] for each in random.permutation(len(found))]

    def _batch(self, found: Sequence[tuple[Written, npt.NDArray[np.float16]]], random: np.random.Generator) -> Batch:
        return make_batch(found, self._longest, self._target, random)


def make_batch(
    found: Sequence[tuple[Written, npt.NDArray[np.float16]]],
    longest: int,
    target: Target,
    random: np.random.Generator | None = None,
) -> Batch:
    """Sequences and their features as one batch; with ``random``, some lose their first features."""
    device = target.device
    lengths = np.array([min(len(sequence.ids), longest) for sequence, _ in found])
    ids = padded([sequence for sequence, _ in found])[:, : int(lengths.max())]
    features = np.zeros((*ids.shape, found[0][1].shape[1]), np.float16)
    for row, (_, own), length in zip(features, found, lengths, strict=True):
        row[:length] = own[:length]
    dropped = np.zeros(len(found), np.int64)
    if random is not None:
        # Mostly a few: what prompts share is their beginning.
        few = random.random(len(found)) ** 2 * lengths * 0.9
        dropped = np.where(random.random(len(found)) < DROPPED_SHARE, few, 0).astype(np.int64)
    return Batch(
        ids.to(device),
        torch.from_numpy(features).to(device).to(target.model.dtype),
        torch.tensor([sequence.prompt for sequence, _ in found], device=device),
        torch.from_numpy(lengths).to(device),
        torch.from_numpy(dropped).to(device),
    )


def held_sequences(
    folder: Path, target: Target, *, most: int, longest: int, every: bool = False
) -> list[tuple[Written, npt.NDArray[np.float16]]]:
    """Greedy answers to prompts that are held out, with their features; the first ``most`` in the order of shards.

    ``every``: all prompts of the folder are, because they are a set to measure with.
    """
    found: list[tuple[Written, npt.NDArray[np.float16]]] = []
    for name in shard_names(folder):
        there = read_shard(folder, name, target.weights)
        sequences = [
            each
            for each in (there if every else measuring(there))
            if each.temperature == 0 and min(len(each.ids), longest) - each.prompt >= SHORTEST
        ]
        if sequences:
            rows = shard_features(folder / "features", f"held-{name}", sequences, target)
            found += zip(sequences, rows, strict=True)
        if len(found) >= most:
            break
    return found[:most]


def sample(folder: Path, target: Target, *, tokens: int, longest: int) -> list[Sample]:
    """About ``tokens`` tokens that may be learned from, with their features: what a draft begins with."""
    found: list[Sample] = []
    for name in shard_names(folder):
        sequences = read_shard(folder, name, target.weights)
        rows = shard_features(folder / "features", name, sequences, target)
        pairs = [(each, row) for each, row in zip(sequences, rows, strict=True) if not held_out(each.hashed)]
        for group in groups([len(each.ids) for each, _ in pairs], 4096):
            batch = make_batch([pairs[place] for place in group], longest, target)
            places = torch.arange(batch.ids.shape[1], device=target.device)[None]
            found.append((batch.ids, batch.features, places < batch.lengths[:, None]))
            tokens -= int(batch.lengths.sum())
            if tokens <= 0:
                return found
    return found


def token_counts(folder: Path, weights: str, vocabulary: int, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """How often each token was written in answers that may be learned from, ``[vocabulary]``."""
    counts = np.zeros(vocabulary, np.int64)
    for name in names:
        for sequence in training(read_shard(folder, name, weights)):
            counts += np.bincount(sequence.ids[sequence.prompt :], minlength=vocabulary)
    return counts
