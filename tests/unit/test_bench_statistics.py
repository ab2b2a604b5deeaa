"""What raw measurements amount to, and the form of a result file."""

import copy
import json

import pytest

from scripts.bench_lib import report, schema, statistics
from scripts.bench_lib.cells import ENGINE_SYSTEMS, Cell, http_system
from scripts.bench_lib.statistics import RequestFigures, Sample

PLAIN_ANSWER = (RequestFigures(100),)
CELL = Cell("prose", 1, 0.0, "length", 10)


def sample(system, seconds, repetition=0, cell=CELL, requests=PLAIN_ANSWER, **more):
    system = ENGINE_SYSTEMS[system] if isinstance(system, str) else system
    return Sample(cell, system, repetition, seconds, tuple(requests), **more)


def row(rows, system, cores="all", via="engine"):
    (found,) = [r for r in rows if (r["system"], r["cores"], r["via"]) == (system, cores, via)]
    return found


def test_spread():
    assert statistics.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert statistics.spread([1.0, 2.0])["median"] == 1.5
    with pytest.raises(ValueError, match="no values"):
        statistics.spread([])


def test_percentile_is_the_nearest_rank():
    values = list(range(1, 101))
    assert statistics.percentile(values, 0.5) == 50
    assert statistics.percentile(values, 0.99) == 99
    assert statistics.percentile(values, 1.0) == 100
    assert statistics.percentile([7.0], 0.01) == 7.0
    assert statistics.percentile([], 0.5) is None
    with pytest.raises(ValueError, match="share"):
        statistics.percentile([1.0], 0.0)


def test_acceptance_pools_tokens_and_averages_requests():
    requests = [RequestFigures(10, drafted=90, accepted=90), RequestFigures(10, drafted=10, accepted=0)]
    found = statistics.acceptance([*requests, RequestFigures(10)])
    assert found["pooled"] == pytest.approx(0.9)
    assert found["per_request"] == pytest.approx(0.5)  # the request without drafts does not count
    assert (found["per_request_min"], found["per_request_max"]) == (0.0, 1.0)
    assert statistics.acceptance([RequestFigures(10)]) == {"pooled": None, "per_request": None}


def test_tokens_per_verify_counts_the_targets_own_token():
    assert statistics.tokens_per_verify([RequestFigures(10, drafted=8, accepted=6, verifies=2)]) == 4.0
    assert statistics.tokens_per_verify([RequestFigures(10, drafted=8, accepted=0, verifies=2)]) == 1.0
    assert statistics.tokens_per_verify([RequestFigures(10)]) is None


def test_only_completion_tokens_make_speed():
    fast = sample("chain", 2.0, requests=[RequestFigures(50, drafted=400, accepted=300, verifies=100)] * 2)
    assert fast.tokens_per_s == 50.0


def test_ratios_are_ratios_of_medians_within_one_cell_and_way():
    other = Cell("prose", 8, 0.0, "length", 10)
    rows = statistics.summarise(
        [sample("plain", s, i) for i, s in enumerate((1.0, 2.0, 4.0))]
        + [sample("plain_target_core", s, i) for i, s in enumerate((2.0, 4.0, 8.0))]
        + [sample("chain", s, i) for i, s in enumerate((1.0, 1.0, 1.0))]
        + [sample("plain", 0.01, cell=other), sample(http_system("chain"), 3.0)]
    )
    chain = row(rows, "chain")
    assert chain["ratio_plain_all_cores"] == pytest.approx(2.0)
    assert chain["ratio_plain_target_core"] == pytest.approx(4.0)
    assert chain["paired_ratio_plain_all_cores"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert chain["tokens_per_s"] == {"median": 100.0, "min": 100.0, "max": 100.0}
    served = row(rows, "chain", via="http")
    assert served["ratio_plain_all_cores"] is None  # no plain over HTTP to compare with
    plain = next(r for r in rows if r["system"] == "plain" and r["cores"] == "all" and r["batch"] == 1)
    assert plain["ratio_plain_all_cores"] == 1.0


def test_a_row_carries_overhead_and_reasons_only_where_there_are_some():
    rows = statistics.summarise(
        [
            sample("chain", 1.0, 0, overhead_ms=(0.1, 0.2), stats={"miss:deadline_missed": 2.0, "rounds": 9.0}),
            sample("chain", 1.0, 1, overhead_ms=(0.3,), stats={"miss:deadline_missed": 1.0}),
            sample("plain", 1.0),
        ]
    )
    assert row(rows, "chain")["round_overhead_ms"] == {"p50": 0.2, "p99": 0.3}
    assert row(rows, "chain")["rounds_without_draft"] == {"miss:deadline_missed": 3}
    assert "round_overhead_ms" not in row(rows, "plain")


def test_round_overhead_is_that_of_the_real_draft():
    samples = [
        sample("chain", 1.0, overhead_ms=tuple(float(i) for i in range(1, 101))),
        sample("wrong_draft", 1.0, overhead_ms=(1000.0,)),
    ]
    assert statistics.round_overhead(samples) == {"p50": 50.0, "p99": 99.0}
    assert statistics.round_overhead([sample("plain", 1.0)]) == {"p50": None, "p99": None}


@pytest.fixture
def result(tmp_path):
    samples = [sample("plain", 1.0), sample("chain", 0.5, requests=[RequestFigures(100, 40, 20, 10)])]
    return report.build(samples, tmp_path, systems=["plain", "chain"], left_out={"suffix": "not installed"}, notes=[])


def test_a_built_result_is_right(result):
    assert schema.problems(result) == []
    assert result["commit"] == "unknown"  # a folder without git
    assert schema.problems(json.loads(json.dumps(result))) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.pop("machine"), "machine is missing"),
        (lambda r: r.update(commit=""), "commit is not a text"),
        (lambda r: r.update(runs={}), "runs is not a list"),
        (lambda r: r["runs"][0].pop("until"), "until is missing"),
        (lambda r: r["runs"][0].update(until="forever"), "not one of"),
        (lambda r: r["runs"][0].update(batch="8"), "batch is '8'"),
        (lambda r: r["runs"][0].update(batch=True), "batch is True"),
        (lambda r: r["runs"][0]["tokens_per_s"].pop("max"), "max is 'missing'"),
        (lambda r: r["runs"][0]["tokens_per_s"].update(min=1e9), "out of order"),
        (lambda r: r["runs"][0]["acceptance"].pop("pooled"), "pooled is 'missing'"),
        (lambda r: r["round_overhead_ms"].pop("p99"), "p99 is 'missing'"),
    ],
)
def test_a_broken_result_is_refused(result, change, reason):
    broken = copy.deepcopy(result)
    change(broken)
    assert any(reason in problem for problem in schema.problems(broken))


def test_markdown_and_json_are_written_side_by_side(result, tmp_path):
    page = report.write(result, tmp_path / "sub" / "bench.json")
    assert page == tmp_path / "sub" / "bench.md"
    text = page.read_text()
    assert "| chain | all | engine | 200.0 | 200.0-200.0 | 2.00 |" in text
    assert "Left out: suffix: not installed" in text
    assert schema.problems(json.loads((tmp_path / "sub" / "bench.json").read_text())) == []


def test_the_terminal_table_has_a_row_for_each_system(result):
    ((title, rows),) = report.cells(result)
    assert title == "prose, batch 1, temperature 0, until length"
    assert report.table(title, rows).row_count == 2
