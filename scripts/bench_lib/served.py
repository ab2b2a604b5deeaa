"""A server of our own for the HTTP figures: ``scripts/serve``'s application from a variant of ``ray_config.yaml``."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import yaml

from scripts.bench_lib import settings
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.http_backend import HttpBackend
from scripts.bench_lib.prompts import Prompt

READY = "serving on "  # what scripts/serve prints once its demo request was answered
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


class ServedBackend(HttpBackend):
    """Starts the application, measures it, stops it. Ray cannot be frozen, so one server runs at a time."""

    def __init__(self, name: str, config: dict[str, Any], folder: Path) -> None:
        self._port = _free_port()
        super().__init__(name, f"http://127.0.0.1:{self._port}")
        self._config = config
        self._log = folder / f"{name.replace(':', '-')}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, warmup: list[Prompt], batches: list[int], temperatures: list[float]) -> float:
        started = time.perf_counter()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        config = self._log.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(self._config, sort_keys=False), encoding="utf-8")
        libc = ctypes.CDLL(None)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "deployments.demo", "--config", str(config), "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                start_new_session=True,
                # SIGTERM, not SIGKILL: the application stops the Ray it started
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        self._wait()
        super().start(warmup, batches, temperatures)
        return time.perf_counter() - started

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + START_TIMEOUT_S
        while READY not in (text := self._log.read_text(errors="replace")):
            if self._process.poll() is not None:
                said = [line for line in text.splitlines() if line.strip()][-3:]
                raise RuntimeError(f"{self.name} did not start: {' | '.join(said)} (log: {self._log})")
            if time.monotonic() > until:
                raise RuntimeError(f"{self.name} was not ready within {START_TIMEOUT_S:.0f} s (log: {self._log})")
            time.sleep(0.5)


def served_config(
    kind: Literal["plain", "chain"],
    base: dict[str, Any],
    *,
    target: Path,
    draft: Path,
    cores: settings.Cores,
    mode: settings.Mode,
    bounds: settings.ChainBounds,
) -> dict[str, Any]:
    """``ray_config.yaml`` with the benchmark's models, cores and batch; ``plain`` has no draft and every core."""
    config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(base))  # a deep copy
    args = config["applications"][0]["args"]
    args["target"] |= {"model": str(target.resolve()), "max_num_seqs": settings.MAX_BATCH}
    if kind == "plain":
        args["target"] |= {"cores": list(cores.all), "eager": mode == "eager"}
        args["drafts"] = []
        args["chain"] |= {"sources": [], "enabled": False}
        return config
    args["target"] |= {"cores": list(cores.all), "eager": True}
    args["chain"] |= {"max_batch": bounds.max_batch or None, "tokens": bounds.tokens}
    args["drafts"] = args["drafts"][:1]
    args["drafts"][0] |= {
        "model": str(draft.resolve()),
        "cores": [cores.draft],
        "slots": settings.MAX_BATCH,
        "tokens": bounds.model_tokens,
    }
    return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
