"""Two tensor-parallel ranks verify the same drafts: rank 0 asks, both use the answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import ROOT, model

pytestmark = pytest.mark.engine


def test_two_ranks_equal_plain(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.engine.tp_main",
            str(model("target")),
            str(tmp_path / "tiny"),
            str(model("sentences")),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    result = json.loads(lines[0].removeprefix("RESULT"))
    assert result["equal"]
    assert [len(names) for names in result["connected"]] == [1, 0]
    first, second = result["offers"]
    assert first["hidden"]["size"] == 128
    assert len(first["hidden"]["weights"]) == 64
    assert "manifest" not in first  # KV of one rank is of half the heads; its hidden states are whole
    assert not second
    assert result["hidden_positions"] > 0
    assert result["hidden_error"] < 5e-3
    stats = result["stats"][0]
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["relaxed_tokens"] == 0
    first, second = result["semantic"]
    assert first["relaxed_tokens"] > 0
    assert first["semantic_compared"] > 0
    assert "semantic_compared" not in second  # the first decides for both
    assert result["equal_after"]
