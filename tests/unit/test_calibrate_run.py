"""Options, what is measured in which order, and what a second run finds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deployments.chain.acceptance.policy import policy_of
from scripts.bench_lib import settings as engines
from scripts.bench_lib.backend import chain_field
from scripts.bench_lib.cells import System
from scripts.bench_lib.engine import draft_command
from scripts.calibrate_lib import speed
from scripts.calibrate_lib.answers import Answer, Pair
from scripts.calibrate_lib.floors import Floor
from scripts.calibrate_lib.item_sets import load_items
from scripts.calibrate_lib.knobs import REFERENCES, Setting, distinct, of_presets, parse_knob, sweep
from scripts.calibrate_lib.options import read_options
from scripts.calibrate_lib.quality import Sampling, likeness, measure, pairs_of, tasks
from scripts.calibrate_lib.rows import recommendations, rows
from scripts.calibrate_lib.speed import Plan, SpeedFigures, missing, order, ratio
from scripts.calibrate_lib.store import Cell, OtherConditions, Round, Speed, Store, cell_key

SAMPLING = Sampling(temperature=0.0, batch=2, tokens=4, top_k=8, dtype="float32")
CONDITIONS = {"target": "t1", "draft": "d1"}
SETTINGS = sweep("nkl", [0.1, 0.01], {})


class Echo:
    """A pair of models that answers at once: what the policy lets pass is in the text."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.scored = 0

    def answer(self, items: Sequence[Any], setting: Setting) -> list[Answer]:
        self.asked.append((items[0].set, setting.name))
        word = f"{setting.value:g}" if setting.lossy and setting.value > 0.05 else "own"
        return [
            Answer(id=i.id, tokens=list(word.encode()), text=word, finish="stop", steps=1, drafted=2, accepted=1)
            for i in items
        ]

    def score(self, items: Sequence[Any], answers: Sequence[Answer]) -> list[float]:
        self.scored += len(answers)
        return [float(answer.tokens[0]) for answer in answers]


class Alike:
    def embed(self, texts: Sequence[str]) -> Any:
        return np.eye(4, dtype=np.float32)[[len(text) % 4 for text in texts]]


def items() -> dict[str, Any]:
    return {name: load_items(name, 16, 3) for name in ("arithmetic", "prose")}


def run(store: Store, most: int | None = None, settings: Sequence[Setting] = SETTINGS) -> Echo:
    echo = Echo()
    for task in tasks(settings, items(), SAMPLING, store)[:most]:
        store.cells[task.key] = measure(task, echo, store, SAMPLING, Alike(), "c")  # type: ignore[arg-type]
        store.save()
    return echo


# --- cells and resuming -----------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    first = run(Store.open(path, CONDITIONS), most=3)
    assert first.asked == [("arithmetic", "lossless"), ("arithmetic", "plain"), ("arithmetic", SETTINGS[0].name)]
    second = run(Store.open(path, CONDITIONS))
    assert not set(first.asked) & set(second.asked)
    assert len(first.asked) + len(second.asked) == 2 * 4
    assert run(Store.open(path, CONDITIONS)).asked == []
    assert len(run(Store.open(path, CONDITIONS, fresh=True)).asked) == 8


def test_a_run_in_pieces_is_the_run_in_one(tmp_path: Path) -> None:
    pieces, whole = tmp_path / "a.json", tmp_path / "b.json"
    for most in (1, 2, None):
        run(Store.open(pieces, CONDITIONS), most)
    run(Store.open(whole, CONDITIONS))
    one, other = (json.loads(path.read_text()) for path in (pieces, whole))
    for content in (one, other):
        for cell in content["cells"].values():
            cell.pop("seconds", None)
    assert one == other


def test_another_setting_is_added_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run(Store.open(path, CONDITIONS))
    more = run(Store.open(path, CONDITIONS), settings=[*SETTINGS, *sweep("nkl", [0.3], {})])
    assert {name for _, name in more.asked} == {"nkl δ 0.3"}
    assert {name for name, _ in more.asked} == {"arithmetic", "prose"}


def test_other_models_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run(Store.open(path, CONDITIONS))
    with pytest.raises(OtherConditions, match=r"draft d1, now d2.*--fresh"):
        Store.open(path, {**CONDITIONS, "draft": "d2"})
    assert Store.open(path, {**CONDITIONS, "draft": "d2"}, fresh=True).cells == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 99, "conditions": {}}', '{"format": 1, "conditions": null}']
)
def test_a_foreign_file_is_never_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(OtherConditions, match="another --out"):
        Store.open(path, CONDITIONS)
    assert path.read_text() == text


