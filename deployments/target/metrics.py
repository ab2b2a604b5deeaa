"""The chain's counters as Prometheus metrics, on Ray's metrics port beside those of Serve and vLLM.

The engine keeps plain totals (:meth:`DraftRounds.stats`); this looks at them every few seconds and passes on how much
they grew. Requests never wait for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from deployments.chain.faults import FaultPolicy

logger = logging.getLogger(__name__)

Rpc = Callable[..., Awaitable[list[Any]]]

# By their names in DraftRounds.stats(). Ray's exporter puts ``ray_`` before each name, and Serve adds the labels
# ``application``, ``deployment`` and ``replica``.
COUNTERS = {
    "rounds": ("chain_engine_steps_total", "Engine steps"),
    "verifications": ("chain_verify_rounds_total", "Drafts verified, one for each sequence and step"),
    "drafted_tokens": ("chain_drafted_tokens_total", "Draft tokens verified"),
    "accepted_tokens": ("chain_accepted_tokens_total", "Draft tokens accepted"),
    "relaxed_tokens": (
        "chain_relaxed_tokens_total",
        "Of those, tokens that a lossy policy let pass: not the target's own",
    ),
    "semantic_compared": ("chain_semantic_compared_total", "Mismatches whose words the sentence model compared"),
    "semantic_passed": ("chain_semantic_passed_total", "Of those, the ones close enough to pass"),
    "semantic_late": ("chain_semantic_late_total", "Mismatches that the time of their step did not suffice for"),
    "semantic_guarded": (
        "chain_semantic_guarded_total",
        "Mismatches not compared: numbers, negation, opposites, names or code differ",
    ),
    "semantic_failed": ("chain_semantic_failed_total", "Mismatches whose comparison failed; they did not pass"),
    "kv_exports": ("chain_kv_exports_total", "Times KV of committed tokens was sent to a draft"),
    "kv_export_bytes": ("chain_kv_export_bytes_total", "Bytes of KV sent to drafts"),
    "committed_tokens": ("chain_committed_tokens_total", "Tokens committed, the target's own and accepted ones"),
}
LABELLED = {  # prefix in the stats; what follows it is the value of the label
    "miss:": ("chain_drafts_missed_total", "Times a sequence went on without a draft of a model", "reason"),
    "dropped:": ("chain_messages_dropped_total", "Messages between target and drafts that came to nothing", "reason"),
    "kv_not_sent:": (
        "chain_kv_not_sent_total",
        "Times KV could not be sent to a draft, which then computes it",
        "reason",
    ),
    "drafted:": ("chain_source_drafted_tokens_total", "Draft tokens verified, by who drafted them", "source"),
    "accepted:": ("chain_source_accepted_tokens_total", "Draft tokens accepted, by who drafted them", "source"),
}
GAUGES = {
    "drafts_connected": ("chain_drafts_connected", "Draft replicas the engine holds a connection to"),
    "drafts_usable": ("chain_drafts_usable", "Of those, the ones whose circuit is closed"),
    "sessions": ("chain_draft_sessions", "Requests in the engine that may have a session at a draft"),
    "token_worth_ms": ("chain_token_worth_ms", "Time the engine takes for one committed token, over all sequences"),
}
BY_BATCH = {  # prefix of gauges; what follows it is the batch size up to which they hold
    "speedup_local:": ("chain_speedup_without_models", "Against plain steps, with sources that have no weights only"),
    "speedup_model:": ("chain_speedup_with_models", "Against plain steps, with draft models"),
    "asking:": ("chain_models_asked", "1 where draft models are asked"),
}
OVERHEAD = ("chain_round_overhead_ms", "Time of recent rounds beyond the draft's own work")
QUANTILES = {"round_overhead_ms_p50": "0.5", "round_overhead_ms_p99": "0.99"}


class Counter(Protocol):
    """As ``ray.serve.metrics.Counter``."""

    def inc(self, value: float, tags: dict[str, str]) -> None: ...


class Gauge(Protocol):
    """As ``ray.serve.metrics.Gauge``."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


class Growth:
    """Differences of totals between two looks, for counters that may only go up."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def since_last(self, totals: Mapping[str, float]) -> dict[str, float]:
        """What grew, and by how much. A total below its last value was reset: all of it is new."""
        grown = {}
        for name, value in totals.items():
            last = self._last.get(name, 0.0)
            growth = value - last if value >= last else value
            if growth > 0:
                grown[name] = growth
        self._last = dict(totals)
        return grown


class ChainMetrics:
    """Feeds metrics of one target replica from the stats of its engine."""

    def __init__(
        self,
        counter: Callable[[str, str, tuple[str, ...]], Counter],
        gauge: Callable[[str, str, tuple[str, ...]], Gauge],
    ) -> None:
        """``counter`` and ``gauge`` make a metric from its name, description and label names."""
        self._growth = Growth()
        self._counters = {key: counter(name, text, ()) for key, (name, text) in COUNTERS.items()}
        self._labelled = {key: (counter(name, text, (label,)), label) for key, (name, text, label) in LABELLED.items()}
        self._gauges = {key: gauge(name, text, ()) for key, (name, text) in GAUGES.items()}
        self._by_batch = {key: gauge(name, text, ("batch",)) for key, (name, text) in BY_BATCH.items()}
        self._overhead = gauge(*OVERHEAD, ("quantile",))

    @classmethod
    def of_replica(cls) -> "ChainMetrics":
        """With Serve's metrics; only inside a replica."""
        from ray.serve import metrics

        return cls(metrics.Counter, metrics.Gauge)

    def update(self, stats: Mapping[str, float]) -> None:
        """Pass on what changed since the last call. Gauges are set each time: Ray drops those that fall silent."""
        for key, gauge in self._gauges.items():
            gauge.set(stats.get(key, 0.0), {})
        for key, quantile in QUANTILES.items():
            if key in stats:
                self._overhead.set(stats[key], {"quantile": quantile})
        for key, value in stats.items():
            prefix, _, size = key.partition(":")
            if f"{prefix}:" in self._by_batch:
                self._by_batch[f"{prefix}:"].set(value, {"batch": size})
        totals = {key: value for key, value in stats.items() if key in COUNTERS or key.startswith(tuple(LABELLED))}
        for key, growth in self._growth.since_last(totals).items():
            if key in self._counters:
                self._counters[key].inc(growth, {})
                continue
            prefix, _, which = key.partition(":")
            labelled, label = self._labelled[f"{prefix}:"]
            labelled.inc(growth, {label: which})


async def export(rpc: Rpc, make: Callable[[], ChainMetrics], faults: FaultPolicy) -> None:
    """Update until cancelled. No failure ends it: an engine that is busy or gone is asked again later."""
    metrics: ChainMetrics | None = None
    complained = ""
    while True:
        await asyncio.sleep(faults.metrics_period_s)
        try:
            results = await rpc("draft_stats", timeout=faults.rpc_timeout_s)
            metrics = metrics or make()
            metrics.update(results[0])
            complained = ""
        except Exception as error:
            if str(error) != complained:  # once, not every few seconds
                logger.warning("metrics could not be updated, will retry: %r", error)
            complained = str(error)
