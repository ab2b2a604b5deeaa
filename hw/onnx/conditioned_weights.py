"""The trained part of a conditioned draft, in one safetensors file of a few MB: everything that is not the target's own.

Matrices are float16, vectors float32, ``head_ids`` int32; the file's metadata says of which target (``target_weights``, a
fingerprint) and of which sizes. The embedding and the head are the target's and come from its checkpoint.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hw.onnx.checkpoint import CheckpointError, read_json, weight_files

Tensors = dict[str, npt.NDArray[np.float32]]

FORMAT = "conditioned-draft-1"
MOST_BYTES = 20_000_000  # of a file that is shipped
_TYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class ConditionedShape:
    """Sizes of a conditioned draft."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    epsilon: float
    theta: float
    context: int
    vocabulary: int
    head_size: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the trained tensors."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "embedding_norm.weight": (self.hidden,),
            "feature_norm.weight": (self.hidden,),
            "fuse.weight": (self.hidden, 2 * self.hidden),
            "norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            found |= {
                f"layers.{layer}.input_norm.weight": (self.hidden,),
                f"layers.{layer}.query.weight": (wide, self.hidden),
                f"layers.{layer}.key.weight": (narrow, self.hidden),
                f"layers.{layer}.value.weight": (narrow, self.hidden),
                f"layers.{layer}.out.weight": (self.hidden, wide),
                f"layers.{layer}.post_norm.weight": (self.hidden,),
                f"layers.{layer}.gate.weight": (self.intermediate, self.hidden),
                f"layers.{layer}.up.weight": (self.intermediate, self.hidden),
                f"layers.{layer}.down.weight": (self.hidden, self.intermediate),
            }
        return found


@dataclass(frozen=True)
class Trained:
    """A conditioned draft without its target. ``tensors`` float32 as :meth:`ConditionedShape.tensors` names them; ``head_ids``
    int32 ``[head_size]``, ascending: which tokens its logits are of."""

    shape: ConditionedShape
    target_weights: str
    tensors: Tensors
    head_ids: npt.NDArray[np.int32]

    def check(self) -> None:
        """CheckpointError naming what does not fit its sizes."""
        wanted = self.shape.tensors()
        for name in sorted(wanted.keys() ^ self.tensors.keys()):
            raise CheckpointError(f"a conditioned draft {'lacks' if name in wanted else 'has no place for'} {name}")
        for name, shape in wanted.items():
            value = self.tensors[name]
            if value.shape != shape or not np.isfinite(value).all():
                raise CheckpointError(f"{name} {value.shape} must be finite numbers of shape {shape}")
        ids = self.head_ids
        if (
            ids.shape != (self.shape.head_size,)
            or ids[0] < 0
            or ids[-1] >= self.shape.vocabulary
            or (np.diff(ids) <= 0).any()
        ):
            raise CheckpointError(
                f"head_ids must be {self.shape.head_size} ascending ids below {self.shape.vocabulary}"
            )


def write_trained(path: Path, trained: Trained) -> None:
    """Write it, replacing what was there as a whole. Raises CheckpointError where it does not fit its own sizes."""
    from safetensors.numpy import save

    trained.check()
    stored: dict[str, npt.NDArray[Any]] = {"head_ids": trained.head_ids.astype(np.int32)}
    for name, value in trained.tensors.items():
        stored[name] = np.ascontiguousarray(value.astype(np.float16) if value.ndim == 2 else value.astype(np.float32))
    about = {"format": FORMAT, "target_weights": trained.target_weights, "shape": json.dumps(asdict(trained.shape))}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(save(stored, metadata=about))
    os.replace(temporary, path)


def read_trained(path: Path) -> Trained:
    """Raises CheckpointError for a file that is not one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise CheckpointError(f"{path} is no conditioned draft ({about.get('format')!r} is not {FORMAT!r})")
            names = list(file.keys())
            stored = {name: file.get_tensor(name) for name in names}
        shape = ConditionedShape(**json.loads(about["shape"]))
        ids = stored.pop("head_ids")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    trained = Trained(
        shape, about["target_weights"], {name: value.astype(np.float32) for name, value in stored.items()}, ids
    )
    trained.check()
    return trained


def trained_for(path: Path) -> str:
    """Fingerprint of the target a file of weights belongs to, without reading the weights; empty for another kind of file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
    except (OSError, SafetensorError):
        return ""
    return str(about.get("target_weights", "")) if about.get("format") == FORMAT else ""


def target_tensors(checkpoint: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Embedding and head of a llama-like checkpoint, float32 ``[vocabulary, hidden]`` each (the same array where they are tied).

    Raises CheckpointError when the checkpoint has no such tensors in safetensors files.
    """
    embedding = _tensor(checkpoint, "model.embed_tokens.weight")
    if read_json(checkpoint / "config.json").get("tie_word_embeddings", False):
        return embedding, embedding
    return embedding, _tensor(checkpoint, "lm_head.weight")


def _tensor(checkpoint: Path, name: str) -> npt.NDArray[np.float32]:
    """One tensor as float32. Read by hand: the library gives numpy no bfloat16."""
    for path in weight_files(checkpoint):
        if path.suffix != ".safetensors":
            continue
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Mapping[str, Any] = json.loads(file.read(length))
        entry = header.get(name)
        if entry is None:
            continue
        if entry["dtype"] not in _TYPES:
            raise CheckpointError(f"{path}: {name} is {entry['dtype']}: a draft is built from {', '.join(_TYPES)} only")
        begin, end = entry["data_offsets"]
        dtype = np.dtype(_TYPES[entry["dtype"]])
        raw = np.fromfile(path, dtype, (end - begin) // dtype.itemsize, offset=8 + length + begin)
        value: npt.NDArray[np.float32] = raw.astype(np.float32).reshape(entry["shape"])
        return value
    raise CheckpointError(f"{checkpoint} has no tensor {name} in safetensors files")
