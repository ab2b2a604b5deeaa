"""Run the child for one provider and read what it says, whatever becomes of it."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
MOST_LINE_BYTES = 1 << 20
LAST_CHARACTERS = 300  # shown of a line
LAST_BYTES = 16 * 1024  # of what a process printed before it crashed
FATAL = "Fatal Python error:"  # begins the stack that PYTHONFAULTHANDLER=1 prints after a process's own last words

Tell = Callable[[float, str], None]


def ask(
    provider: str,
    folders: Sequence[Path],
    tokens: int,
    limit_s: float,
    tell: Tell,
    command: Sequence[str] = (sys.executable, "-m", "scripts.hw_lib.child"),
) -> dict[str, Any]:
    """The provider's row. ``status`` is the child's, or ``crashed`` or ``late`` with a ``reason``."""
    drafts = [part for folder in folders for part in ("--draft", str(folder))]
    arguments = [*command, "--provider", provider, "--tokens", str(tokens), *drafts]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # one thread, as a draft has
    row: dict[str, Any] | None = None
    late = threading.Event()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            assert child.stdout is not None
            while line := child.stdout.readline(MOST_LINE_BYTES):
                try:
                    said = msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError:
                    continue
                if "row" in said:
                    row = said["row"]
                else:
                    tell(float(said.get("at", 0.0)), str(said.get("doing", "")))
            code = child.wait()
        finally:
            timer.cancel()
            child.kill()
            child.wait()
        if row is not None:
            return row
        if late.is_set():
            return {"name": provider, "status": "late", "reason": f"no result in {limit_s:g} s"}
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_BYTES))
        last = errors.read().decode(errors="replace").split(FATAL)[0].strip().splitlines()
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {
        "name": provider,
        "status": "crashed",
        "reason": f"{ended}: {last[-1][-LAST_CHARACTERS:] if last else 'without a word'}",
    }
