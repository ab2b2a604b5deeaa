"""scripts/calibrate from its command line to its report, on the real pair."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.calibrate_lib import quality
from scripts.calibrate_lib.cli import NOTHING_RECOMMENDED, main
from tests.models import ROOT, model

pytestmark = pytest.mark.engine

LAX = 0.6


def test_a_quick_run_and_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, config = tmp_path / "run.json", tmp_path / "config.yaml"
    config.write_text((ROOT / "ray_config.yaml").read_text())
    argv = [
        "--quick",
        "--sets",
        "arithmetic,prose",
        "--tokens",
        "24",
        "--batch",
        "6",
        "--processes",
        "1",
        "--out",
        str(out),
    ]
    argv += ["--target", str(model("target")), "--draft", str(model("draft-int4"))]  # INT4 disagrees often
    assert main([*argv, "--write", str(config)]) == NOTHING_RECOMMENDED  # six answers cannot tell 1 %
    assert config.read_text() == (ROOT / "ray_config.yaml").read_text()

    first = json.loads(out.read_text())
    rows: dict[str, dict[str, Any]] = {row["setting"]: row["all"] for row in first["rows"]}
    assert list(rows) == ["plain", "lossless", "nkl δ 0.002", f"nkl δ {LAX:g}"]
    assert rows["plain"]["changed"]["value"] == 0.0  # in float32, drafts change nothing
    assert rows["plain"]["acceptance"] is None
    lossless, lax = rows["lossless"], rows[f"nkl δ {LAX:g}"]
    assert lossless["relaxed"]["value"] == 0.0
    assert 0.0 < lossless["acceptance"]["value"] < lax["acceptance"]["value"] <= 1.0
    assert lossless["tokens_per_step"]["value"] > rows["plain"]["tokens_per_step"]["value"] == 1.0
    assert lax["relaxed"]["value"] > 0.0
    assert lax["changed"]["value"] > 0.0
    assert lax["score"]["n"] == 3
    for row in rows.values():
        assert 1.0 < row["perplexity"]["value"] < 20.0
    assert lax["perplexity"]["value"] != lossless["perplexity"]["value"]
    report = out.with_suffix(".md").read_text()
    assert "too few to tell" in report
    assert "scripts/calibrate --quick" in report
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["run-nkl.png", "run-trade.png"]

    def nothing(*_: Any) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(quality, "PairProcess", nothing)
    assert main(argv) == 0
    assert json.loads(out.read_text())["cells"] == first["cells"]
    assert main([*argv, "--floor", "score>=-100%"]) == 0  # another floor needs no new measurement
