"""What a model folder holds: fingerprints of its weights and tokenizer, its shape, and the manifest of what we made.

Reads JSON and raw bytes only (no torch, no transformers), so that a validator can call it in milliseconds.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

MANIFEST = "chain.json"
MANIFEST_FORMAT = 1
CONDITIONED = "conditioned"  # the kind of a draft that takes the target's hidden states
HEAD_IDS = "head_ids.npy"  # of such a draft: int32 [head_size], ascending: the vocabulary id of each logit

_HEADER_LIMIT = 100 * 1024 * 1024


class CheckpointError(Exception):
    """A model folder is missing something, or holds something else than it should; the text says which file and why."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError when it is absent, broken, or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where an object belongs")
    return value


def tokenizer_fingerprint(folder: Path | str) -> str:
    """sha256 (64 hex digits) of what the token ids of a folder's ``tokenizer.json`` mean.

    Covers every id and its text (vocabulary and added tokens together), the merges in their order, and which ids are
    special. Independent of the order of entries in the file, of how merges are written, and of padding: rows that a
    checkpoint appends to its embedding matrix have no entry in ``tokenizer.json``.

    Raises CheckpointError when the folder has no usable ``tokenizer.json``.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file() and (Path(folder) / "tokenizer.model").is_file():
        raise CheckpointError(
            f"{path} is missing: only tokenizer.model is there. Write it with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    tokenizer = read_json(path)
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not model.get("vocab"):
        raise CheckpointError(f"{path} has no vocabulary")

    ids: dict[int, str] = {}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        ids.update((int(number), text) for text, number in vocab.items())
    else:  # unigram models: a list of [piece, score], the id is the place
        ids.update((number, piece[0]) for number, piece in enumerate(vocab))
    special = set()
    for token in tokenizer.get("added_tokens") or []:
        ids[int(token["id"])] = token["content"]
        if token.get("special"):
            special.add(int(token["id"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges") or []]

    content = {
        "type": model.get("type") or "BPE",
        "ids": sorted(ids.items()),
        "merges": merges,
        "special": sorted(special),
    }
    return hashlib.sha256(canonical(content)).hexdigest()


def weights_fingerprint(folder: Path | str) -> str:
    """sha256 (64 hex digits) over the weights of a checkpoint or ONNX folder.

    Safetensors are hashed tensor by tensor in the order of their names (name, dtype, shape, bytes), so the result does
    not depend on how they are split into files or on the files' own metadata. Other formats (``pytorch_model*.bin``,
    ``model.onnx`` with its data) are hashed file by file in the order of their names.

    Raises CheckpointError when the folder is missing or has no weights.
    """
    folder = Path(folder)
    files = weight_files(folder)
    digest = hashlib.sha256()
    if files[0].suffix == ".safetensors":
        tensors = sorted((name, path, entry, start) for path in files for name, entry, start in _tensors(path))
        for name, path, entry, start in tensors:
            begin, end = json.loads(entry)["data_offsets"]
            head = json.loads(entry)
            digest.update(canonical([name, head["dtype"], head["shape"]]))
            _hash_range(digest, path, start + begin, start + end)
    else:
        for path in files:
            digest.update(canonical([path.name, path.stat().st_size]))
            _hash_range(digest, path, 0, path.stat().st_size)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, sorted by name; never empty.

    Raises CheckpointError when the folder is missing or has none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give a Hugging Face checkpoint folder (config.json, weights)")
    for patterns in (("*.safetensors",), ("*.onnx", "*.onnx.data", "*.onnx_data"), ("pytorch_model*.bin",)):
        files = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        if files:
            return files
    raise CheckpointError(f"{folder} has no weights (*.safetensors, *.onnx or pytorch_model*.bin)")


def _tensors(path: Path) -> Iterator[tuple[str, str, int]]:
    """Name, header entry (as JSON text) and start of the data section of each tensor in a safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, path.stat().st_size - 8):
            raise CheckpointError(f"{path} is not a safetensors file, or was cut off")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a broken header: {error}") from error
    size = path.stat().st_size - 8 - length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not 0 <= entry["data_offsets"][0] <= entry["data_offsets"][1] <= size:
            raise CheckpointError(f"{path} was cut off: {name} lies beyond its end")
        yield name, json.dumps(entry, sort_keys=True), 8 + length


