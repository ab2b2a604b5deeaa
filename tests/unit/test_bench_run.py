"""Order of turns, options, engine settings, time budgets and what a failing engine costs."""

import io
import json
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from deployments.config import AppConfig
from scripts.bench_lib import cli, settings
from scripts.bench_lib.backend import chain_field
from scripts.bench_lib.cells import ENGINE_SYSTEMS, Cell, http_system, plan_cells, turns
from scripts.bench_lib.cli import phases
from scripts.bench_lib.http_backend import figures
from scripts.bench_lib.options import read_options
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.served import ServedBackend, served_config
from scripts.bench_lib.session import Session, unmeasured_text
from scripts.bench_lib.shipped import base_config, shipped_chain, shipped_draft
from scripts.bench_lib.statistics import RequestFigures, Sample

CORES = settings.Cores.split({0, 1})
BOUNDS = settings.ChainBounds()


# --- turns ------------------------------------------------------------------------------------------------------------


def test_every_system_runs_every_cell_in_every_repetition():
    cells = plan_cells(["prose", "copy"], [1, 8], [0.0], ["length", "eos"], 128, 256)
    assert {cell.max_tokens for cell in cells if cell.until == "eos"} == {256}
    systems = list(ENGINE_SYSTEMS.values())
    counts = Counter((turn.cell, system) for turn in turns(cells, systems, 3) for system in turn.systems)
    assert len(counts) == len(cells) * len(systems)
    assert set(counts.values()) == {3}


def test_systems_take_turns_within_a_cell_and_start_in_turn():
    cells = plan_cells(["prose"], [1, 4], [0.0], ["length"], 8, 8)
    systems = [ENGINE_SYSTEMS[name] for name in ("plain", "ngram", "chain")]
    plan = list(turns(cells, systems, 2))
    assert [(turn.repetition, turn.cell) for turn in plan] == [
        (0, cells[0]),
        (0, cells[1]),
        (1, cells[0]),
        (1, cells[1]),
    ]
    assert [turn.systems[0].key for turn in plan] == ["plain", "ngram", "chain", "plain"]
    assert all(set(turn.systems) == set(systems) for turn in plan)


def test_system_keys_are_unique():
    keys = [system.key for system in ENGINE_SYSTEMS.values()] + [http_system("chain").key, http_system("plain").key]
    assert len(set(keys)) == len(keys)
    with pytest.raises(ValueError, match="there are: plain"):
        http_system("ngram")


def test_systems_that_differ_by_the_request_share_an_engine():
    served = {}
    for key, system in ENGINE_SYSTEMS.items():
        if system.chain_enabled is not None:
            served.setdefault(system.engine, set()).add(key)
    assert served == {
        "chain": {"chain", "chain_off", "chain_model", "chain_suffix"},
        "chain_no_kv": {"chain_no_kv"},
        "chain_sync": {"chain_sync", "chain_model_sync"},
        "wrong_draft": {"wrong_draft"},
        "always_the": {"always_the"},
    }
    silent = {key for key, system in ENGINE_SYSTEMS.items() if not system.asks_model}
    assert silent == {"plain", "plain_target_core", "ngram", "suffix", "chain_off", "chain_suffix"}


def test_requests_say_which_sources_draft():
    fields = {key: chain_field(ENGINE_SYSTEMS[key]) for key in ("plain", "chain", "chain_model", "chain_suffix")}
    assert fields == {
        "plain": None,
        "chain": '{"enabled": true}',
        "chain_model": '{"enabled": true, "sources": ["model"]}',
        "chain_suffix": '{"enabled": true, "sources": ["suffix"]}',
    }
    assert chain_field(ENGINE_SYSTEMS["chain_off"], "me") == '{"enabled": false, "tenant": "me"}'
    assert chain_field(ENGINE_SYSTEMS["plain"], "me") is None


# --- settings ---------------------------------------------------------------------------------------------------------


def test_cores_are_shared_out():
    assert settings.Cores((0, 1), (0,), 1) == CORES
    assert settings.Cores.split({3}) == settings.Cores((3,), (3,), 3)
    assert settings.Cores.split({0, 2, 4, 6}) == settings.Cores((0, 2, 4, 6), (0, 2, 4), 6)


