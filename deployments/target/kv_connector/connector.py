"""vLLM's KV connector interface over our two sides. Loaded by module path; see :func:`.settings.transfer_config`.

Loads are asynchronous: a request waits outside the batch until its prompt has been fetched, verified and written, or until
that failed and its prompt is computed. Exports are read from the pages once, at the end of the step that completes a
prompt. Nothing happens at single layers, and nothing at all in steps without either.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec

from deployments.target.kv_connector.metadata import ChainHandshake, ChainMetadata
from deployments.target.kv_connector.scheduler_side import SchedulerSide
from deployments.target.kv_connector.settings import ConnectorSettings, Keys, SettingsError
from deployments.target.kv_connector.stats import ChainPrometheus, ChainStats
from deployments.target.kv_connector.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ChainConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One engine's connector: the scheduler's instance or a worker's, by ``role``. Raises SettingsError."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            raise SettingsError('set kv_load_failure_policy to "recompute": a prompt that cannot be loaded is computed')
        groups = kv_cache_config.kv_cache_groups
        movable = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
        producer, consumer = movable and transfer.is_kv_producer, movable and transfer.is_kv_consumer
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            ranks = vllm_config.parallel_config.world_size
            hosts = _LOOPBACK | {transfer.kv_ip, *settings.hosts}
            self._scheduler = SchedulerSide(producer, consumer, ranks, hosts)
        elif producer or consumer:
            keys = Keys.read(settings.secret_file)
            self._worker = WorkerSide(
                vllm_config, kv_cache_config, settings, keys, producer=producer, consumer=consumer
            )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """A prompt is exported in the step that completes it, so that a later preemption loses nothing."""
        return False

    # --- scheduler --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        assert self._scheduler is not None
        self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.plan(scheduler_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)  # what is exported was copied already: the blocks are free

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self._scheduler is not None
        by_rank = [metadata[rank] for rank in sorted(metadata)]
        self._scheduler.places = tuple(item.place for item in by_rank if isinstance(item, ChainHandshake))

    # --- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.registered()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        place = self._worker.place if self._worker is not None else None
        return ChainHandshake(place) if place is not None else None

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests wait for their loads outside the batch."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing: prompts are exported whole, see :meth:`wait_for_save`."""

    def wait_for_save(self) -> None:
        if self._worker is not None and self.has_connector_metadata():
            self._worker.save(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.finished(finished_req_ids) if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.bad_blocks() if self._worker is not None else set()

    # --- both -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is not None:
            return ChainStats.of(self._worker.take_counts())
        if self._scheduler is None or not self._scheduler.counts:
            return None
        counts, self._scheduler.counts = self._scheduler.counts, Counter()
        return ChainStats.of(counts)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ChainStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return ChainPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Exported prompts are under lease or go by themselves; there is nothing else to forget."""
        return True

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _metadata(self) -> ChainMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ChainMetadata)
        return metadata
