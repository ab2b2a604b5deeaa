"""Order of turns, options, engine settings, child processes and what a failing engine costs."""

import io
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Step
from deployments.config import AppConfig
from scripts.bench_lib import settings
from scripts.bench_lib.backend import chain_field
from scripts.bench_lib.cells import ENGINE_SYSTEMS, Cell, http_system, plan_cells, turns
from scripts.bench_lib.child import Child, ChildError
from scripts.bench_lib.cli import phases
from scripts.bench_lib.http_backend import figures
from scripts.bench_lib.options import read_options
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.served import ServedBackend, served_config
from scripts.bench_lib.session import Session
from scripts.bench_lib.shipped import base_config, shipped_chain
from scripts.bench_lib.statistics import RequestFigures, Sample
from scripts.bench_lib.wrong_draft import WrongDrafter

CORES = settings.Cores.split({0, 1})


# --- turns ------------------------------------------------------------------------------------------------------------


def test_every_system_runs_every_cell_in_every_repetition():
    cells = plan_cells(["prose", "copy"], [1, 8], [0.0], ["length", "eos"], 128, 256)
    assert {cell.max_tokens for cell in cells if cell.until == "eos"} == {256}
    systems = list(ENGINE_SYSTEMS.values())
    counts = Counter((cell, system) for _, cell, system in turns(cells, systems, 3))
    assert len(counts) == len(cells) * len(systems)
    assert set(counts.values()) == {3}


def test_systems_take_turns_within_a_cell_and_start_in_turn():
    cells = plan_cells(["prose"], [1, 4], [0.0], ["length"], 8, 8)
    systems = [ENGINE_SYSTEMS[name] for name in ("plain", "ngram", "chain")]
    plan = list(turns(cells, systems, 2))
    blocks = [plan[start : start + 3] for start in range(0, len(plan), 3)]
    for block in blocks:
        assert len({(repetition, cell) for repetition, cell, _ in block}) == 1
    assert [block[0][2].key for block in blocks] == ["plain", "ngram", "chain", "plain"]


def test_system_keys_are_unique():
    keys = [system.key for system in ENGINE_SYSTEMS.values()] + [http_system("chain").key, http_system("plain").key]
    assert len(set(keys)) == len(keys)
    with pytest.raises(ValueError, match="there are: plain"):
        http_system("ngram")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_cores_are_shared_out():
    assert settings.Cores((0, 1), (0,), 1) == CORES
    assert settings.Cores.split({3}) == settings.Cores((3,), (3,), 3)
    assert settings.Cores.split({0, 2, 4, 6}) == settings.Cores((0, 2, 4, 6), (0, 2, 4), 6)


def test_target_core_and_chain_differ_only_by_the_chain():
    plain = settings.engine_settings("plain_target_core", Path("m"), CORES, "compiled", 4)
    chain = settings.engine_settings("chain", Path("m"), CORES, "compiled", 4)
    assert plain.cores == chain.cores == (0,)
    assert plain.mode == chain.mode == "eager"
    extra = {"worker_cls", "additional_config", "speculative_config", "per_request_spec_decode_metrics"}
    assert {k: v for k, v in chain.arguments.items() if k not in extra} == plain.arguments


@pytest.mark.parametrize("name", ["plain", "ngram", "suffix"])
def test_vllms_own_modes_get_all_cores_and_the_chosen_mode(name):
    for mode in ("compiled", "eager"):
        engine = settings.engine_settings(name, Path("m"), CORES, mode, 4)
        assert (engine.cores, engine.mode, engine.draft) == ((0, 1), mode, "none")


