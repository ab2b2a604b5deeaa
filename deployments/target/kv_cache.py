"""The engine's KV cache as the KV plane sees it: what it is (its manifest) and how to read it (its pages)."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.kv_cache_interface import FullAttentionSpec

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
from hw.kv.probe import packing_of
from hw.kv.vllm_cache import PagedCache
from hw.onnx.checkpoint import CheckpointError, ModelShape, tokenizer_fingerprint, weights_fingerprint
from hw.onnx.checkpoint import Manifest as FolderManifest

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)


class NotMovable(Exception):
    """This engine's KV cache cannot be moved; the text says why. Decoding is not affected."""


def open_cache(runner: "GPUModelRunner") -> PagedCache:
    """The pages of a runner whose caches are allocated. Raises :class:`NotMovable`."""
    if runner.lora_config is not None:
        raise NotMovable("adapters are enabled, and KV of different adapters must not be mixed")
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        raise NotMovable("the layers do not all keep full attention's KV")
    layers = runner.compilation_config.static_forward_context
    caches = {name: layers[name].kv_cache for name in groups[0].layer_names}
    first = layers[groups[0].layer_names[0]]
    packing = packing_of(first.kv_cache, first.attn_backend.get_name(), isa=getattr(first, "isa", None))
    cache = PagedCache(caches, packing=packing)
    table = runner.input_batch.block_table[0]
    if table.block_size != cache.block_tokens:
        raise NotMovable(f"blocks of {table.block_size} tokens lie in pages of {cache.block_tokens}")
    return cache


def fingerprints(folder: Path) -> tuple[str, str]:
    """(weights, tokenizer) of a checkpoint; what was prepared says so, of others every weight is read. CheckpointError."""
    try:
        known = FolderManifest.read(folder)
    except CheckpointError:
        return weights_fingerprint(folder), tokenizer_fingerprint(folder)
    return known.weights, known.tokenizer


def target_manifest(runner: "GPUModelRunner", cache: PagedCache, weights: str, tokenizer: str) -> Manifest:
    """What the engine computes. Raises :class:`NotMovable` or CheckpointError."""
    if cache.packing.startswith("opaque:"):
        raise NotMovable(f"the cache's packing is not known: {cache.packing}")
    config = runner.model_config
    layer = runner.compilation_config.static_forward_context[cache.layer_names[0]]
    parallel = runner.parallel_config
    shape = ModelShape.read(Path(config.model))
    backend = layer.attn_backend.get_name()
    rotary = _rotary(runner.model)
    softcap = getattr(layer.impl, "logits_soft_cap", None) or 0.0
    return manifest_for(
        Identity(
            model=Path(config.model).name,
            weights=weights,
            adapter="",
            tokenizer=tokenizer,
            compute=compute_fingerprint(
                engine="vllm",
                engine_version=vllm.__version__,
                dtype=str(config.dtype).removeprefix("torch."),
                attention=backend,
                isa=str(getattr(layer, "isa", cache.device.type)),
                packing=cache.packing,
                batch_invariant=False,
            ),
        ),
        Geometry(
            first_layer=config.get_layers_start_end_indices(parallel)[0],
            layers=cache.layers,
            kv_heads=config.get_total_num_kv_heads(),
            first_head=_first_head(config.get_total_num_kv_heads(), cache.heads, runner),
            heads=cache.heads,
            head_dim=cache.head_dim,
            head_dim_v=cache.head_dim,
            block_tokens=0,
        ),
        Numerics(k=cache.dtype, v=cache.dtype, scheme="", scale=""),  # type: ignore[arg-type]
        Layout("HND", "token_major"),  # as exported, not as it lies in the pages
        Rope(
            applied=rotary is not None,
            style="neox" if rotary is None or rotary.is_neox_style else "interleaved",
            rotary_dim=rotary.rotary_dim if rotary is not None else 0,
            theta=decimal(shape.rope_theta) if rotary is not None else "",
            scaling=json_digest(shape.rope_scaling) if shape.rope_scaling else "",
        ),
        Attention(layer.sliding_window or 0, 0, decimal(softcap) if softcap else ""),
        role="target_to_draft",
        exactness="same_function",
    )


def _rotary(model: Any) -> RotaryEmbedding | None:
    return next((module for module in model.modules() if isinstance(module, RotaryEmbedding)), None)


def _first_head(total: int, heads: int, runner: "GPUModelRunner") -> int:
    """Global number of this rank's first KV head; ranks beyond the number of heads hold copies."""
    size = runner.parallel_config.tensor_parallel_size
    rank = runner.parallel_config.rank % size
    return int(rank * heads if total >= size else rank * total // size)
