"""What an ONNX draft's KV is, in the terms of the KV plane: read from the graph itself and from ``chain.json``."""

from pathlib import Path

import onnx
import onnxruntime as ort

from hw.kv.manifest import (
    Attention,
    Geometry,
    Identity,
    Layout,
    Manifest,
    Numerics,
    Rope,
    compute_fingerprint,
    decimal,
    json_digest,
    manifest_for,
)
from hw.onnx.checkpoint import CheckpointError
from hw.onnx.checkpoint import Manifest as FolderManifest

_ATTENTION = "GroupQueryAttention"
_DTYPES = {"float32": "float32", "float16": "float16"}


def draft_manifest(folder: Path, provider: str) -> Manifest:
    """The manifest of KV that a session over ``folder`` computes and takes: HND, unblocked, keys rotated.

    ``identity.weights`` is the fingerprint of the checkpoint the draft was made of, and ``compute`` tells its
    quantisation apart. Raises CheckpointError when the folder does not say all of it; then its KV goes nowhere.
    """
    facts = FolderManifest.read(folder)
    if facts.rope_scaling is None:
        raise CheckpointError(f"{folder} was prepared by an earlier version: run scripts/prepare_models again")
    if facts.kv_dtype not in _DTYPES:
        raise CheckpointError(
            f"{folder} keeps KV as {facts.kv_dtype or 'nothing stated'}; float32 or float16 can be moved"
        )
    nodes = [node for node in _graph(folder).node if node.op_type == _ATTENTION]
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    if len(nodes) != facts.layers or any(found != attributes[0] for found in attributes):
        raise CheckpointError(f"{folder}: its {len(nodes)} attention nodes are not {facts.layers} equal layers")
    given = attributes[0]
    rotated = bool(given.get("do_rotary", 0))
    window = int(given.get("local_window_size", -1))
    softcap = float(given.get("softcap", 0.0))
    rotary_dim = int(given.get("rotary_embedding_dim", 0)) or facts.head_dim
    dtype = _DTYPES[facts.kv_dtype]
    identity = Identity(
        model=facts.source,
        weights=facts.weights,
        adapter="",
        tokenizer=facts.tokenizer,
        compute=compute_fingerprint(
            engine="onnxruntime",
            engine_version=ort.__version__,
            dtype=dtype,
            attention=_ATTENTION,
            isa=provider,
            packing=f"int{facts.bits}-{facts.algo}-{facts.block_size}",
            batch_invariant=False,
        ),
    )
    return manifest_for(
        identity,
        Geometry(0, facts.layers, facts.kv_heads, 0, facts.kv_heads, facts.head_dim, facts.head_dim, 0),
        Numerics(k=dtype, v=dtype, scheme="", scale=""),  # type: ignore[arg-type]
        Layout("HND", "token_major"),
        Rope(
            applied=rotated,
            style="interleaved" if given.get("rotary_interleaved", 0) else "neox",
            rotary_dim=rotary_dim if rotated else 0,
            theta=decimal(facts.rope_theta) if rotated else "",
            scaling=json_digest(facts.rope_scaling) if facts.rope_scaling else "",
        ),
        Attention(max(window, 0), 0, decimal(softcap) if softcap else ""),
        role="draft_to_target",
        exactness="approximate" if facts.bits < 16 else "same_function",
    )


def _graph(folder: Path) -> onnx.GraphProto:
    path = folder / "model.onnx"
    try:
        return onnx.load(str(path), load_external_data=False).graph
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
