"""``scripts/hw``: a row for every provider, whatever becomes of its process; options; JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.hw_lib import report
from scripts.hw_lib.ask import ask
from scripts.hw_lib.cli import main, read_options

DRAFT = {
    "load_s": 1.0,
    "decode_ms": 12.5,
    "decode_cpu_ms": 5.0,
    "prefill_ms": 60.0,
    "prefill_cpu_ms": 120.0,
    "agreement": 0.975,
    "fallback": {"share": 0.25, "operators": ["GroupQueryAttention"]},
    "kv": {"continue_error": 0.0},
}


def asked(tmp_path: Path, source: str, limit_s: float = 60.0) -> tuple[dict[str, Any], list[tuple[float, str]]]:
    """The row that comes of a child with this source, and what it told."""
    program = tmp_path / "child.py"
    program.write_text(source)
    told: list[tuple[float, str]] = []
    row = ask("cpu", [], 4, limit_s, lambda at, doing: told.append((at, doing)), (sys.executable, str(program)))
    return row, told


def test_a_row_with_progress_and_noise_before_it(tmp_path: Path) -> None:
    row, told = asked(
        tmp_path,
        'print(\'a library speaks\')\nprint(\'{"at": 0.5, "doing": "half"}\')\nprint(\'{"row": {"name": "cpu", "status": "run"}}\')',
    )
    assert row == {"name": "cpu", "status": "run"}
    assert told == [(0.5, "half")]


@pytest.mark.parametrize("faulthandler", ["", "1"])
def test_a_crash_is_a_row_with_its_signal_and_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulthandler: str
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", faulthandler)
    row, _ = asked(
        tmp_path, "import os, sys\nprint('no driver', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 11)"
    )
    assert row == {"name": "cpu", "status": "crashed", "reason": "SIGSEGV: no driver"}
    row, _ = asked(tmp_path, "raise SystemExit(3)")
    assert row["reason"] == "exit code 3: without a word"


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    row, told = asked(tmp_path, "import time\nprint('{\"at\": 0.1}', flush=True)\ntime.sleep(600)", limit_s=2.0)
    assert row == {"name": "cpu", "status": "late", "reason": "no result in 2 s"}
    assert len(told) <= 1


def test_the_real_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hw.json"
    assert main(["--list", "--provider", "cpu", "--provider", "cuda", "--json", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["providers"]}
    assert set(rows) == {"cpu", "cuda"}
    assert (rows["cpu"]["here"], rows["cpu"]["status"]) == (True, "listed")
    if not rows["cuda"]["here"]:
        assert rows["cuda"]["status"] == "missing"
        assert "onnxruntime-gpu" in rows["cuda"]["reason"]
    assert "NVIDIA GPU" in capsys.readouterr().out


def test_a_draft_that_cannot_be_read_is_a_failed_row(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    assert main(["--provider", "cpu", "--draft", str(tmp_path), "--json", str(tmp_path / "hw.json")]) == 1
    (row,) = json.loads((tmp_path / "hw.json").read_text())["providers"]
    assert row["status"] == "failed"
    assert row["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--provider", "abacus"], "invalid choice"),
        (["--tokens", "1"], "2 to 256"),
        (["--limit", "nan"], "1 to 86400"),
        (["--list", "--draft", "x"], "runs nothing"),
        (["--draft", "nowhere"], "no model.onnx"),
        (["--list", "--json", "nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read_options(arguments)
    assert words in capsys.readouterr().err


def test_tables_show_figures_and_reasons() -> None:
    rows = [
        {"name": "cpu", "status": "run", "version": "1.2.3", "drafts": {"draft-int8": DRAFT}},
        {"name": "qnn", "status": "crashed", "reason": "SIGSEGV: [broken] driver"},
    ]
    console = Console(width=200, record=True, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(report.overview(rows))
        console.print(report.figures(rows))
    text = captured.get()
    for words in ("SIGSEGV: [broken] driver", "12.5", "97.5%", "25.0%", "draft-int8"):
        assert words in text
    assert report.figures(rows[1:]) is None
