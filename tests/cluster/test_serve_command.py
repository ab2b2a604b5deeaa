"""``scripts/serve`` when it cannot start: one clear error, soon, and no process left."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments.config.load import REPOSITORY
from tests.cluster.conftest import embedded_config, wait_until

pytestmark = pytest.mark.cluster


def command(file: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "deployments.demo", "--config", str(file), *arguments]


def run(tmp_path: Path, content: Any, *arguments: str) -> tuple[str, float]:
    """Run it to its failure; returns what it said and how long it took."""
    file = tmp_path / "config.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    started = time.monotonic()
    result = subprocess.run(
        command(file, "--once", *arguments), capture_output=True, text=True, cwd=REPOSITORY, timeout=400
    )
    took = time.monotonic() - started
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert strays(tmp_path) == []
    return result.stderr, took


def strays(tmp_path: Path) -> list[str]:
    """Processes of a private Ray that this test's command started (they carry the test's folder in their environment)."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if process.environ().get("CHAIN_TEST_RUN") == str(tmp_path):
                found.append(" ".join(process.info["cmdline"] or [])[:120])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIN_TEST_RUN", str(tmp_path))  # children inherit it; this process was started without


def test_bad_yaml(tmp_path: Path) -> None:
    said, _ = run(tmp_path, "applications: [")
    assert said.count("error:") == 1
    assert "not valid YAML" in said


def test_missing_model(tmp_path: Path) -> None:
    content = embedded_config()
    content["applications"][0]["args"]["target"]["model"] = "models/nowhere"
    said, _ = run(tmp_path, content)
    assert said.count("error:") == 1
    assert "run scripts/prepare_models" in said


def test_no_such_pool(tmp_path: Path) -> None:
    content = embedded_config()
    content["applications"][0]["args"]["drafts"][0]["pool"] = "npu"
    said, _ = run(tmp_path, content)
    assert "args.drafts[0].pool: no pool 'npu'; pools: cpu" in said


def test_port_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said, _ = run(tmp_path, embedded_config(), "--port", str(port))
    assert f"port {port} on 127.0.0.1 is taken; choose another with --port N" in said


def test_pool_that_this_machine_lacks(tmp_path: Path) -> None:
    content = embedded_config()
    args = content["applications"][0]["args"]
    args["pools"]["npu"] = {"cpus": 0, "resources": {"NPU": 1}}
    args["drafts"][0]["pool"] = "npu"
    said, took = run(tmp_path, content)
    assert "pool 'npu' wants NPU 1" in said
    assert "missing" in said
    assert took < 60


def test_engine_that_cannot_start(tmp_path: Path) -> None:
    said, took = run(tmp_path, embedded_config(kv_cache_gib=0.001))
    assert said.count("error:") == 1
    assert "failed to start: No available memory for the cache blocks" in said
    assert took < 300  # an engine start and its end: under a minute on a machine that does nothing else


def test_sigterm_while_starting_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(embedded_config()))
    process = subprocess.Popen(
        command(file), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "building the application: done" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    wait_until(lambda: strays(tmp_path) == [], timeout_s=10)
