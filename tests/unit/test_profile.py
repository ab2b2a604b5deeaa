"""scripts/profile: its figures, options and report, what a failing section costs, and its children without models."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Drafts, Step
from scripts.bench_lib.child import Child, ChildError
from scripts.bench_lib.settings import Cores
from scripts.profile_lib import channel, cli, contention, report, steps
from scripts.profile_lib.engine_child import TimedEngine
from scripts.profile_lib.figures import figures, paired_ratio, pooled, within
from scripts.profile_lib.hops_far import ComputingDrafter, NotingDrafter
from scripts.profile_lib.hops_near import HOPS, hops
from scripts.profile_lib.options import SECTIONS, read_options
from scripts.profile_lib.section import Setting, Tell

TIMES = st.floats(0.01, 1e3)
TWO = Cores.split({0, 1})


def setting(models: Path = Path("models"), cores: Cores = TWO, repetitions: int = 2) -> Setting:
    return Setting(cores, models, repetitions, models / "logs")


# --- figures ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(TIMES, min_size=1), st.randoms())
def test_figures_are_in_order_and_do_not_depend_on_it(values: list[float], random: Any) -> None:
    found = figures(values)
    assert found["min"] <= found["median"]
    assert found["median"] <= found["p99"] <= max(values)
    assert found["min"] <= found["p90"] <= found["p99"]
    assert sum(value <= found["p90"] for value in values) >= 0.9 * len(values)
    assert found["count"] == len(values)
    shuffled = list(values)
    random.shuffle(shuffled)
    assert figures(shuffled) == found


def test_without_values_there_are_no_figures() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        pooled([[], []])


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(TIMES, min_size=1), st.floats(0.2, 5)), min_size=1), st.floats(0.5, 4))
def test_a_machine_that_drifts_does_not_change_a_paired_ratio(
    repetitions: list[tuple[list[float], float]], slower: float
) -> None:
    base = [[drift * value for value in values] for values, drift in repetitions]
    ours = [[slower * value for value in values] for values in base]
    assert paired_ratio(ours, base) == pytest.approx(slower)


def test_a_paired_ratio_skips_repetitions_that_lack_a_side() -> None:
    assert paired_ratio([[2.0], []], [[1.0], [1.0]]) == 2.0
    assert paired_ratio([[2.0], []], [[], [1.0]]) is None


@settings(deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES)), TIMES, TIMES)
def test_only_what_lies_wholly_within_counts(pieces: list[tuple[float, float]], one: float, other: float) -> None:
    began, ended = sorted((one, other))
    kept = within(pieces, began, ended)
    assert sum(kept) <= len(pieces) * (ended - began) + 1e-6
    assert len(kept) + sum(s < began or s + d > ended for s, d in pieces) == len(pieces)


@settings(deadline=None)
@given(st.lists(TIMES, min_size=5, max_size=5))
def test_hops_add_up_to_the_round_trip(seconds: list[float]) -> None:
    post, out, queue, step, back = seconds
    sent = 1000.0
    began = sent + out + queue
    answer = Drafts(PROTOCOL_VERSION, repr(began), 1, [], work_s=step, queue_s=queue)
    found = hops(sent, sent + post, answer, began + step + back)
    assert set(found) == set(HOPS)
    assert found["out"] == pytest.approx(1e3 * out)
    assert found["back"] == pytest.approx(1e3 * back, abs=1e-6)
    assert found["out"] + found["queue"] + found["step"] + found["back"] == pytest.approx(found["round_trip"])
    assert found["transport"] + found["queue"] + found["step"] == pytest.approx(found["round_trip"])


# --- options ----------------------------------------------------------------------------------------------------------


def test_sections_run_in_a_fixed_order_whatever_was_typed(tmp_path: Path) -> None:
    models = ["--models", str(tmp_path)]
    assert read_options(models).sections == SECTIONS
    assert read_options([*models, "--only", "steps, channel"]).sections == ("channel", "steps")


def test_the_channel_needs_no_models(tmp_path: Path) -> None:
    missing = ["--models", str(tmp_path / "none")]
    assert read_options(["--only", "channel", *missing]).sections == ("channel",)
    with pytest.raises(SystemExit):
        read_options(["--only", "channel,steps", *missing])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "kettle"], "no section kettle; there are: channel, contention, steps"),
        (["--only", ","], "at least one of"),
        (["--repetitions", "0"], "starts at 1"),
        (["--out", "page.md"], "names the JSON file"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_options([*arguments, "--models", str(tmp_path)])
    assert said in capsys.readouterr().err


def test_help_explains_every_section_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read_options(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {section} " in text for section in SECTIONS)
    assert all(option in text for option in ("--only", "--repetitions", "--models", "--out", "examples"))


# --- what is measured -------------------------------------------------------------------------------------------------


def test_every_other_repetition_runs_backwards_over_the_same_cells() -> None:
    forth, back = steps.plan(TWO, 0), steps.plan(TWO, 1)
    assert forth == back[::-1] == steps.plan(TWO, 2)
    assert len(set(forth)) == len(forth) == 2 * len(steps.BATCHES) * len(steps.VERIFIED)
    assert all(cell.plain in forth for cell in forth)
    assert {cell.threads for cell in steps.plan(Cores.split({3}), 0)} == {1}


def test_all_that_is_drafted_is_verified(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text("{}")
    given = steps.arguments(setting(tmp_path))
    assert given["additional_config"] == {"chain_adaptive": False}
    assert given["speculative_config"]["num_speculative_tokens"] == max(steps.VERIFIED)
    assert given["enforce_eager"]
    assert Path(given["model"]).is_absolute()


def test_a_setting_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="needs two cores"):
        setting(tmp_path, Cores.split({0})).two_cores()
    with pytest.raises(FileNotFoundError, match="scripts/prepare_models"):
        setting(tmp_path).target()
    (tmp_path / "draft-empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no draft"):
        setting(tmp_path).drafts()
    for name in ("draft-b", "draft-a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").touch()
    assert [folder.name for folder in setting(tmp_path).drafts()] == ["draft-a", "draft-b"]


class ScriptedDraft:
    """Computes from ``compute`` to ``rest``, a piece every ``piece_s`` of the given clock."""

    def __init__(self, clock: Callable[[], float], piece_s: float) -> None:
        self.clock, self.piece_s = clock, piece_s
        self.computing_since: float | None = None
        self.answers: list[dict[str, Any]] = []

    def tell(self, command: str, rows: int = 0) -> None:
        if command == "compute":
            assert self.computing_since is None
            self.computing_since = self.clock()
            return
        assert self.computing_since is not None
        count = int((self.clock() - self.computing_since) / self.piece_s)
        pieces = [(self.computing_since + index * self.piece_s, self.piece_s) for index in range(count)]
        self.answers += [{"pieces": pieces}, {}]
        self.computing_since = None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        return self.answers.pop(0)


def test_alone_means_alone_and_beside_means_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    draft = ScriptedDraft(lambda: now[0], 0.1)
    beside: list[bool] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def ask(timeout_s: float, **command: Any) -> dict[str, Any]:
        beside.append(draft.computing_since is not None)
        began = now[0]
        now[0] += 0.55
        return {"ms": [60.0 if beside[-1] else 50.0], "began": began, "ended": now[0], "uneven": 0}

    monkeypatch.setattr(contention, "time", SimpleNamespace(sleep=sleep, perf_counter=lambda: now[0]))
    found = contention.one_turn(SimpleNamespace(ask=ask), draft, 1)  # type: ignore[arg-type]
    assert beside == [False, True]
    assert (found["target_alone"], found["target_beside"]) == ([50.0], [60.0])
    assert 0 < len(found["draft_beside"]) < len(found["draft_alone"])  # cut to the target's time
    assert draft.answers == []


class FakeLLM:
    """An engine that reads prompts one step late and, at one step, verifies fewer tokens than asked."""

    def __init__(self, odd_step: int) -> None:
        self.llm_engine = self
        self.odd_step, self.verified, self.count = odd_step, 0, 0
        self.steps = 0
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.params: list[dict[str, Any]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: dict[str, Any]) -> str:
        assert prompt["prompt_token_ids"]
        self.running.append(name)
        self.params.append(params)
        chain = json.loads((params["extra_args"] or {"chain": "{}"})["chain"])
        self.verified = chain.get("tokens", 0) if chain.get("enabled") else 0
        return f"{name}-internal"

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        if self.steps == 1:
            return []
        self.count += len(self.running) * self.verified - (self.steps == self.odd_step)
        return [SimpleNamespace(request_id=name) for name in self.running]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def collective_rpc(self, method: str) -> list[dict[str, float]]:
        assert method == "draft_stats"
        return [{"drafted_tokens": float(self.count)}]


@pytest.mark.parametrize("chain", [True, False])
def test_only_steps_that_verified_what_was_asked_are_timed(chain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    llm, engine = FakeLLM(odd_step=6), TimedEngine()
    engine._llm, engine._chain = llm, chain
    answer = engine.time_steps(batch=2, steps=5, verified=4 if chain else 0)
    assert (len(answer["ms"]), answer["uneven"]) == ((4, 1) if chain else (5, 0))
    assert sum(answer["ms"]) / 1e3 <= answer["ended"] - answer["began"]
    assert llm.aborted == llm.running
    assert all((params["extra_args"] is not None) == chain for params in llm.params)
    assert all(params["max_tokens"] > 100 for params in llm.params)  # an end in sight would shorten drafts


# --- the channel's ends -----------------------------------------------------------------------------------------------


def test_a_noting_drafter_says_when_it_was_called() -> None:
    drafter = NotingDrafter("n", 10)
    step = Step(PROTOCOL_VERSION, "t", 7, 0.1, [Commit("s", 0, 3, [1, 2, 3], 2)], [])
    first, second = drafter.step(step), drafter.step(step)
    assert float(first.source) + first.work_s <= float(second.source)
    assert (first.number, len(first.drafts[0].tokens)) == (7, 2)


def test_a_computing_drafter_asks_between_pieces_and_never_ends() -> None:
    asked = iter([False, False, True])
    assert ComputingDrafter("c", 10).idle(1e9, lambda: next(asked))
    assert next(asked, None) is None


@pytest.fixture
def two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(channel, "MESSAGES", 3)
    return setting(tmp_path, Cores.split(os.sched_getaffinity(0)), 1)


@pytest.mark.parametrize("mode", ["computing, Unix", "computing, ZeroMQ"])
def test_hops_over_the_real_channel(two_cores: Setting, mode: str) -> None:
    answer = channel.one_mode(two_cores, mode)
    assert len(answer["hops"]) + answer["missed"] == 3
    for hop in answer["hops"]:
        assert all(value > 0 for value in hop.values())
        assert hop["post"] < hop["round_trip"]


@pytest.mark.parametrize("kind", ["unix", "ipc", "curve"])
def test_bare_round_trips(two_cores: Setting, kind: str) -> None:
    times = channel.bare(two_cores, kind)
    assert len(times) == 3
    assert all(value > 0 for value in times)


PROGRAM = """
from scripts.profile_lib.commands import serve, told
class Program:
    def add(self, a, b):
        print("noise")
        return {"sum": a + b}
    def until_told(self):
        while not told():
            pass
        return {"was": "told"}
