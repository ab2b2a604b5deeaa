"""From totals to Prometheus metrics: counters grow by differences, resets included, and no failure ends the loop."""

import asyncio
import re
from collections import defaultdict
from typing import Any

import pytest

from deployments.chain.controller import Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.config.load import REPOSITORY
from deployments.evidence.metrics import DRAFTS, TAGS
from deployments.router.answer_metrics import ANSWERS, FAILURES, WAITS
from deployments.router.retry import LOST_METRIC
from deployments.target.metrics import BY_BATCH, COUNTERS, GAUGES, LABELLED, OVERHEAD, ChainMetrics, Growth, export
from deployments.target.rounds import DraftRounds


class Metric:
    """Stands in for Ray's counter and gauge, and refuses what they refuse."""

    def __init__(self, name: str, description: str, labels: tuple[str, ...]) -> None:
        assert description
        self.name, self.labels = name, labels
        self.values: dict[tuple[str, ...], float] = defaultdict(float)

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.values[self._key(tags)] += value

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self.labels)
        return tuple(tags.values())


class Registry:
    """All metrics by name."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.chain = ChainMetrics(self.make, self.make)

    def make(self, name: str, description: str, labels: tuple[str, ...]) -> Metric:
        assert name not in self.metrics
        self.metrics[name] = Metric(name, description, labels)
        return self.metrics[name]

    def value(self, name: str, *labels: str) -> float:
        return self.metrics[name].values[labels]


@pytest.fixture
def registry() -> Registry:
    return Registry()


class TestGrowth:
    def test_differences(self) -> None:
        growth = Growth()
        assert growth.since_last({"a": 3.0, "b": 0.0}) == {"a": 3.0}
        assert growth.since_last({"a": 5.0, "b": 0.0}) == {"a": 2.0}
        assert growth.since_last({"a": 5.0, "b": 1.0}) == {"b": 1.0}

    def test_after_a_reset_all_of_it_is_new(self) -> None:
        growth = Growth()
        growth.since_last({"a": 10.0})
        assert growth.since_last({"a": 4.0}) == {"a": 4.0}
        assert growth.since_last({"a": 6.0}) == {"a": 2.0}

    def test_a_name_that_left_starts_at_nothing(self) -> None:
        growth = Growth()
        growth.since_last({"a": 10.0})
        assert growth.since_last({}) == {}
        assert growth.since_last({"a": 12.0}) == {"a": 12.0}


class TestUpdate:
    def test_counters_reasons_gauges_and_quantiles(self, registry: Registry) -> None:
        registry.chain.update(
            {
                "verifications": 4,
                "accepted_tokens": 9,
                "miss:deadline_missed": 2,
                "dropped:late": 1,
                "drafts_connected": 1,
                "sessions": 3,
                "round_overhead_ms_p50": 0.4,
                "round_overhead_ms_p99": 2.5,
                "something_new": 7,
            }
        )
        assert registry.value("chain_verify_rounds_total") == 4
        assert registry.value("chain_accepted_tokens_total") == 9
        assert registry.value("chain_drafts_missed_total", "deadline_missed") == 2
        assert registry.value("chain_messages_dropped_total", "late") == 1
        assert registry.value("chain_drafts_connected") == 1
        assert registry.value("chain_draft_sessions") == 3
        assert registry.value("chain_round_overhead_ms", "0.5") == 0.4
        assert registry.value("chain_round_overhead_ms", "0.99") == 2.5

    def test_counters_add_up_and_gauges_fall(self, registry: Registry) -> None:
        for total, sessions in ((5, 2), (5, 1), (11, 0), (3, 0)):  # the last after a reset
            registry.chain.update({"drafted_tokens": total, "sessions": sessions})
        assert registry.value("chain_drafted_tokens_total") == 14
        assert registry.value("chain_draft_sessions") == 0

    def test_reads_what_rounds_really_say(self, registry: Registry) -> None:
        rounds = DraftRounds("t", 10, FaultPolicy(), Unconditional())
        rounds.stats_of_rounds.counters.update(dict.fromkeys(COUNTERS, 1))
        rounds.reasons["no_draft_replica"] += 1
        stats = rounds.stats()
        own = {key for key in stats if not key.startswith("source:")}  # a source's own figures are not exported
        assert own - {"miss:no_draft_replica"} == set(COUNTERS) | set(GAUGES)
        registry.chain.update(stats)
        assert registry.value("chain_drafts_missed_total", "no_draft_replica") == 1

    def test_names_follow_prometheus(self, registry: Registry) -> None:
        counters = {entry[0] for entry in [*COUNTERS.values(), *LABELLED.values()]}
        assert all(name.endswith("_total") for name in counters)
        others = set(registry.metrics) - counters
        assert others == {entry[0] for entry in [*GAUGES.values(), *BY_BATCH.values()]} | {OVERHEAD[0]}
        assert not any(name.endswith("_total") for name in others)

    def test_the_readme_names_them_all(self, registry: Registry) -> None:
        section = (REPOSITORY / "README.md").read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
        others = {ANSWERS[0], FAILURES[0], WAITS[0], DRAFTS, LOST_METRIC[0], TAGS}
        assert set(re.findall(r"`ray_(chain_\w+)", section)) == set(registry.metrics) | others


async def test_no_failure_ends_the_loop(registry: Registry) -> None:
    asked: list[str] = []

    async def rpc(method: str, timeout: float) -> list[Any]:
        asked.append(method)
        if len(asked) == 2:
            raise RuntimeError("engine busy")
        return [{"drafted_tokens": float(len(asked))}] if len(asked) != 3 else []

    task = asyncio.create_task(export(rpc, lambda: registry.chain, FaultPolicy(metrics_period_s=0.001)))
    async with asyncio.timeout(10):
        while len(asked) < 6:
            await asyncio.sleep(0.001)
    assert not task.done()
    task.cancel()
    assert set(asked) == {"draft_stats"}
    assert registry.value("chain_drafted_tokens_total") >= 5