def engine(name, mode="compiled", bounds=BOUNDS, cores=CORES):
    return settings.engine_settings(name, Path("m"), cores, mode, bounds)


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("chain", "real"),
        ("chain_no_kv", "real"),
        ("chain_sync", "sync"),
        ("wrong_draft", "wrong"),
        ("always_the", "the"),
    ],
)
def test_target_core_and_chain_differ_only_by_the_chain_and_the_lent_core(name, draft):
    plain, chain = engine("plain_target_core"), engine(name)
    assert (plain.cores, chain.cores) == ((0,), (0, 1))
    assert plain.mode == chain.mode == "eager"
    assert (plain.draft, chain.draft) == ("none", draft)
    extra = {"worker_cls", "additional_config", "speculative_config", "per_request_spec_decode_metrics"}
    assert {k: v for k, v in chain.arguments.items() if k not in extra} == plain.arguments


def test_the_chain_is_told_its_bounds_and_which_cores_it_keeps():
    found = engine("chain", bounds=settings.ChainBounds(tokens=9, model_tokens=3, max_batch=5)).arguments
    assert found["speculative_config"]["num_speculative_tokens"] == 9
    assert found["additional_config"] == {
        "chain_max_batch": 5,
        "chain_own_threads": 1,
        "chain_sources": ["suffix"],
        "chain_model_tokens": 3,
        "chain_kv_mib": settings.CHAIN_KV_MIB,
        "chain_hidden": True,
    }
    assert engine("chain_no_kv").arguments["additional_config"]["chain_kv_mib"] == 0
    four = engine("chain", cores=settings.Cores.split({0, 1, 2, 3}))
    assert four.arguments["additional_config"]["chain_own_threads"] == 3
    assert four.cores == (0, 1, 2, 3)


@pytest.mark.parametrize("name", ["plain", "ngram", "suffix"])
def test_vllms_own_modes_get_all_cores_and_the_chosen_mode(name):
    for mode in ("compiled", "eager"):
        own = engine(name, mode)
        assert (own.cores, own.mode, own.draft) == ((0, 1), mode, "none")


def test_environment_binds_threads_and_keeps_a_given_preload():
    found = settings.engine_environment((0, 1), {"LD_PRELOAD": "mine.so"})
    assert found["LD_PRELOAD"] == "mine.so"
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["KMP_AFFINITY"].endswith("proclist=[0,1]")
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path):
    for path in ("target/config.json", f"{shipped_draft()}/model.onnx"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("{}")
    return str(tmp_path)


def test_full_is_the_default_and_quick_is_small(models):
    full = read_options(["--models", models])
    assert (full.batches, full.temperatures, full.until) == ([1, 2, 4, 8, 32], [0.0, 1.0], ["length", "eos"])
    assert full.sets == ["prose", "copy", "json", "code"]
    assert [system.key for system in full.systems] == list(ENGINE_SYSTEMS)
    assert (full.mode, full.length, full.eos_length, full.repetitions) == ("compiled", 128, 256, 3)
    quick = read_options(["--quick", "--models", models])
    assert (quick.batches, quick.temperatures, quick.until, quick.mode) == ([1], [0.0], ["length"], "eager")
    assert (quick.repetitions, quick.prompts, quick.length, quick.sets) == (1, 2, 48, ["prose", "copy"])
    assert [system.key for system in quick.systems] == ["plain", "suffix", "chain", "chain_off"]
    assert len({system.engine for system in quick.systems}) == 3
    assert read_options(["--quick", "--batches", "4", "--models", models]).batches == [4]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--systems", "magic"], "no system 'magic'"),
        (["--systems", ""], "nothing to measure"),
        (["--batches", "64"], "1 to 32"),
        (["--until", "never"], "length and eos"),
        (["--tokens", "33"], "1 to 32"),
        (["--model-tokens", "0"], "1 to 32"),
        (["--batches", ""], "there is no --transition"),
        (["--sets", ""], "at least one each"),
        (["--systems", "plain,chain_sync,chain_suffix", "--transition"], "needs the system chain"),
        (["--budget", "0"], "minutes above 0"),
        (["--repetitions", "0"], "start at 1"),
        (["--target", "gone"], "scripts/prepare_models"),
        (["--draft", "gone"], "no draft model"),
    ],
)
def test_wrong_options_end_with_a_sentence(models, capsys, arguments, reason):
    with pytest.raises(SystemExit) as caught:
        read_options(["--models", models, *arguments])
    assert caught.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        read_options(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*ENGINE_SYSTEMS, "--quick leaves out", "examples"))


# --- session ----------------------------------------------------------------------------------------------------------


