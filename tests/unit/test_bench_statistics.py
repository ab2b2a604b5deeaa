"""What raw measurements amount to, and the form of a result file."""

import copy
import io
import json
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from PIL import Image
from rich.console import Console

from scripts.bench_lib import chart, report, schema, statistics
from scripts.bench_lib.cells import ENGINE_SYSTEMS, Cell, http_system
from scripts.bench_lib.prompts import in_turn, load_prompts
from scripts.bench_lib.statistics import RequestFigures, Sample
from scripts.bench_lib.transition import plan_transition, summarise_transition, transition_system

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


def test_cache_hits_are_pooled_over_repetitions():
    rows = statistics.summarise(
        [
            sample("chain", 1.0, 0, draft_stats={"cache_hits": 3.0, "cache_misses": 1.0}),
            sample("chain", 1.0, 1, draft_stats={"cache_hits": 0.0, "cache_misses": 4.0}),
            sample("chain_off", 1.0, draft_stats={"cache_hits": 0.0, "cache_misses": 0.0}),
            sample("wrong_draft", 1.0, draft_stats={"dropped:late": 1.0}),
        ]
    )
    assert row(rows, "chain")["outcome_cache"] == {"hit_rate": 0.375, "hits": 3, "misses": 5}
    assert row(rows, "chain_off")["outcome_cache"]["hit_rate"] is None
    assert "outcome_cache" not in row(rows, "wrong_draft")  # keeps none


def test_costs_of_a_round_are_means_weighted_by_rounds():
    rows = statistics.summarise(
        [
            sample("chain", 1.0, 0, stats={"rounds": 30.0, "verify_ms": 10.0, "wait_ms": 1.0}),
            sample("chain", 1.0, 1, stats={"rounds": 10.0, "verify_ms": 30.0}),
            sample("chain", 1.0, 2, stats={"rounds": 0.0, "verify_ms": 500.0}),
            sample("plain", 1.0),
        ]
    )
    assert row(rows, "chain")["round_ms"] == {"verify": 15.0, "wait": 1.0}
    assert "round_ms" not in row(rows, "plain")
    assert report.columns(row(rows, "chain"))[-1] == "15.0 / 1.0 / - / -"


def test_drafted_rounds_count_every_step_of_a_sequence():
    # ten tokens in six steps: four came with drafts, three of the steps checked one
    assert statistics.drafted_rounds([RequestFigures(10, drafted=9, accepted=4, verifies=3)]) == 0.5
    assert statistics.drafted_rounds([RequestFigures(10)]) == 0.0
    assert statistics.drafted_rounds([]) is None


def test_a_row_has_the_name_of_its_system():
    systems = [*ENGINE_SYSTEMS.values(), http_system("plain"), http_system("chain_off")]
    rows = statistics.summarise([sample(system, 1.0) for system in systems])
    assert [statistics.row_key(r) for r in rows] == [system.key for system in systems]


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
        (lambda r: r["runs"][0].update(outcome_cache={"hit_rate": None, "hits": 1}), "misses is 'missing'"),
        (lambda r: r["runs"][0].update(round_ms={"verify": "1"}), "verify is '1'"),
        (lambda r: r["runs"][0].update(round_ms=[1.0]), "round_ms is not an object"),
        (lambda r: r.update(transition={}), "transition is not a list"),
        (lambda r: r.update(transition=[{"phase": 1, "batch": 2}]), "tokens_per_s is 'missing'"),
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


def test_the_widest_table_fits_the_terminal(tmp_path):
    long = [
        sample(
            name, 0.02, i, requests=[RequestFigures(100, 40, 20, 10)],
            stats={"rounds": 9.0, "verify_ms": 120.5, "wait_ms": 10.2, "draft_ms": 10.1, "overhead_ms": 10.3},
            draft_stats={"cache_hits": 1.0, "cache_misses": 1.0},
        )
        for name in ("plain", "chain_model_sync", "plain_target_core") for i in range(2)
    ]  # fmt: skip
    ((title, rows),) = report.cells(report.build(long, tmp_path))
    text = io.StringIO()
    Console(file=text, width=140).print(report.table(title, rows))
    assert "…" not in text.getvalue()
    assert "120.5 / 10.2 / 10.1 / 10.3" in text.getvalue()


# --- a changing load --------------------------------------------------------------------------------------------------


def test_the_phases_of_a_changing_load_share_no_prompt():
    work = plan_transition(in_turn([load_prompts("prose"), load_prompts("mixed")]), 1.0)
    assert [cell.batch for cell, _ in work] == [2, 16, 2]
    assert [len(prompts) / cell.batch for cell, prompts in work] == [2, 2, 2]
    assert {(cell.until, cell.max_tokens, cell.temperature) for cell, _ in work} == {("length", 64, 1.0)}
    ids = [prompt.id for _, prompts in work for prompt in prompts]
    assert len(set(ids)) == len(ids)
    with pytest.raises(ValueError, match="needs 40 prompts, the chosen sets have 18"):
        plan_transition(load_prompts("warmup"), 0.0)


