"""What the connector counted reaches vLLM's log and Prometheus, and its start refuses what cannot work."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from deployments.target.kv_connector.connector import ChainConnector
from deployments.target.kv_connector.settings import SettingsError, transfer_config
from deployments.target.kv_connector.stats import ChainStats


def test_counts_add_up() -> None:
    assert ChainStats.of(Counter()) is None
    first = ChainStats.of(Counter({"imports": 2}))
    assert first is not None
    total = first.aggregate(ChainStats(data={"imports": 1, "import_refused:missing": 3}))
    assert total.reduce() == {"imports": 3, "import_refused:missing": 3}
    total.reset()
    assert total.is_empty()
    again = ChainConnector.build_kv_connector_stats({"imports": 1})
    assert again is not None
    assert again.reduce() == {"imports": 1}


def test_prometheus_shows_every_event_by_name() -> None:
    config: Any = SimpleNamespace(kv_transfer_config=None)
    kinds: dict[Any, Any] = {
        kind: kind for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    }
    shown = ChainConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    assert shown is not None
    shown.observe({"imports": 2, "import_refused:missing": 1})
    shown.observe({"imports": 1})
    value = prometheus_client.REGISTRY.get_sample_value
    assert value("vllm:chain_kv_total", {"engine": "0", "event": "imports"}) == 3
    assert value("vllm:chain_kv_total", {"engine": "0", "event": "import_refused:missing"}) == 1


def connector(transfer: dict[str, Any], groups: list[Any] | None = None) -> Any:
    config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**transfer),
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    return KVConnectorFactory.create_connector(
        config,
        KVConnectorRole.SCHEDULER,
        KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups or []),
    )


def test_vllm_loads_it_by_its_module_path() -> None:
    made = connector(transfer_config("kv_both"))
    assert type(made) is ChainConnector
    assert not made.requires_kv_delivery


def test_a_consumer_must_recompute_what_cannot_be_loaded() -> None:
    with pytest.raises(SettingsError, match="recompute"):
        connector({**transfer_config("kv_consumer"), "kv_load_failure_policy": "fail"})
    with pytest.raises(SettingsError, match="no setting secret"):
        connector({**transfer_config("kv_consumer"), "kv_connector_extra_config": {"secret": "x"}})


def test_with_several_kinds_of_layers_nothing_is_moved() -> None:
    made = connector(transfer_config("kv_both"), [SimpleNamespace(kv_cache_spec=None)] * 2)
    assert (made._scheduler.producer, made._scheduler.consumer) == (False, False)