serve(Program())
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Child]:
    root = Path(channel.__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM]
    child = Child("program", command, {}, sorted(os.sched_getaffinity(0)), tmp_path / "log", root)
    yield child
    child.stop()


def test_a_child_obeys_and_reports_what_it_cannot_do(program: Child) -> None:
    assert program.ask(30, command="add", a=1, b=2) == {"sum": 3}
    with pytest.raises(ChildError, match="TypeError"):
        program.ask(30, command="add", a=1, b="x")
    program.tell(command="until_told")
    program.tell(command="add", a=2, b=2)
    assert [program.answer(30), program.answer(30)] == [{"was": "told"}, {"sum": 4}]


# --- sections, report, command line -----------------------------------------------------------------------------------


def fails(setting: Setting, tell: Tell) -> dict[str, Any]:
    tell(0.5, "half [of it]")
    raise ChildError("the kettle is cold [really]")


def interrupted(setting: Setting, tell: Tell) -> dict[str, Any]:
    raise KeyboardInterrupt


def works(setting: Setting, tell: Tell) -> dict[str, Any]:
    tell(0.0, "working")
    return {"rows": []}


def test_a_failing_section_says_why_and_the_others_go_on() -> None:
    said = io.StringIO()
    found, failed = cli.run({"a": fails, "b": works}, setting(), Console(file=said, width=200))
    assert (found, failed) == ({"b": {"rows": []}}, {"a": "the kettle is cold [really]"})
    assert "the kettle is cold [really]" in said.getvalue()


