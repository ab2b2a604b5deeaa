"""What the connector counted, on its way to vLLM's log and to Prometheus.

``vllm:chain_kv_total{event=...}``, for example the prompts that were read twice, by reason:
``sum by (event) (rate(vllm:chain_kv_total{event=~"import_refused:.*"}[5m]))``
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


@dataclass
class ChainStats(KVConnectorStats):
    """``data``: counts by event since the last report; times are in microseconds."""

    @classmethod
    def of(cls, counts: Counter[str]) -> "ChainStats | None":
        """None for no counts."""
        return cls(data=dict(counts)) if counts else None

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ChainPrometheus(KVConnectorPromMetrics):
    """One counter for all events."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counter = self._counter_cls(
            name="vllm:chain_kv",
            documentation="Prompts handed over between replicas, by what happened",
            labelnames=[*self._labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for event, count in transfer_stats_data.items():
            counter: PrometheusCounter = self._counter.labels(*labels, event)
            counter.inc(count)