class FakeBackend:
    def __init__(self, name, fail_at=None, error=None):
        self.name, self.fail_at = name, fail_at
        self.error = error or RuntimeError("out of memory")
        self.calls = 0
        self.started = 0
        self.stopped = 0
        self.works = []

    def start(self, warmup, batches, temperatures):
        self.started += 1
        self.batches = batches
        if self.fail_at == "start":
            raise self.error
        return 0.1

    def measure(self, work, system, repetition, settle):
        self.calls += 1
        if self.fail_at == self.calls:
            raise self.error
        self.works.append(work)
        return [
            Sample(cell, system, repetition, 1.0, tuple(RequestFigures(10) for _ in prompts)) for cell, prompts in work
        ]

    def stop(self):
        self.stopped += 1


def session(*backends, **more):
    systems = [ENGINE_SYSTEMS[backend.name] for backend in backends]
    prompts = [Prompt(f"p{i}", "prose", ({"role": "user", "content": str(i)},)) for i in range(8)]
    console = Console(file=io.StringIO())
    return Session(systems, {b.name: b for b in backends}, {"prose": prompts}, prompts[:2], console, **more)


CELLS = [Cell("prose", 1, 0.0, "length", 4), Cell("prose", 4, 0.0, "length", 4)]


def test_a_session_measures_everything_and_stops_everybody():
    backends = FakeBackend("plain"), FakeBackend("ngram")
    running = session(*backends)
    running.run(CELLS, 3, start_together=2)
    assert len(running.measured.samples) == 12
    assert all(backend.stopped for backend in backends)
    assert not running.measured.left_out


@pytest.mark.parametrize(("fail_at", "kept"), [("start", 0), (1, 0), (3, 2)])
def test_a_failing_engine_is_left_out_with_its_reason(fail_at, kept):
    broken, healthy = FakeBackend("suffix", fail_at), FakeBackend("plain")
    running = session(broken, healthy)
    running.run(CELLS, 3)
    assert running.measured.left_out == {"suffix": "out of memory"}
    assert Counter(s.system.name for s in running.measured.samples) == Counter({"plain": 6, "suffix": kept})
    assert broken.stopped


def test_an_interrupt_keeps_what_was_measured():
    backend = FakeBackend("plain", fail_at=4, error=KeyboardInterrupt())
    running = session(backend)
    running.run(CELLS, 3)
    assert running.measured.interrupted
    assert len(running.measured.samples) == 3
    assert backend.stopped


def test_a_time_budget_ends_a_session_after_a_complete_turn():
    backends = FakeBackend("plain"), FakeBackend("ngram")
    running = session(*backends, ends_at=time.monotonic())
    running.run(CELLS, 3)
    assert [(s.system.name, s.cell) for s in running.measured.samples] == [("plain", CELLS[0]), ("ngram", CELLS[0])]
    left = [(turn.repetition, turn.cell) for turn in running.measured.unmeasured]
    assert left == [(0, CELLS[1])] + [(repetition, cell) for repetition in (1, 2) for cell in CELLS]
    (sentence,) = unmeasured_text(running.measured.unmeasured)
    assert "5 turns of ngram, plain left out" in sentence
    assert f"never measured: {CELLS[1].label}" in sentence
    assert "1 cells with fewer repetitions" in sentence
    assert all(backend.stopped for backend in backends)


def test_a_spent_time_budget_starts_no_further_engine():
    first, second = FakeBackend("plain"), FakeBackend("ngram")
    running = session(first, ends_at=time.monotonic())
    running.run(CELLS[:1], 1)
    later = session(second, ends_at=running.ends_at, measured=running.measured)
    later.run(CELLS, 2)
    assert second.started == 0
    assert len(later.measured.samples) == 1
    assert len(later.measured.unmeasured) == 4


def test_without_a_time_budget_nothing_is_left_out():
    running = session(FakeBackend("plain"))
    running.run(CELLS, 2)
    assert unmeasured_text(running.measured.unmeasured) == []


def test_the_changing_load_runs_first_and_on_the_chain_only():
    work = [(Cell("transition", batch, 0.0, "length", 4), []) for batch in (2, 16, 2)]
    plain, chain = FakeBackend("plain"), FakeBackend("chain")
    running = session(plain, chain, transition=work)
    running.run(CELLS, 1)
    assert chain.works[0] == work
    assert [sample.cell for sample in running.measured.transition] == [cell for cell, _ in work]
    assert len(running.measured.samples) == 4
    assert len(plain.works) == 2
    assert chain.batches == [1, 2, 4, 16]