def test_each_phase_of_a_changing_load_is_a_row(tmp_path):
    batches = (2, 16, 2)
    phases = [
        sample("chain", 1.0 + i, cell=Cell("transition", batch, 0.0, "length", 64), requests=requests)
        for i, (batch, requests) in enumerate(
            zip(
                batches,
                ([RequestFigures(64, 40, 32, 16)], [RequestFigures(64)], [RequestFigures(64, 9, 0, 8)]),
                strict=True,
            )
        )
    ]
    found = summarise_transition(phases)
    assert found == [
        {
            "phase": 1,
            "batch": 2,
            "tokens_per_s": 64.0,
            "acceptance": 0.8,
            "tokens_per_verify": 3.0,
            "drafted_rounds": 0.5,
        },
        {
            "phase": 2,
            "batch": 16,
            "tokens_per_s": 32.0,
            "acceptance": None,
            "tokens_per_verify": None,
            "drafted_rounds": 0,
        },
        {
            "phase": 3,
            "batch": 2,
            "tokens_per_s": 64 / 3,
            "acceptance": 0,
            "tokens_per_verify": 1.0,
            "drafted_rounds": 0.125,
        },
    ]
    result = report.build([], tmp_path, transition=found)
    assert "| 1 | 2 | 64.0 | 0.80 | 3.00 | 0.50 |" in report.markdown(result)
    assert report.phase_table(found).row_count == 3


def test_the_changing_load_takes_the_first_system_that_drafts_on_the_chain():
    def chosen(*names):
        return transition_system([ENGINE_SYSTEMS[name] for name in names])

    assert chosen("plain", "chain_off", "chain_suffix", "chain", "chain_model") == ENGINE_SYSTEMS["chain"]
    assert chosen("plain", "chain_off", "chain_sync", "wrong_draft") is None


# --- charts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def charted(tmp_path):
    names = [*ENGINE_SYSTEMS, "chain_t4"]
    samples = [
        sample(
            replace(ENGINE_SYSTEMS["chain"], name=name) if name == "chain_t4" else name,
            1.0 / (1 + index / 10) + repetition / 100,
            repetition,
            cell=Cell(prompts, batch, 0.0, until, 10),
        )
        for prompts in ("prose", "json")
        for batch in (1, 8)
        for until in ("length", "eos")
        for index, name in enumerate(names)
        for repetition in range(2)
    ]
    return report.build(samples, tmp_path, systems=names)


def test_bars_are_ratios_with_their_extremes(charted):
    found = chart.panels(charted["runs"], "prose")
    assert set(found) == {(0.0, "length"), (0.0, "eos")}
    for bars in found.values():
        assert "plain" not in {bar.system for bar in bars}  # the line at 1
        assert {bar.system for bar in bars} == {*ENGINE_SYSTEMS, "chain_t4"} - {"plain"}
        assert {bar.batch for bar in bars} == {1, 8}
        assert all(bar.low <= bar.ratio <= bar.high for bar in bars)
        assert any(bar.low < bar.high for bar in bars)
    assert chart.panels(charted["runs"], "copy") == {}


def test_what_has_no_baseline_has_no_bar(tmp_path):
    result = report.build([sample("chain", 1.0)], tmp_path)
    assert chart.panels(result["runs"], "prose") == {}
    assert chart.write_charts(result, tmp_path / "bench.json") == []


def test_no_two_systems_look_alike():
    systems = [*ENGINE_SYSTEMS, "chain_t1", "chain_t2", "chain_t4", "chain@http", "chain_off@http"]
    looks = [chart.style(system, systems) for system in systems if system != "plain"]
    assert len(set(looks)) == len(looks)


def test_each_set_has_a_picture_beside_the_result(charted, tmp_path):
    written = chart.write_charts(charted, tmp_path / "latest.json")
    assert [path.name for path in written] == ["latest-prose.png", "latest-json.png"]
    for path in written:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) >= 700
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_a_system_that_failed_half_way_keeps_its_place_in_the_legend(charted, tmp_path):
    kept = [r for r in charted["runs"] if not (r["system"] == "chain" and (r["until"] == "eos" or r["batch"] == 8))]
    (picture, _) = chart.write_charts(charted | {"runs": kept}, tmp_path / "half.json")
    assert picture.stat().st_size > 0
    (bar,) = [b for bars in chart.panels(kept, "prose").values() for b in bars if b.system == "chain"]
    assert bar.batch == 1
    line, patch, other = chart.legend(["chain", "chain_sync"])
    assert line.get_label() == "plain, all cores"
    assert [patch.get_label(), to_hex(patch.get_facecolor()).upper()] == ["chain", chart.BLUE]
    assert other.get_hatch()
