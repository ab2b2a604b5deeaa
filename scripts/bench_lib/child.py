"""A subprocess that talks JSON lines and can be frozen while another one is measured."""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ChildError(RuntimeError):
    """The child failed, died or did not answer; carries the end of its log."""


class Child:
    """Owns one process group. Its stderr goes to a log file, its stdout answers commands line by line.

    Freezing is SIGSTOP to the whole group: an idle engine's threads cannot spin, poll or collect garbage beside the one
    that is measured. A frozen child dies with this process too (SIGKILL through the parent-death signal).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int],
        log: Path,
        folder: Path,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                cwd=folder,
                start_new_session=True,
                preexec_fn=_bind(cores, os.getpid()),
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._buffer = b""
        self._frozen = False

    def ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        """Send one command and return its answer; raises :class:`ChildError` when there is none or it is an error."""
        self.tell(**command)
        return self.answer(timeout_s)

    def tell(self, **command: Any) -> None:
        """Send one line without waiting."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise ChildError(f"{self.name} is gone: {self.tail()}") from error

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next JSON object the child prints; other lines are skipped."""
        until = time.monotonic() + timeout_s
        while True:
            line = self._line(until)
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if not isinstance(answer, dict):
                continue
            if isinstance(answer.get("error"), str):  # a number is a counter of that name
                raise ChildError(f"{self.name}: {answer['error']}")
            return answer

    def _line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0:
                raise ChildError(f"{self.name} did not answer in time: {self.tail()}")
            if not self._selector.select(left):
                continue
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise ChildError(f"{self.name} ended with status {self._process.wait(5)}: {self.tail()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def cpu_seconds(self) -> float:
        """Processor time its main process has used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            self._signal(signal.SIGCONT)
            self._frozen = False

    def stop(self, grace_s: float = 0.5) -> None:
        """End the group: closed stdin asks politely, SIGKILL does not."""
        self.thaw()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._signal(signal.SIGKILL)  # also what it left in its group
        self._process.wait()
        self._selector.close()

    def tail(self, lines: int = 4) -> str:
        """The last lines of its log that say something."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(said[-lines:]) + f" (log: {self.log})"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _bind(cores: Sequence[int], parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # died between fork and here
            os._exit(1)
        os.sched_setaffinity(0, cores)

    return before_exec


def python(module: str, *arguments: str) -> list[str]:
    """Command line of one of our modules in this interpreter."""
    return [sys.executable, "-u", "-m", module, *arguments]