def test_a_cell_is_named_by_all_it_depends_on() -> None:
    sets = items()
    how = SAMPLING.as_dict()
    keys = {
        cell_key(setting, chosen, sampling)
        for setting in (*REFERENCES, *SETTINGS)
        for chosen in (*sets.values(), sets["prose"][:-1])
        for sampling in (how, {**how, "temperature": 1.0}, {**how, "tokens": 2})
    }
    assert len(keys) == 4 * 3 * 3
    renamed = Setting("other", SETTINGS[0].policy)
    assert cell_key(renamed, sets["prose"], how) == cell_key(SETTINGS[0], sets["prose"], how)


def test_only_what_differs_from_lossless_is_scored_and_compared(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run.json", CONDITIONS)
    assert run(store).scored == 3 * 2 * 2  # lossless and δ 0.1, of which the text differs; plain and δ 0.01 are equal
    pairs = pairs_of(SETTINGS[1], items(), SAMPLING, store)
    assert set(pairs) == {"arithmetic", "prose"}
    assert all(
        pair.other.nll is not None and pair.other.similarity is not None for some in pairs.values() for pair in some
    )


def test_an_answer_that_says_the_same_is_kept_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run.json", CONDITIONS)
    run(store)
    cells = {cell.setting: cell for cell in store.cells.values() if cell.set == "prose"}
    assert all(answer.same and not answer.tokens and not answer.text for answer in cells["plain"].answers)
    assert not any(answer.same for name in ("lossless", SETTINGS[1].name) for answer in cells[name].answers)
    for pair in pairs_of(REFERENCES[0], items(), SAMPLING, store)["prose"]:
        assert (pair.other.tokens, pair.other.text, pair.other.nll) == (pair.own.tokens, pair.own.text, pair.own.nll)
        assert pair.other.similarity == 1.0
        assert not pair.changed


def test_likeness_is_one_for_equal_texts_and_unknown_without_a_model() -> None:
    each = load_items("prose", 16, 2)
    own, other = (Answer(id="x", tokens=[1], text=text, finish="stop", steps=1) for text in ("a", "bb"))
    pairs = [Pair(each[0], own, own), Pair(each[1], own, other)]
    assert likeness(pairs, Alike()) == {each[0].id: 1.0, each[1].id: 0.0}
    assert likeness(pairs, None) == {}


def test_half_measured_sets_do_not_enter_the_table(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run.json", CONDITIONS)
    run(store, most=6)  # arithmetic, then prose: lossless and plain
    table = rows(SETTINGS, items(), SAMPLING, store, [])
    assert [row.setting.name for row in table] == ["plain", "lossless"]
    assert recommendations(table, Floor("changed", 0.01))[0].outcome == "unmeasured"
    assert rows(SETTINGS, items(), SAMPLING, Store.open(tmp_path / "no.json", CONDITIONS), []) == []


def test_the_file_reads_as_json_whatever_is_in_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "deep" / "run.json", CONDITIONS)
    store.save(note='"cells": {}, "rounds": []')
    assert json.loads(store.path.read_text())["cells"] == {}
    odd = Answer(id="x", tokens=[], text='"]}\n\u2028 é', finish="length", steps=0)
    store.cells["k"] = Cell(setting="s", set="t", answers=[odd])
    store.rounds.append(Round(key="r", turns=[Speed(setting="s", tokens_per_s={}, accepted=0, drafted=0, relaxed=0)]))
    store.save(a=1)
    again = Store.open(store.path, CONDITIONS)
    assert (again.cells, again.rounds) == (store.cells, store.rounds)
    assert not [path for path in store.path.parent.iterdir() if path != store.path]


# --- speed ------------------------------------------------------------------------------------------------------------

PLAN = Plan(sets=("prose", "copy"), prompts=2, length=16, rounds=3, temperature=0.0)


def turn(setting: str, **rates: float) -> Speed:
    return Speed(setting=setting, tokens_per_s=rates, accepted=3, drafted=4, relaxed=1)


def test_everyone_takes_a_turn_and_nobody_always_begins() -> None:
    settings = [*SETTINGS, *of_presets({"legal": policy_of({"name": "lossless"})})]
    begins = []
    for number in range(4):
        names = [setting.name for setting in order(settings, number)]
        assert sorted(names) == sorted(["plain", "lossless", *(setting.name for setting in SETTINGS)])
        begins.append(names[0])
    assert len(set(begins)) > 1


def test_ratios_are_paired() -> None:
    """A machine that becomes four times slower between two rounds changes no ratio."""
    rounds = [
        Round(
            key="k", turns=[turn("lossless", prose=rate, copy=2 * rate), turn("x", prose=1.5 * rate, copy=3.0 * rate)]
        )
        for rate in (100.0, 25.0, 60.0)
    ]
    estimate = ratio(rounds, "x", "lossless")
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high, estimate.n) == (1.5, 1.5, 1.5, 6)
    assert ratio(rounds, "y", "lossless") is None
    found = SpeedFigures.of(rounds, "x")
    assert (found.to_plain, found.acceptance, found.relaxed) == (None, 0.75, 3)


