"""This worker's pages and what it says of them to other replicas, from what vLLM gives a connector."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from deployments.target.kv_cache import open_cache, target_manifest
from hw.kv.manifest import Manifest, json_digest
from hw.kv.vllm_cache import PagedCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class _Rotaries:
    """Stands for the model where only its rotary embeddings are looked at: vLLM keeps one of each kind."""

    def modules(self) -> Iterator[Any]:
        return iter(_ROPE_DICT.values())


@dataclass(frozen=True)
class Engine:
    """The parts of a model runner that say what its KV is; a connector is not given the runner itself."""

    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"

    @property
    def lora_config(self) -> Any:
        return self.vllm_config.lora_config

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config

    @property
    def parallel_config(self) -> Any:
        return self.vllm_config.parallel_config

    @property
    def compilation_config(self) -> Any:
        return self.vllm_config.compilation_config

    @property
    def model(self) -> _Rotaries:
        return _Rotaries()

    @property
    def input_batch(self) -> Any:
        """Its block table: the blocks that a connector is told of are the scheduler's."""
        size = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return SimpleNamespace(block_table=[SimpleNamespace(block_size=size)])

    def open(self) -> PagedCache:
        """The pages. Raises NotMovable or CacheError."""
        return open_cache(self)  # type: ignore[arg-type]

    def manifest(self, cache: PagedCache, weights: str, tokenizer: str) -> Manifest:
        """What this worker hands to others of its kind, and what it takes. Raises NotMovable, CheckpointError or Refused.

        ``bit_exact`` here means: the very bytes that an engine of this kind computed. Where an engine's bits depend on what
        it batches, they are those of one batch, as in vLLM's own prefix cache. The fingerprint also covers what changes
        the arithmetic from one machine to another.
        """
        made = target_manifest(self, cache, weights, tokenizer)  # type: ignore[arg-type]
        facts = {
            "engine": made.identity.compute,
            "torch": torch.__version__,
            "arithmetic": _arithmetic(cache.device),
            "tensor_parallel": self.parallel_config.tensor_parallel_size,
        }
        identity = msgspec.structs.replace(made.identity, compute=json_digest(facts))
        return msgspec.structs.replace(made, identity=identity, role="migrate", exactness="bit_exact")


def _arithmetic(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return str(torch.backends.cpu.get_cpu_capability())