def _hash_range(digest: "hashlib._Hash", path: Path, begin: int, end: int) -> None:
    if begin == end:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start in range(begin, end, 1 << 24):
            digest.update(data[start : min(start + (1 << 24), end)])


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model, as its ``config.json`` has them."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float
    rope_scaling: str  # canonical JSON of whatever else decides positions; empty: nothing does

    @classmethod
    def read(cls, folder: Path | str) -> Self:
        """From a checkpoint's ``config.json``; CheckpointError names what it lacks."""
        path = Path(folder) / "config.json"
        config = read_json(path)
        architectures = config.get("architectures") or ["unknown"]
        # Multimodal checkpoints keep the language model's sizes one level down.
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        try:
            heads = int(text["num_attention_heads"])
            rope = text.get("rope_parameters") or {}
            return cls(
                architecture=str(architectures[0]),
                layers=int(text["num_hidden_layers"]),
                kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
                vocab_size=int(text.get("vocab_size") or config["vocab_size"]),
                max_context=int(text["max_position_embeddings"]),
                rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0),
                rope_scaling=_rope_scaling(rope | (text.get("rope_scaling") or {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} does not describe a decoder-only model: {error!r}") from error


def _rope_scaling(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rest = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type", "type")}
    return "" if kind == "default" and not rest else canonical({**rest, "type": kind}).decode()


@dataclass(frozen=True)
class Manifest:
    """``chain.json``: what a prepared folder is, what it was made of, and which files must be there.

    ``kind`` is ``checkpoint`` (for the target), ``draft`` or ``conditioned`` (ONNX), or ``sentences`` (ONNX, an encoder); what is no draft leaves
    the draft's fields at their defaults. ``last_logits_only``: a call returns the logits of the last position alone, float [batch, 1, vocab].
    ``kv_dtype`` is numpy's name of the past's element type, whose layout is [batch, kv_heads, position, head_dim].
    ``conditioned`` is a draft, too, one that takes the target's last hidden states (``hidden_size`` values a position): its logits
    are those of the ``head_size`` tokens in ``head_ids.npy``, ``target_weights`` is the fingerprint of the checkpoint whose hidden
    states it was trained on, and ``trained`` the record of that.
    """

    kind: str
    key: str
    weights: str
    tokenizer: str
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float
    created_by: dict[str, str]
    rope_scaling: str | None = None  # None: written before it was recorded
    source: str = ""
    bits: int = 16
    algo: str = ""
    block_size: int = 0
    provider: str = ""
    kv_dtype: str = ""
    last_logits_only: bool = False
    hidden_size: int = 0
    head_size: int = 0
    target_weights: str = ""
    trained: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    @classmethod
    def read(cls, folder: Path | str) -> Self:
        """The manifest of a folder; CheckpointError when it has none or it is of another format."""
        path = Path(folder) / MANIFEST
        value = read_json(path)
        if value.get("format") != MANIFEST_FORMAT:
            raise CheckpointError(f"{path} has format {value.get('format')!r}, this version reads {MANIFEST_FORMAT}")
        try:
            return cls(**value)
        except TypeError as error:
            raise CheckpointError(f"{path} is incomplete or of another version: {error}") from error

    def write(self, folder: Path) -> None:
        """Write it into a finished folder, with the sizes of the files now there."""
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MANIFEST}
        text = json.dumps(asdict(self) | {"files": sizes}, indent=2) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    def complete(self, folder: Path) -> bool:
        """Does it say all this version needs, and are all files still there with their sizes?"""
        return self.rope_scaling is not None and all(
            (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in self.files.items()
        )


def conditioned_facts(folder: Path | str) -> Manifest | None:
    """The manifest of a draft that takes the target's hidden states; None for any other folder. CheckpointError for a broken one."""
    path = Path(folder) / MANIFEST
    if not path.is_file() or read_json(path).get("kind") != CONDITIONED:
        return None
    return Manifest.read(folder)


def known_weights(folder: Path | str) -> str:
    """The fingerprint of a folder's weights: what was prepared says so, of others every weight is read. CheckpointError."""
    try:
        return Manifest.read(folder).weights
    except CheckpointError:
        return weights_fingerprint(folder)


def canonical(value: Any) -> bytes:
    """JSON with one spelling per value: what gets hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