def test_a_whole_run_writes_figures_tables_and_charts(models, tmp_path, monkeypatch):
    names = ["plain", "chain"]
    monkeypatch.setattr(cli, "backends", lambda *_: {name: FakeBackend(name) for name in names})
    monkeypatch.setattr(cli.machine, "busy_share", lambda: 0.0)
    out = tmp_path / "out" / "small.json"
    arguments = ["--models", models, "--systems", ",".join(names), "--sets", "prose,mixed", "--batches", "1,2"]
    more = ["--temperatures", "0", "--until", "length", "--repetitions", "1", "--transition", "--out", str(out)]
    assert cli.main([*arguments, *more, "--budget", "0.000001"]) == 0
    result = json.loads(out.read_text())
    assert [(run["set"], run["batch"], run["system"]) for run in result["runs"]] == [
        ("prose", 1, "plain"),
        ("prose", 1, "chain"),
    ]
    assert [phase["batch"] for phase in result["transition"]] == [2, 16, 2]
    assert "3 turns of chain, plain left out" in result["budget"]["left_out"][0]
    assert result["budget"]["left_out"][0] in out.with_suffix(".md").read_text()
    assert sorted(path.name for path in out.parent.iterdir()) == ["small-prose.png", "small.json", "small.md"]


def test_a_set_that_is_not_there_ends_with_a_sentence(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli.machine, "busy_share", lambda: 0.0)
    arguments = ["--models", models, "--systems", "plain", "--sets", "poems", "--out", str(tmp_path / "x.json")]
    assert cli.main(arguments) == 2
    assert "no prompt set 'poems'" in capsys.readouterr().out


# --- HTTP, draft lengths, servers --------------------------------------------------------------------------------------


def test_http_figures_are_found_wherever_the_server_puts_them():
    counts = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 6, "num_spec_steps": 2}
    answer = {"usage": {"completion_tokens": 9}, "metrics": {"speculative_decoding": counts}}
    assert figures(answer) == RequestFigures(9, 8, 6, 2)
    assert figures({"usage": {"completion_tokens": 9}}) == RequestFigures(9)


def test_several_draft_lengths_share_one_engine(models):
    options = read_options(["--models", models, "--systems", "plain,chain,chain_off", "--tokens", "1,4"])
    assert [system.key for system in options.systems] == ["plain", "chain_t1", "chain_t4", "chain_off"]
    assert len({system.engine for system in options.systems}) == 2
    assert [chain_field(system) for system in options.systems] == [
        None,
        '{"enabled": true, "tokens": 1}',
        '{"enabled": true, "tokens": 4}',
        '{"enabled": false}',
    ]


def test_http_systems_share_a_server_where_they_can(models):
    options = read_options(["--models", models, "--systems", "", "--http", "chain,chain_off,plain=http://h:1"])
    assert [(s.key, s.engine) for s in options.systems] == [
        ("chain@http", "http:chain"),
        ("chain_off@http", "http:chain"),
        ("plain@http", "http:http://h:1"),
    ]


def test_servers_of_ours_run_alone(tmp_path):
    served = ServedBackend("http:chain", {}, tmp_path)
    found = {"http:chain": served, "plain": FakeBackend("plain"), "ngram": FakeBackend("ngram")}
    assert [list(group) for group in phases(found)] == [["plain", "ngram"], ["http:chain"]]
    served.stop()  # never started


def test_served_configs_are_valid_and_differ_by_the_chain(tmp_path):
    (tmp_path / "d").mkdir()
    given = {"target": tmp_path, "draft": tmp_path / "d", "cores": CORES, "mode": "compiled"}
    given["bounds"] = settings.ChainBounds(tokens=12, model_tokens=2)
    base = base_config()
    plain, chain = (served_config(kind, base, **given)["applications"][0]["args"] for kind in ("plain", "chain"))
    assert plain["drafts"] == []
    assert (plain["target"]["cores"], plain["target"]["eager"]) == ([0, 1], False)
    assert (chain["target"]["cores"], chain["drafts"][0]["cores"]) == ([0, 1], [1])
    assert (chain["chain"]["tokens"], chain["drafts"][0]["tokens"]) == (12, 2)
    assert base == base_config()  # unchanged
    for args in (plain, chain):
        AppConfig.model_validate(args)


def test_what_ships_is_what_is_measured(models):
    tokens, max_batch = shipped_chain()
    options = read_options(["--models", models])
    assert (options.tokens, options.model_tokens, options.max_batch) == ([24], tokens, max_batch)
    assert read_options(["--models", models, "--max-batch", "3", "--model-tokens", "7"]).model_tokens == 7
    assert read_options(["--models", models, "--max-batch", "3"]).max_batch == 3


def test_only_the_changing_load_can_be_measured(models):
    options = read_options(
        ["--models", models, "--systems", "chain", "--batches", "", "--transition", "--budget", "2.5"]
    )
    assert (options.batches, options.transition, options.budget_minutes) == ([], True, 2.5)
