"""What may draft for a target: prepared ONNX folders, and the look-up that needs no weights. Facts are read, nothing is loaded."""

import importlib.util
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hw.onnx.checkpoint import (
    CONDITIONED,
    CheckpointError,
    Manifest,
    ModelShape,
    read_json,
    tokenizer_fingerprint,
    weight_files,
    weights_fingerprint,
)

LOOKUP = "suffix"  # the name of what drafts from text that repeats, here and in the config
MODEL = "model"
_RUNTIME = "hw.onnx.conditioned"  # what runs a draft that takes the target's hidden states


class Unusable(ValueError):
    """A folder that cannot draft for this target; the text says why and what to do."""


@dataclass(frozen=True)
class Target:
    """The checkpoint. ``weights`` and ``tokenizer`` are fingerprints; ``nbytes`` of the weights as they are stored."""

    folder: Path
    shape: ModelShape
    weights: str
    tokenizer: str
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Candidate:
    """One row of the table. ``kind``: :data:`MODEL`, ``conditioned`` or :data:`LOOKUP`, of which ``folder`` and the rest are empty."""

    name: str
    kind: str
    folder: Path | None = None
    manifest: Manifest | None = None
    key: str = ""  # of its content
    nbytes: int = 0

    @property
    def asks_model(self) -> bool:
        return self.kind != LOOKUP


def read_target(folder: Path) -> Target:
    """Raises :class:`Unusable`."""
    try:
        shape = ModelShape.read(folder)
        files = weight_files(folder)
        kept = Manifest.read(folder) if (folder / "chain.json").is_file() else None
        return Target(
            folder,
            shape,
            kept.weights if kept is not None else weights_fingerprint(folder),
            tokenizer_fingerprint(folder),
            _parameters(files),
            sum(file.stat().st_size for file in files),
        )
    except CheckpointError as error:
        raise Unusable(
            f"target {folder}: {error}; name a checkpoint with --target, or run scripts/prepare_models"
        ) from None


def read_candidate(folder: Path, target: Target) -> Candidate:
    """A folder as a candidate for ``target``. Raises :class:`Unusable`."""
    if not (folder / "model.onnx").is_file():
        more = (
            f"; it is a checkpoint: scripts/prepare_models --target {target.folder} --draft {folder} --bits 4 makes a draft of it"
            if (folder / "config.json").is_file()
            else "; scripts/prepare_models makes drafts"
        )
        raise Unusable(f"{folder} has no model.onnx{more}")
    try:
        manifest = Manifest.read(folder)
        tokenizer = tokenizer_fingerprint(folder)
    except CheckpointError as error:
        raise Unusable(f"{folder}: {error}") from None
    if manifest.kind not in ("draft", CONDITIONED):
        raise Unusable(f"{folder} is no draft, but of kind {manifest.kind!r}")
    if tokenizer != target.tokenizer:
        raise Unusable(f"{folder} has another tokenizer than the target: {tokenizer_difference(target.folder, folder)}")
    if manifest.kind == CONDITIONED:
        _check_conditioned(folder, manifest, target)
    nbytes = sum(file.stat().st_size for file in weight_files(folder))
    key = json.dumps([manifest.key, manifest.files], sort_keys=True)
    return Candidate(folder.name, CONDITIONED if manifest.kind == CONDITIONED else MODEL, folder, manifest, key, nbytes)


def _check_conditioned(folder: Path, manifest: Manifest, target: Target) -> None:
    if manifest.target_weights != target.weights:
        raise Unusable(
            f"{folder} was trained on another target's hidden states: {manifest.target_weights}, this target is {target.weights}; "
            "scripts/distil trains one for it"
        )
    if importlib.util.find_spec(_RUNTIME) is None:
        raise Unusable(
            f"{folder} takes the target's hidden states, which this version cannot run yet ({_RUNTIME} is missing)"
        )


def lookup() -> Candidate:
    """The source without weights: suffix decoding, or prompt look-up where its library is missing."""
    return Candidate(LOOKUP, LOOKUP, key=LOOKUP)


def tokenizer_difference(target: Path, draft: Path) -> str:
    """The first fact in which two tokenizers differ, in words.

    Raises:
        CheckpointError: one cannot be read.
    """
    ours, theirs = (read_json(folder / "tokenizer.json") for folder in (target, draft))
    names = "the target", "the draft"
    models = [each.get("model") or {} for each in (ours, theirs)]
    kinds = [model.get("type") or "BPE" for model in models]
    if kinds[0] != kinds[1]:
        return f"{names[0]}'s is {kinds[0]}, {names[1]}'s {kinds[1]}"
    texts = [_texts(each) for each in (ours, theirs)]
    for number in sorted(texts[0].keys() | texts[1].keys()):
        here, there = texts[0].get(number), texts[1].get(number)
        if here != there:
            said = [f"{text!r}" if text is not None else "nothing" for text in (here, there)]
            sizes = f" ({len(texts[0])} and {len(texts[1])} tokens in all)" if len(texts[0]) != len(texts[1]) else ""
            return f"id {number} is {said[0]} in {names[0]} and {said[1]} in {names[1]}{sizes}"
    merges = [[" ".join(m) if isinstance(m, list) else m for m in model.get("merges") or []] for model in models]
    for number, (mine, other) in enumerate(zip(*merges, strict=False)):
        if mine != other:
            return f"merge {number} is {mine!r} in {names[0]} and {other!r} in {names[1]}"
    if len(merges[0]) != len(merges[1]):
        return f"{names[0]} has {len(merges[0])} merges, {names[1]} {len(merges[1])}"
    special = [{int(t["id"]) for t in each.get("added_tokens") or [] if t.get("special")} for each in (ours, theirs)]
    odd = min(special[0] ^ special[1], default=-1)
    return f"id {odd} is special in only one of them"


def _texts(tokenizer: dict[str, Any]) -> dict[int, str]:
    """What every id spells."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    found = (
        {int(number): str(text) for text, number in vocab.items()}
        if isinstance(vocab, dict)
        else {number: str(piece[0]) for number, piece in enumerate(vocab)}
    )
    return found | {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens") or []}


def _parameters(files: Sequence[Path]) -> int:
    """Numbers in safetensors files; 0 where weights are stored otherwise."""
    return sum(math.prod(shape) for file in files if file.suffix == ".safetensors" for shape in _shapes(file))


def _shapes(file: Path) -> Iterator[list[int]]:
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        header: dict[str, Any] = json.loads(content.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield entry["shape"]
