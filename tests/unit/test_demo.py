"""What the demo makes of Serve's messages and of traces."""

import copy
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from deployments.config import load_args
from deployments.demo import show
from deployments.demo.client import Answer
from deployments.demo.deploy import cause, engine_cause, set_paths


def test_cause_is_the_exceptions_own_words() -> None:
    message = (
        "A replica failed to start with exception. Retrying 2 more time(s). Error:\n\x1b[36mray::Replica()\x1b[39m\n"
        '  File "x.py", line 1, in f\nRuntimeError: inner\n\nThe above exception was ...\nValueError: no model here: x'
    )
    assert cause(message) == "no model here: x"
    assert cause("something else") == "something else"


def test_replicas_get_paths_that_need_no_file_beside_them(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"max_position_embeddings": 2048, "vocab_size": 100}')
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.onnx").touch()
    (tmp_path / "parts.csv").write_text("name,kind\nTX-20,part\n")
    for name in ("documents", "index"):
        (tmp_path / name).mkdir()
    (tmp_path / "rules.yaml").write_text("rules: []")
    parts = {"parts": {"kind": "entities", "file": "parts.csv"}, "plain": {"kind": "json_schema"}}
    evidence = {"pool": "cpu", "documents": "documents", "index": "index", "rules": "rules.yaml"}
    args: dict[str, Any] = {
        "target": {"name": "smol", "model": "target", "pool": "cpu"},
        "drafts": [{"name": "int4", "model": "draft", "pool": "cpu"}],
        "pools": {"cpu": {"cpus": 1}},
        "evidence": {**evidence, "validators": {"configured": parts}},
    }
    wanted = copy.deepcopy(args)
    wanted["target"]["model"] = str(tmp_path / "target")
    wanted["drafts"][0]["model"] = str(tmp_path / "draft")
    wanted["evidence"] |= {name: str(tmp_path / evidence[name]) for name in ("documents", "index", "rules")}
    wanted["evidence"]["validators"]["configured"]["parts"]["file"] = str(tmp_path / "parts.csv")
    set_paths(args, load_args(args, tmp_path))
    assert args == wanted


def test_engine_cause_is_read_from_the_log(tmp_path: Path) -> None:
    assert engine_cause(tmp_path) is None
    log = tmp_path / "worker-1.out"
    log.write_text("(EngineCore pid=1) ERROR 11-30 08:10:00 [core.py:1] ValueError: a request went wrong\n")
    assert engine_cause(tmp_path) is None
    log.write_text(
        "(EngineCore pid=1) ERROR 11-30 08:10:00 [core.py:1] EngineCore failed to start.\n"
        "(EngineCore pid=1) ERROR 11-30 08:10:00 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=1) ERROR 11-30 08:10:00 [core.py:1] ValueError: No memory for x\n(EngineCore pid=1) bye\n"
    )
    assert engine_cause(tmp_path) == "No memory for x"
    (tmp_path / "worker-2.out").symlink_to(tmp_path / "renamed-meanwhile")
    assert engine_cause(tmp_path) == "No memory for x"


def test_answer_is_shown_with_its_figures() -> None:
    rounds = [
        {"drafted": [], "accepted": 0, "source": "", "wait_ms": 0.0, "reason": "[odd]", "own_text": "Hi"},
        {
            "drafted": [1, 2],
            "accepted": 1,
            "source": "int4#a",
            "wait_ms": 1.0,
            "accepted_text": " a\n",
            "own_text": "b",
        },
    ]
    summary = {"accepted": 1, "drafted": 2, "acceptance": 0.5, "tokens_per_round": 1.5}
    chained = Answer("Hi a\nb", 3, 0.5, {"rounds": rounds, "summary": summary})
    console = Console(width=100, record=True, file=io.StringIO())
    show.answer(console, chained, Answer("Hi a\nb", 3, 1.0, None))
    text = console.export_text()
    assert "1 of 2 (50%)" in text
    assert "4.0 (2.00x)" in text
    assert "[odd]" in text
    assert "differ" not in text
    assert show.coloured(rounds, "").plain == "Hi a\nb"