def test_an_interruption_keeps_what_is_done_and_starts_nothing_more() -> None:
    measures = {"a": works, "b": interrupted, "c": works}
    found, failed = cli.run(measures, setting(), Console(file=io.StringIO()))
    assert list(found) == ["a"]
    assert failed == {"b": "interrupted", "c": "interrupted"}


def measured() -> dict[str, dict[str, Any]]:
    """What the three sections return, with made-up times."""
    hop = figures([0.25, 0.5, 2.0])
    beside = {key: [[10.0 + n, 11.0 + n], [20.0 + n]] for n, key in enumerate(contention.KEYS)}
    cells = {cell: [[20.0 + cell.verified], [40.0 + 2 * cell.verified]] for cell in steps.plan(TWO, 0)}
    return {
        "channel": {
            "hops": {mode: dict.fromkeys(HOPS, hop) for mode in channel.MODES},
            "missed": dict.fromkeys(channel.MODES, 4),
            "round_trips": dict.fromkeys(channel.KINDS, hop),
        },
        "contention": {"rows": [contention.row("draft-x", 2, beside)]},
        "steps": {"rows": [steps.row(c, cells[c], cells[c.plain]) for c in cells], "uneven": 3},
    }


def test_rows_hold_figures_and_ratios() -> None:
    row = measured()["contention"]["rows"][0]
    assert row["target_alone_ms"]["median"] == 11.0
    assert row["target_slower"] == pytest.approx(median([11.5 / 10.5, 21 / 20]))
    costs = {(r["threads"], r["batch"], r["verified"]): r for r in measured()["steps"]["rows"]}
    assert costs[1, 8, 0]["ratio"] == 1.0
    assert costs[1, 8, 16]["ratio"] == pytest.approx(36 / 20)


