"""From a trained conditioned draft and its target's checkpoint to the ONNX folder that :mod:`hw.onnx.conditioned` loads."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from hw.onnx.build import BuildError, tool_versions
from hw.onnx.cache import cache_key, source_fingerprints
from hw.onnx.checkpoint import CONDITIONED, HEAD_IDS, CheckpointError, Manifest, ModelShape
from hw.onnx.conditioned_graph import EXACT, conditioned_graph
from hw.onnx.conditioned_weights import ConditionedShape, Trained, read_trained, target_tensors, trained_for

RECIPE = 1  # raise when the same weights should be built anew because this file builds them differently
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NAME = "draft-conditioned"


@dataclass(frozen=True)
class ConditionedOptions:
    """``bits`` of the layers' weights, ``head_bits`` of the head's: 4, 8 or 32 (not quantised)."""

    bits: int = 8
    head_bits: int = 4
    block: int = 32

    def __post_init__(self) -> None:
        for bits in (self.bits, self.head_bits):
            if bits not in (4, 8, EXACT):
                raise ValueError(f"{bits} bits: 4, 8 and {EXACT} can be built")


def weights_of(folder: Path, target: str) -> Path | None:
    """The file of weights in ``folder`` that was trained for the target with this fingerprint; None: there is none."""
    return next((path for path in sorted(folder.glob("*.safetensors")) if trained_for(path) == target), None)


def conditioned_key(weights: Path, source: Mapping[str, str], options: ConditionedOptions) -> str:
    """What decides the folder: the trained file with its record, the target and the options."""
    record = weights.with_suffix(".json")
    inputs = {
        "trained": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "record": hashlib.sha256(record.read_bytes()).hexdigest() if record.is_file() else "",
        "source": dict(source),
        "options": [options.bits, options.head_bits, options.block, RECIPE],
    }
    return cache_key(CONDITIONED, inputs, tool_versions("onnx", "onnxruntime"))


def require_target(trained: Trained, checkpoint: Path, fingerprint: str) -> None:
    """BuildError, with both fingerprints, when the draft was trained for another target than ``checkpoint``."""
    if trained.target_weights != fingerprint:
        raise BuildError(
            f"the draft was trained for the target {trained.target_weights[:16]}, {checkpoint} is {fingerprint[:16]}: "
            "train one for it with scripts/distil"
        )


def build_conditioned(
    weights: Path, checkpoint: Path, folder: Path, options: ConditionedOptions, fingerprints: Path
) -> None:
    """Build the trained file ``weights`` for its target ``checkpoint`` into the empty ``folder``.

    ``fingerprints``: folder in which known ones are kept. Raises BuildError when the target is another one than it was
    trained for or the model does not run, CheckpointError for files that are not what they should be.
    """
    trained = read_trained(weights)
    source = source_fingerprints(checkpoint, fingerprints)
    require_target(trained, checkpoint, source["weights"])
    embedding, head = target_tensors(checkpoint)
    shape = trained.shape
    if embedding.shape != (shape.vocabulary, shape.hidden) or head.shape != embedding.shape:
        raise CheckpointError(f"{checkpoint} has an embedding of {embedding.shape}, the draft one of {shape}")
    try:
        model = conditioned_graph(
            trained, embedding, head, bits=options.bits, head_bits=options.head_bits, block=options.block
        )
    except ValueError as error:
        raise BuildError(f"{weights}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    (folder / "model.onnx.data").chmod(0o644)  # it is made for its owner only
    np.save(folder / HEAD_IDS, trained.head_ids)
    for name in TOKENIZER:
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, folder / name)
    trial_run(folder, shape)
    describe(weights, checkpoint, folder, options, fingerprints)


def describe(weights: Path, checkpoint: Path, folder: Path, options: ConditionedOptions, fingerprints: Path) -> None:
    """Write the manifest of a folder built with the same arguments; again, when the record beside ``weights`` has changed."""
    trained = read_trained(weights)
    shape, source, target = trained.shape, source_fingerprints(checkpoint, fingerprints), ModelShape.read(checkpoint)
    Manifest(
        kind=CONDITIONED,
        key=conditioned_key(weights, source, options),
        weights=source["weights"],
        tokenizer=source["tokenizer"],
        architecture=target.architecture,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_context=shape.context,
        rope_theta=shape.theta,
        rope_scaling="",
        created_by=tool_versions("onnx", "onnxruntime"),
        source=weights.name,
        bits=options.bits,
        algo=f"blocks of {options.block}, head {options.head_bits} bits",
        block_size=options.block,
        provider="cpu",
        kv_dtype="float32",
        last_logits_only=True,
        hidden_size=shape.hidden,
        head_size=shape.head_size,
        target_weights=trained.target_weights,
        trained=read_record(weights),
    ).write(folder)


def read_record(weights: Path) -> dict[str, Any]:
    """The training record beside a file of weights (``NAME.json``), without its curve; empty where there is none."""
    path = weights.with_suffix(".json")
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return {name: value for name, value in record.items() if name != "curve"}


def trial_run(folder: Path, shape: ConditionedShape) -> None:
    """Run three tokens, then one more for two sequences, then the same four at once: finite, of the right shape, and alike.

    Raises BuildError.
    """
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    session = ort.InferenceSession(str(folder / "model.onnx"), settings, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    features = np.random.default_rng(0).normal(size=(1, 4, shape.hidden)).astype(np.float32)
    ids = np.array([[1, 2, 3, 4]], np.int64) % shape.vocabulary

    def run(low: int, high: int, past: Mapping[str, Any], rows: int = 1) -> dict[str, Any]:
        feeds = {
            "input_ids": np.repeat(ids[:, low:high], rows, 0),
            "features": np.repeat(features[:, low:high], rows, 0),
            "attention_mask": np.ones((rows, high), np.int64),
        }
        return dict(zip(names, session.run(None, {**feeds, **past}), strict=True))

    empty = np.zeros((1, shape.kv_heads, 0, shape.head_dim), np.float32)
    parts = [f"{layer}.{part}" for layer in range(shape.layers) for part in ("key", "value")]
    first = run(0, 3, {f"past_key_values.{part}": empty for part in parts})
    second = run(3, 4, {f"past_key_values.{part}": np.repeat(first[f"present.{part}"], 2, 0) for part in parts}, 2)
    whole = run(0, 4, {f"past_key_values.{part}": empty for part in parts})
    for name, found, rows in (("prefill", first, 1), ("step", second, 2), ("prefill", whole, 1)):
        logits, out = found["logits"], found["features_out"]
        if logits.shape != (rows, 1, shape.head_size) or out.shape[-1] != shape.hidden:
            raise BuildError(f"{folder}: {name} gives logits {logits.shape} and features {out.shape}")
        if not np.isfinite(logits).all() or not np.isfinite(out).all():
            raise BuildError(f"{folder}: {name} gives numbers that are not finite")
    apart = float(np.abs(second["logits"] - whole["logits"]).max())
    if apart > 0.02 * max(float(np.abs(whole["logits"]).max()), 1.0):
        raise BuildError(f"{folder}: a token at a time gives other logits than all at once ({apart:.3f} apart)")
