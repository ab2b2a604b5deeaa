"""The command line from shards to a folder the draft pool loads, and what it says when it cannot."""

import json
from pathlib import Path

import pytest

from hw.onnx.checkpoint import Manifest
from hw.onnx.conditioned_weights import read_trained
from scripts.distil_lib.cli import main
from tests.unit.distil_fakes import answers, greedy, shards, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distil")
    target = tiny_target(folder)
    shards(folder / "out", target, [[*greedy(target, 8, 0), *answers(3, 5, held=True)]])
    shards(folder / "out" / "measure" / "prose", target, [answers(2, 7)])
    return folder


def run(folder: Path, step: str, *more: str) -> int:
    places = ["--target", str(folder / "target"), "--out", str(folder / "out"), "--weights", str(folder / "weights")]
    sizes = [
        "--head",
        "48",
        "--batch-tokens",
        "160",
        "--longest",
        "40",
        "--name",
        "tiny",
        "--models",
        str(folder / "models"),
    ]
    return main([step, *places, *sizes, *more])


def test_training_goes_on_and_ends_in_weights_record_and_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "train", "--steps", "3") == 0
    assert "3 held-out answers: first" in capsys.readouterr().out
    assert run(folder, "train", "--steps", "5") == 0
    assert "going on after 3 steps" in capsys.readouterr().out
    (folder / "models").mkdir()
    assert run(folder, "export", "--head-bits", "8", "--note", "A trial.") == 0
    record = json.loads((folder / "weights" / "tiny.json").read_text())
    assert record["trained"]["steps"] == 5
    assert record["data"]["answers"] == 8
    assert record["notes"] == ["A trial."]
    assert {name: entry["answers"] for name, entry in record["measured"].items()} == {
        "held-out answers of the generator": 3,
        "prompt set prose": 2,
    }
    assert record["exports"][0]["compared"]["agreement"] > 0.7
    assert [point["step"] for point in record["curve"]] == [0, 3, 5]
    assert (folder / "weights" / "tiny.png").stat().st_size > 1000
    made = Manifest.read(folder / "models" / "draft-conditioned")
    assert made.complete(folder / "models" / "draft-conditioned")
    assert made.trained == {name: value for name, value in record.items() if name != "curve"}
    assert made.target_weights == read_trained(folder / "weights" / "tiny.safetensors").target_weights


def test_other_settings_want_a_fresh_beginning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "train", "--steps", "2", "--fresh") == 0
    assert run(folder, "train", "--steps", "4", "--unroll", "4") == 1
    assert "trained with other settings (unroll): --fresh begins anew" in capsys.readouterr().out


def test_no_answers_no_checkpoint_and_no_target_are_sentences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "train", "--out", str(folder / "nothing")) == 1
    assert "has no shards: scripts/distil generate writes them" in capsys.readouterr().out
    assert run(folder, "export", "--out", str(folder / "nothing")) == 1
    assert "no checkpoint of this version" in capsys.readouterr().out
    assert run(folder, "train", "--target", str(folder / "out")) == 1
    assert "config.json is missing" in capsys.readouterr().out
