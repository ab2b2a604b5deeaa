"""What Prometheus finds on Ray's metrics port: the names of the README, to the letter."""

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from deployments.evidence.metrics import TAGS
from deployments.names import EVIDENCE, ROUTER, target_name
from deployments.router.answer_metrics import ANSWERS, FAILURES, WAITS
from deployments.router.retry import LOST_METRIC
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
    *(f"ray_{name}" for key, (name, _) in COUNTERS.items() if key.startswith("semantic_")),  # few ask for it
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
    samples = [item for item in chain_samples() if item[1].labels["deployment"] == target_name(app.model)]
    by_type = {kind: {sample.name for other, sample in samples if other == kind} for kind, _ in samples}
    assert set(by_type) == {"counter", "gauge"}
    # Ray shows a counter only once it has counted
    assert COUNTER_NAMES - MAY_NOT_HAVE_HAPPENED <= by_type["counter"] <= COUNTER_NAMES
    assert by_type["gauge"] == GAUGE_NAMES
    for _, sample in samples:
        assert sample.labels["application"] == app.name
        assert sample.labels["replica"]
    assert {s.labels["quantile"] for _, s in samples if s.name == "ray_chain_round_overhead_ms"} == {"0.5", "0.99"}
    wait_until(lambda: all(map(agrees, ("drafted_tokens", "accepted_tokens", "committed_tokens"))), REPORT_S, 2)
    wait_until(lambda: value("ray_chain_draft_sessions") == 0, REPORT_S, 2)
    assert value("ray_chain_drafts_connected") == 1


def test_those_of_the_answer_chain(app: App) -> None:
    app.chat("Name a colour.", chain={"mode": "answer", "k": 1})
    names = {f"ray_{name}" for name, *_ in (ANSWERS, WAITS)}
    wait_until(lambda: names <= {family_of(sample.name) for _, sample in chain_samples()}, REPORT_S, 2)
    router = [(kind, sample) for kind, sample in chain_samples() if sample.labels["deployment"] == ROUTER]
    assert {family_of(sample.name) for _, sample in router} <= names | {
        f"ray_{name}" for name in (FAILURES[0], LOST_METRIC[0])
    }
    assert {kind for kind, sample in router if family_of(sample.name) == f"ray_{WAITS[0]}"} == {"histogram"}
    assert {sample.labels["part"] for _, sample in router if family_of(sample.name) == f"ray_{WAITS[0]}"} == {
        "drafts",
        "resolution",
    }


def test_tags_of_validators(app: App) -> None:
    ask = {"mode": "answer", "k": 0, "drafts": ["It is {not JSON."], "validators": ["json_syntax"], "sources": []}
    app.chat("Name a colour.", chain=ask)
    counted = {"validator": "json_syntax", "deployment": EVIDENCE, "application": app.name}
    wait_until(lambda: value(f"ray_{TAGS}", **counted) > 0, REPORT_S, 2)


def family_of(name: str) -> str:
    """Without what a histogram's samples have behind it."""
    for ending in ("_bucket", "_sum", "_count"):
        name = name.removesuffix(ending)
    return name
