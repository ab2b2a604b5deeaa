"""scripts/select_draft from its command line to its report, with children that answer at once."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from deployments.config.models import AppConfig
from scripts.bench_lib.settings import Cores
from scripts.bench_lib.statistics import RequestFigures, Sample
from scripts.select_lib import cli, recommend, report, rows, trial
from scripts.select_lib.options import read_options
from scripts.select_lib.prompts import read_file
from scripts.select_lib.rows import Row, line
from scripts.select_lib.store import NotOurs, Store, part_key
from tests.unit.select_cases import FakeChild, draft, target, use_fakes


@pytest.fixture
def models(tmp_path: Path) -> Path:
    target(tmp_path / "target")
    for name in ("draft-good", "draft-poor"):
        draft(tmp_path / name)
    draft(tmp_path / "draft-alien", words=["x", "y"])
    return tmp_path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeChild]:
    def run(candidate: Any, mode: str, tokens: int, *_: Any) -> dict[str, Any]:
        FakeChild.asked.append((candidate.name, f"try {mode}"))
        measured = {"tokens_per_s": 130.0, "plain_per_s": 100.0, "drafted": 100, "accepted": 41, "committed": 90}
        return measured | {"steps": 49, "overhead_ms": 0.7, "without_draft": {}, "other_load": 0.01}

    monkeypatch.setattr(trial, "run", run)
    monkeypatch.setattr(cli.machine, "busy_share", lambda: 0.02)
    monkeypatch.setattr(cli.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("scripts.select_lib.drafts.time.sleep", lambda _: None)
    return use_fakes(monkeypatch, tmp_path / "results")


def arguments(models: Path, *more: str, names: tuple[str, ...] = ("good", "poor")) -> list[str]:
    drafts = [part for name in names for part in ("--draft", str(models / f"draft-{name}"))]
    return [
        *("--target", str(models / "target"), *drafts, "--count", "2", "--tokens", "16", "--repetitions", "1"),
        *("--out", str(models / "out.json"), *more),
    ]


def test_a_run_its_report_and_the_same_again(models: Path, fake: type[FakeChild], monkeypatch: Any) -> None:
    argv = arguments(models, names=("good", "poor", "alien"))
    assert cli.main(argv) == 0
    content = json.loads((models / "out.json").read_text())
    assert [row["name"] for row in content["rows"]] == ["draft-good", "draft-poor", "suffix"]
    assert content["complete"] is True
    (refused,) = content["refused"]
    assert "id 0 is '<end>' in the target and 'x' in the draft" in refused
    good, poor, suffix = content["rows"]
    assert good["acceptance"]["greedy"]["by_position"][:4] == [1.0, 1.0, 1.0, 0.0]
    assert poor["acceptance"]["greedy"]["by_position"][1] == 0.0
    assert suffix["acceptance"]["greedy"]["by_position"] == [None] * 8
    assert good["plain_per_s"] == {"1": 100.0, "4": 400.0, "8": 800.0}
    tried = [row["name"] for row in content["rows"] if row["trials"]]
    assert "draft-good" in tried
    assert len(tried) == 2

    page = (models / "out.md").read_text()
    assert "| draft-good |" in page
    assert "The machine was quiet: other programs took at most 2%" in page
    assert "MORE THAN 2 POINTS" in page  # 0.41 counted, nothing like it measured
    assert content["config"].rstrip() in page
    assert (models / "out.png").stat().st_size > 1000

    fake.asked.clear()
    monkeypatch.setattr(cli.plot, "write_plot", lambda *_: None)  # takes longest
    assert cli.main(argv) == 0
    assert fake.asked == []  # nothing was missing
    assert json.loads((models / "out.json").read_text())["rows"] == content["rows"]

    draft(models / "draft-new")
    assert cli.main(arguments(models, names=("good", "new"))) == 0
    assert {name for name, _ in fake.asked} == {"target", "draft-new"}  # the target only to be beside it
    assert {command for name, command in fake.asked if name == "target"} == {"load", "time_steps"}


def test_what_was_measured_before_a_failure_is_kept(
    models: Path, fake: type[FakeChild], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(cli.plot, "write_plot", lambda *_: None)
    fake.fails_at = "time_reading"
    assert cli.main(arguments(models, "--verify", "0")) == 1
    assert "draft-good is gone" in capsys.readouterr().out.replace("\n", " ")
    done = list(json.loads((models / "out.json").read_text())["parts"])
    assert [key.rsplit("-", 1)[0] for key in done] == ["steps", "follow-draft-good"]
    fake.asked.clear()
    fake.fails_at = ""
    assert cli.main(arguments(models, "--verify", "0")) == 0
    assert ("draft-good", "follow") not in fake.asked
    assert ("target", "answer") not in fake.asked
    assert ("draft-poor", "follow") in fake.asked


def test_an_interrupted_run_reports_what_it_has(models: Path, fake: type[FakeChild], monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "run", interrupted)
    monkeypatch.setattr(cli.plot, "write_plot", lambda *_: None)
    assert cli.main(arguments(models)) == 130
    content = json.loads((models / "out.json").read_text())
    assert content["complete"] is False
    assert len(content["rows"]) == 3


def test_another_file_is_left_alone(models: Path, fake: type[FakeChild]) -> None:
    (models / "out.json").write_text('{"format": 1}')
    assert cli.main(arguments(models)) == 2
    assert (models / "out.json").read_text() == '{"format": 1}'
    with pytest.raises(NotOurs, match="choose another --out, or --fresh"):
        Store.open(models / "out.json")
    assert Store.open(models / "out.json", fresh=True).parts == {}


def test_parts_are_named_by_what_they_depend_on(tmp_path: Path) -> None:
    assert part_key("steps", a=1, b=2) == part_key("steps", b=2, a=1)
    assert part_key("steps", a=1) != part_key("steps", a=2)
    store = Store(tmp_path / "s.json")
    store.keep("one", {"x": [1, 2]})
    store.save(title="t")
    assert Store.open(tmp_path / "s.json").parts == {"one": {"x": [1, 2]}}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "poetry"], "there is no 'poetry'"),
        (["--batches", "4"], "1 must be among them"),
        (["--batches", "1,64"], "none above 8"),
        (["--tokens", "4"], "16 to 512"),
        (["--out", "x.md"], "names the JSON file"),
        (["--prompts", "missing.jsonl"], "cannot be read"),
        (["--verify", "-1"], "--verify at 0"),
    ],
)
def test_what_cannot_be_is_a_sentence(models: Path, more: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options([*arguments(models), *more])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_one_candidate_that_cannot_draft_ends_the_run(models: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        read_options(arguments(models, names=("alien",)))
    assert "another tokenizer" in capsys.readouterr().err


def test_own_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "One?"}\n\n{"id": "b", "set": "s", "messages": [{"role": "user", "content": "Two?"}]}\n'
    )
    one, two = read_file(file)
    assert (one.id, one.set, one.messages[0]["content"]) == ("mine.jsonl:1", "file", "One?")
    assert (two.id, two.set) == ("b", "s")
    plain = tmp_path / "mine.txt"
    plain.write_text("First question\nSecond question\n")
    assert [prompt.messages[0]["content"] for prompt in read_file(plain)] == ["First question", "Second question"]
    for wrong in ('{"messages": []}', "[1]", "no json", '{"messages": [{"role": "user"}]}'):
        file.write_text(f'{{"prompt": "One?"}}\n{wrong}\n')
        with pytest.raises(ValueError, match=r"mine\.jsonl:2"):
            read_file(file)


def found(models: Path, fake: type[FakeChild]) -> list[Row]:
    options = read_options(arguments(models, "--verify", "0"))
    run = cli.Run(options, Store(models / "out.json"), Console(file=io.StringIO()))
    run()
    return run.rows


def test_the_lines_to_paste_are_a_config(models: Path, fake: type[FakeChild]) -> None:
    good, poor, suffix = found(models, fake)
    base = {"target": {"name": "t", "model": "m", "pool": "cpu"}, "pools": {"cpu": {"cpus": 1}}}
    choice = recommend.choose([good, poor, suffix])
    assert choice.row is good
    for row, mode in ((good, trial.OVERLAPPED), (poor, trial.SYNCHRONOUS), (suffix, ""), (None, "")):
        lines = recommend.config_lines(recommend.Choice(row, mode, 3, 1.5), "cpu")
        config = AppConfig.model_validate({**base, **yaml.safe_load(lines)})
        assert bool(config.drafts) is (row in (good, poor))
        if config.drafts:
            assert config.drafts[0].predraft is (mode == trial.OVERLAPPED)
            assert config.drafts[0].tokens == 3
    assert recommend.config_lines(recommend.Choice(None), "cpu").endswith("{enabled: false}\n")
    assert "No candidate is faster" in recommend.sentence(recommend.choose([suffix]))


def test_a_measured_loss_is_no_recommendation(models: Path, fake: type[FakeChild]) -> None:
    good, poor, _ = found(models, fake)
    slow = {"tokens_per_s": 90.0, "plain_per_s": 100.0, "drafted": 10, "accepted": 6}
    good.trials.append(good.trial(trial.SYNCHRONOUS, 2, slow))
    assert recommend.choose([good, poor]).row is None
    poor.trials.append(poor.trial(trial.SYNCHRONOUS, 1, slow | {"tokens_per_s": 101.0}))
    assert recommend.choose([good, poor]).row is poor


def test_acceptance_that_is_counted_is_compared_with_what_was_measured(models: Path, fake: type[FakeChild]) -> None:
    good = found(models, fake)[0]
    own = good.rounds("greedy", 3).acceptance
    assert own is not None
    counted = {"tokens_per_s": 1.0, "plain_per_s": 1.0, "drafted": 1000, "by_request": [[50, 100]] * 10}
    same = good.trial(trial.OVERLAPPED, 3, counted | {"accepted": round(1000 * own - 15)})
    assert same.agrees
    assert "-1.5 points, within 2 points" in report.trial_words(good, same)
    other = good.trial(trial.OVERLAPPED, 3, counted | {"accepted": round(1000 * own - 25)})
    assert not other.agrees
    assert "-2.5 points, MORE THAN 2 POINTS: do not trust" in report.trial_words(good, other)
    scattered = replace(other, measured={**other.measured, "by_request": [[90, 100], [10, 100]]})
    assert not scattered.agrees
    assert "though no more than so few answers scatter" in report.trial_words(good, scattered)


def test_low_acceptance_says_what_the_measured_costs_make_of_it(models: Path, fake: type[FakeChild]) -> None:
    good, poor, suffix = found(models, fake)
    assert not any("0.75" in text for text in good.warnings)
    wrong_first = [{**trail, "right": "0010010010"[: len(trail["right"])]} for trail in poor.follow["greedy"]]
    poor = replace(poor, follow={**poor.follow, "greedy": wrong_first})
    (text,) = [text for text in cli.rules.of_measurements(poor, poor.answers.sets) if "0.75" in text]
    cost, _ = poor.affordable()
    assert f"{cost / 10.0:.2f} of a target's step" in text or "whatever it costs" in text
    assert not any("0.75" in text for text in suffix.warnings)


def test_a_domain_that_a_draft_does_not_know_is_named(models: Path, fake: type[FakeChild]) -> None:
    good = found(models, fake)[0]
    sets = ["prose", "code"]
    good.answers.sets = sets
    known, unknown = good.follow["greedy"]
    good = replace(good, follow={**good.follow, "greedy": [known, {**unknown, "right": "0" * len(unknown["right"])}]})
    assert any("on code its acceptance is 0.00" in text for text in cli.rules.of_measurements(good, sets))


def test_figures_of_a_trial() -> None:
    cell, system = trial.Cell("s", 1, 0.0, "eos", 16), trial.OFF

    def sample(seconds: float, accepted: int) -> Sample:
        stats = {
            "drafted_tokens": 20.0,
            "accepted_tokens": float(accepted),
            "miss:deadline_missed": 1.0,
            "miss:empty": 0.0,
        }
        return Sample(cell, system, 0, seconds, (RequestFigures(40),), (0.5, 0.7), None, None, stats)

    found = trial.figures([sample(1.0, 12), sample(2.0, 10), sample(4.0, 14)], [sample(2.5, 0)])
    assert (found["tokens_per_s"], found["plain_per_s"]) == (20.0, 16.0)
    assert (found["drafted"], found["accepted"], found["committed"], found["steps"]) == (60, 36, 120, 84)
    assert found["without_draft"] == {"miss:deadline_missed": 3}


def test_the_engine_of_a_trial_verifies_whole_drafts_of_one_source(models: Path) -> None:
    options = read_options(arguments(models))
    cores = Cores.split({0, 1})
    good, _, suffix = options.candidates
    engine = trial.engine_of(good, trial.SYNCHRONOUS, 3, options, cores)
    config = engine.arguments["additional_config"]
    assert engine.draft == "sync"
    assert engine.arguments["speculative_config"]["num_speculative_tokens"] == 3
    assert (config["chain_adaptive"], config["chain_sources"], config["chain_model_tokens"]) == (False, [], 3)
    looked_up = trial.engine_of(suffix, trial.WITHOUT_MODEL, 5, options, cores)
    assert (looked_up.draft, looked_up.arguments["additional_config"]["chain_sources"]) == ("none", ["suffix"])


def test_a_line_through_call_times() -> None:
    assert line([(1, 3.0), (4, 6.0), (8, 10.0)]) == pytest.approx((2.0, 1.0))
    assert line([(1, 5.0), (4, 4.0)])[1] == 0.0  # noise makes no row cheaper than nothing
    assert line([(1, 5.0)]) == (5.0, 0.0)
    assert rows.LENGTHS[-1] == 8