def test_environment_binds_threads_and_keeps_a_given_preload():
    found = settings.engine_environment((0, 1), {"LD_PRELOAD": "mine.so"})
    assert found["LD_PRELOAD"] == "mine.so"
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["KMP_AFFINITY"].endswith("proclist=[0,1]")
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path):
    for path in ("target/config.json", "draft-int4/model.onnx"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("{}")
    return str(tmp_path)


def test_full_is_the_default_and_quick_is_small(models):
    full = read_options(["--models", models])
    assert (full.batches, full.temperatures, full.until) == ([1, 4, 8, 32], [0.0, 1.0], ["length", "eos"])
    assert [system.key for system in full.systems] == list(ENGINE_SYSTEMS)
    assert (full.mode, full.length, full.eos_length, full.repetitions) == ("compiled", 128, 256, 3)
    quick = read_options(["--quick", "--models", models])
    assert (quick.batches, quick.temperatures, quick.until, quick.mode) == ([1, 8], [0.0], ["length"], "eager")
    assert quick.repetitions == 3
    assert read_options(["--quick", "--batches", "4", "--models", models]).batches == [4]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--systems", "magic"], "no system 'magic'"),
        (["--systems", ""], "nothing to measure"),
        (["--batches", "64"], "1 to 32"),
        (["--until", "never"], "length and eos"),
        (["--tokens", "17"], "1 to 16"),
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
    assert all(name in shown for name in (*ENGINE_SYSTEMS, "--quick", "examples"))


# --- session ----------------------------------------------------------------------------------------------------------


class FakeBackend:
    def __init__(self, name, fail_at=None, error=None):
        self.name, self.fail_at = name, fail_at
        self.error = error or RuntimeError("out of memory")
        self.calls = 0
        self.stopped = 0

    def start(self, warmup, batches, temperatures):
        if self.fail_at == "start":
            raise self.error
        return 0.1

    def measure(self, cell, system, repetition, prompts, settle):
        self.calls += 1
        if self.fail_at == self.calls:
            raise self.error
        return Sample(cell, system, repetition, 1.0, tuple(RequestFigures(10) for _ in prompts))

    def stop(self):
        self.stopped += 1


def session(*backends):
    systems = [ENGINE_SYSTEMS[backend.name] for backend in backends]
    prompts = [Prompt(f"p{i}", "prose", ({"role": "user", "content": str(i)},)) for i in range(8)]
    console = Console(file=io.StringIO())
    return Session(systems, {b.name: b for b in backends}, {"prose": prompts}, prompts[:2], console)


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


# --- child processes --------------------------------------------------------------------------------------------------

ECHO = """
import sys, time
print("noise", flush=True)
for line in sys.stdin:
    print(line.strip() if "die" not in line else exit(3), flush=True)
"""


@pytest.fixture
def child(tmp_path):
    made = Child(
        "echo", [sys.executable, "-c", ECHO], {}, [min(settings.os.sched_getaffinity(0))], tmp_path / "l", tmp_path
    )
    yield made
    made.stop()


def test_a_child_answers_between_noise(child):
    assert child.ask(20, value=1) == {"value": 1}
    with pytest.raises(ChildError, match="echo: broken"):
        child.ask(20, error="broken")


def test_a_frozen_child_is_stopped_and_answers_after_thawing(child):
    child.ask(20, value=1)
    child.freeze()
    child.tell(value=2)
    with pytest.raises(ChildError, match="in time"):
        child.answer(0.2)
    child.thaw()
    assert child.answer(20) == {"value": 2}


def test_a_dead_child_is_an_error_with_its_status(child):
    with pytest.raises(ChildError, match="status 3"):
        child.ask(20, die=True)


def test_stopping_a_frozen_child_leaves_no_process(child):
    child.ask(20, value=1)
    child.freeze()
    started = time.monotonic()
    child.stop()
    assert time.monotonic() - started < 10
    assert child._process.returncode in (0, -signal.SIGKILL)


# --- the wrong draft and HTTP figures ---------------------------------------------------------------------------------


def test_the_wrong_draft_keeps_the_protocol_and_does_not_repeat_itself():
    drafter = WrongDrafter("wrong", 1000)
    commits = [Commit("a", 1, 3, [1, 2, 3], 4), Commit("b", 1, 3, [1, 2, 3], 2), Commit("c", 1, 1, [1], 0)]
    answer = drafter.step(Step(PROTOCOL_VERSION, "t", 7, 0.1, commits, []))
    assert answer.number == 7
    assert [(d.session, d.base, len(d.tokens)) for d in answer.drafts] == [("a", 3, 4), ("b", 3, 2), ("c", 1, 0)]
    assert all(0 <= token < 1000 for draft in answer.drafts for token in draft.tokens)
    assert answer.drafts[0].tokens[:2] != answer.drafts[1].tokens


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
    given = {
        "target": tmp_path,
        "draft": tmp_path / "d",
        "cores": CORES,
        "mode": "compiled",
        "tokens": 2,
        "max_batch": 0,
    }
    base = base_config()
    plain, chain = (served_config(kind, base, **given)["applications"][0]["args"] for kind in ("plain", "chain"))
    assert plain["drafts"] == []
    assert (plain["target"]["cores"], plain["target"]["eager"]) == ([0, 1], False)
    assert (chain["target"]["cores"], chain["drafts"][0]["cores"], chain["drafts"][0]["tokens"]) == ([0], [1], 2)
    assert base == base_config()  # unchanged
    for args in (plain, chain):
        AppConfig.model_validate(args)


def test_what_ships_is_what_is_measured(models):
    tokens, max_batch = shipped_chain()
    options = read_options(["--models", models])
    assert (options.tokens, options.max_batch) == ([tokens], max_batch)
    assert read_options(["--models", models, "--max-batch", "0"]).max_batch == 0
    chain = settings.engine_settings("chain", Path("m"), CORES, "eager", 3, 5)
    assert chain.arguments["additional_config"] == {"chain_max_batch": 5}