def test_rounds_are_only_taken_together_with_the_same_settings(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run.json", CONDITIONS)
    models = read_options(["--quick"]).models
    key = speed.key(PLAN, SETTINGS, models)
    assert list(missing(PLAN, store, key)) == [0, 1, 2]
    store.rounds.append(Round(key=key, turns=[]))
    assert list(missing(PLAN, store, key)) == [1, 2]
    assert list(missing(PLAN, store, speed.key(PLAN, SETTINGS[:1], models))) == [0, 1, 2]


def test_rounds_have_other_prompts() -> None:
    first, second = (PLAN.prompts_of(number) for number in (0, 1))
    assert {name: len(prompts) for name, prompts in first.items()} == {"prose": 2, "copy": 2}
    assert not {p.id for some in first.values() for p in some} & {p.id for some in second.values() for p in some}


def test_the_served_draft_sends_probabilities_and_the_request_its_policy(tmp_path: Path) -> None:
    served = speed.Served(read_options(["--quick"]).models, engines.Cores.split({0, 1}), tmp_path, {})
    backend: Any = served._backend
    command = draft_command(backend._settings, tmp_path, 1)
    assert command[command.index("--top-k") + 1] == "8"
    given = SETTINGS[0].given
    field = chain_field(System("x", "all", "engine", "chain", chain_enabled=True, chain_policy=json.dumps(given)))
    assert json.loads(str(field))["policy"] == given


# --- settings and options ---------------------------------------------------------------------------------------------


def test_a_sweep_goes_from_strict_to_lax() -> None:
    assert [setting.value for setting in sweep("nkl", [0.3, 0.0, 0.1], {})] == [0.0, 0.1, 0.3]
    grid = sweep("block", [0.1], {"min_block_len": [2, 3], "mask": [0.5]})
    assert [setting.name for setting in grid] == [
        "block δ 0.1 min_block_len 2 mask 0.5",
        "block δ 0.1 min_block_len 3 mask 0.5",
    ]
    assert [setting.policy.min_block_len for setting in grid if setting.policy] == [2, 3]


def test_a_setting_says_what_a_config_would_say() -> None:
    for setting in (*sweep("block", [0.02], {"base": ["probabilistic"]}), *sweep("nkl", [1.0], {})):
        assert policy_of(setting.spec) == setting.policy


def test_what_says_the_same_is_measured_once() -> None:
    presets = of_presets({"a": policy_of({"name": "nkl", "delta": 0.1}), "b": policy_of({"name": "lossless"})})
    assert [setting.name for setting in distinct([*SETTINGS, *presets])] == [*(s.name for s in SETTINGS), "b"]
    assert REFERENCES[0].given is None
    assert sweep("nkl", [0.0], {})[0].given is None


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--policy", "magic"], "nkl, probabilistic, block"),
        (["--deltas", "0,2"], "delta"),
        (["--deltas", "x"], "--deltas takes numbers"),
        (["--knob", "min_block_len=2"], "not a parameter of nkl"),
        (["--knob", "warmth=2"], "no knob"),
        (["--policy", "block", "--knob", "base=semantic"], "cannot stand on"),
        (["--floor", "speed>2"], "no quality floor"),
        (["--sets", "poems"], "there are: arithmetic"),
        (["--items", "0"], "start at 1"),
        (["--config", "none.yaml"], "no such file"),
        (["--draft-name", "other"], "there are: int8"),
        (["--policy", ",", "--no-presets"], "nothing to measure"),
        (["--policy", "semantic", "--sentences", "nowhere"], "needs a sentence model"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(argv)
    assert why in capsys.readouterr().err


def test_the_default_measures_the_presets_too_and_can_tell_its_floor() -> None:
    options = read_options([])
    assert {"chat", "code", "extraction", "legal", "creative"} <= {setting.name for setting in options.settings}
    assert sum(len(each) for each in options.sets.values()) >= options.floor.least_answers
    assert options.report == options.out.with_suffix(".md")


def test_a_draft_without_probabilities_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load((Path(__file__).resolve().parents[2] / "ray_config.yaml").read_text())
    content["applications"][0]["args"]["drafts"][0]["top_k"] = 0
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        read_options(["--config", str(path)])
    assert "sends no probabilities" in capsys.readouterr().err


def test_knobs_keep_their_types() -> None:
    assert parse_knob("mask=0.5,1") == ("mask", [0.5, 1.0])
    assert parse_knob("min_block_len=2") == ("min_block_len", [2])
    with pytest.raises(ValueError, match="not an integer"):
        parse_knob("min_block_len=2.5")
