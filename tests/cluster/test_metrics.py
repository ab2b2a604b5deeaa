"""What Prometheus finds on Ray's metrics port: the names of the README, to the letter."""

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from deployments.names import target_name
from deployments.target.metrics import BY_BATCH, COUNTERS, GAUGES, LABELLED, OVERHEAD
from tests.cluster.conftest import App, wait_until
from tests.cluster.drafts import MODEL_ONLY, counter, stuck_draft, wait_for_acceptance

pytestmark = pytest.mark.cluster

COUNTER_NAMES = {f"ray_{entry[0]}" for entry in [*COUNTERS.values(), *LABELLED.values()]}
GAUGE_NAMES = {f"ray_{entry[0]}" for entry in [*GAUGES.values(), *BY_BATCH.values(), OVERHEAD]}
MAY_NOT_HAVE_HAPPENED = {
    "ray_chain_messages_dropped_total",
    "ray_chain_relaxed_tokens_total",
    "ray_chain_kv_not_sent_total",
    *(f"ray_{name}" for key, (name, _) in COUNTERS.items() if key.startswith("semantic_")),  # not switched on there
}
REPORT_S = 60.0  # ours every 5 s, Ray's every 10 s, on a busy machine


def scrape() -> str:
    """The metrics page of the private Ray's only node."""
    import ray

    (node,) = ray.nodes()
    page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30)
    assert page.status_code == 200
    return page.text


def chain_samples() -> Iterator[tuple[str, Sample]]:
    """Ours, each with the type of its family."""
    for family in text_string_to_metric_families(scrape()):
        for sample in family.samples:
            if sample.name.startswith("ray_chain_"):
                yield family.type, sample


def value(name: str, **labels: str) -> float:
    """Sum of the samples of a name; -1 when there is none."""
    found = [s.value for _, s in chain_samples() if s.name == name and labels.items() <= s.labels.items()]
    return sum(found) if found else -1.0


def test_names_types_labels_and_values(app: App) -> None:
    wait_for_acceptance(app)
    with stuck_draft(app):  # so that drafts are missed
        app.chat("Name a colour.", chain=MODEL_ONLY)

    def agrees(total: str) -> bool:
        return value(f"ray_chain_{total}_total") == counter(app, total)

    missed = counter(app, "miss:deadline_missed")
    assert missed > 0
    wait_until(lambda: value("ray_chain_drafts_missed_total", reason="deadline_missed") >= missed, REPORT_S, 2)
    samples = list(chain_samples())
    by_type = {kind: {sample.name for other, sample in samples if other == kind} for kind, _ in samples}
    assert set(by_type) == {"counter", "gauge"}
    # Ray shows a counter only once it has counted
    assert COUNTER_NAMES - MAY_NOT_HAVE_HAPPENED <= by_type["counter"] <= COUNTER_NAMES
    assert by_type["gauge"] == GAUGE_NAMES
    for _, sample in samples:
        assert sample.labels["application"] == app.name
        assert sample.labels["deployment"] == target_name(app.model)
        assert sample.labels["replica"]
    assert {s.labels["quantile"] for _, s in samples if s.name == "ray_chain_round_overhead_ms"} == {"0.5", "0.99"}
    wait_until(lambda: all(map(agrees, ("drafted_tokens", "accepted_tokens", "committed_tokens"))), REPORT_S, 2)
    wait_until(lambda: value("ray_chain_draft_sessions") == 0, REPORT_S, 2)
    assert value("ray_chain_drafts_connected") == 1