@pytest.mark.parametrize("broken", [None, "contention"])
def test_the_command_writes_json_and_markdown(
    broken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = measured()
    for name in SECTIONS:
        given = content[name]
        monkeypatch.setitem(cli.MEASURES, name, fails if name == broken else lambda *_, given=given: given)
    monkeypatch.setattr(cli.machine, "busy_share", lambda: 0.5)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    out = tmp_path / "deep/profile.json"
    status = cli.main(["--models", str(tmp_path), "--out", str(out), "--repetitions", "2"])
    assert status == (1 if broken else 0)
    result = json.loads(out.read_text())
    assert {"commit", "machine", "versions", "cores", "failed"} <= set(result)
    assert set(SECTIONS) & set(result) == set(SECTIONS) - {broken}
    assert result["steps"] == report.rounded(content["steps"])
    page = out.with_suffix(".md").read_text()
    for part in report.parts(result):
        assert f"## {part.title}" in page
        assert all(len(row) == len(part.headings) for row in part.rows)
    assert ("**contention was not measured:** the kettle is cold" in page) == bool(broken)
    assert ("draft-x" in page) == (not broken)
    assert "| 1 | 8 | 1.00x |" in page
    assert "4 unanswered" in page
    assert "other programs keep 50%" in capsys.readouterr().out


def test_an_interrupted_command_says_so_in_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.MEASURES, "channel", interrupted)
    monkeypatch.setattr(cli.machine, "busy_share", lambda: 0.0)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    assert cli.main(["--only", "channel", "--out", str(tmp_path / "p.json")]) == 130
    assert json.loads((tmp_path / "p.json").read_text())["failed"] == {"channel": "interrupted"}
