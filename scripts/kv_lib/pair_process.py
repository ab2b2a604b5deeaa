"""Starts :mod:`scripts.kv_lib.pair` with the environment that vLLM and OpenMP read when they are loaded."""

import argparse
import os
import subprocess
import sys

from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.settings import Cores, engine_environment
from scripts.kv_lib.problem import Problem


def run_pair(given: argparse.Namespace) -> int:
    """Run it to its end; its exit status. Raises Problem when a model is not there."""
    for folder in (given.target, *given.drafts):
        if not (folder / "chain.json").is_file():
            raise Problem(f"{folder} is no prepared model: scripts/prepare_models makes it")
    command = [sys.executable, "-m", "scripts.kv_lib.pair"]
    for name in ("target", "prompts", "tokens", "long", "repetitions", "out"):
        value = getattr(given, name)
        command += [] if value is None else [f"--{name}", str(value)]
    command += ["--drafts", *map(str, given.drafts)]
    environment = {**os.environ, **engine_environment(Cores.split(os.sched_getaffinity(0)).all)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
