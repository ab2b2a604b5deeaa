"""A process of our own in which validators run that may hang or crash: killed when they do, and started anew."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from deployments.chain.faults import FaultPolicy
from deployments.evidence.validators.base import ParameterError, Tag, unknown
from deployments.evidence.validators.frames import Failed, Hello, Ready, receive, send
from deployments.evidence.validators.jobs import Job

MODULE = "deployments.evidence.validators.process_main"
REPOSITORY = Path(__file__).resolve().parents[3]
SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN", "REDIS")  # parts of variable names that validators need not see


class ValidatorProcess:
    """One process, used by one thread at a time. It starts with the first job (or :meth:`start`) and after each kill."""

    def __init__(self, configured: Mapping[str, Mapping[str, Any]], faults: FaultPolicy, memory_mib: int) -> None:
        self._configured = {name: dict(spec) for name, spec in configured.items()}
        self._memory_mib = memory_mib
        self._faults = faults
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it and let it load the configured validators; nothing to do while it lives.

        Raises:
            ParameterError: naming the validator that cannot be loaded.
            Failed: it died or did not come up in time.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        self.starts += 1
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            cwd=REPOSITORY,  # where -m looks first
            start_new_session=True,  # Ctrl-C in a terminal ends us, and we end it
        )
        try:
            path = [entry for entry in sys.path if entry]
            send(self._in, Hello(configured=self._configured, import_path=path, memory_mib=self._memory_mib))
            answer = receive(self._out, time.monotonic() + self._faults.validator_start_s)
            error = msgspec.msgpack.decode(answer, type=Ready).error
        except Failed:
            self.kill()
            raise
        except msgspec.MsgspecError:
            self.kill()
            raise Failed("died") from None
        if error:
            self.kill()
            raise ParameterError(error)

    def run(self, job: Job) -> Tag:
        """The job's tag; unknown, and the process gone, where it took longer than it may or ended the process."""
        try:
            self.start()
        except ParameterError as error:
            return unknown(str(error), "not_loaded")
        except Failed as error:
            return unknown("the validator process does not start", error.failure)
        try:
            send(self._in, job)
            # a little longer than the job may take: the process itself has to read and answer
            answer = receive(self._out, time.monotonic() + job.limit_s)
            return msgspec.msgpack.decode(answer, type=Tag)
        except Failed as error:
            self.kill()
            why = f"took longer than {job.limit_s:g} s" if error.failure == "hung" else "ended its process"
            return unknown(f"{job.validator} {why}", error.failure)
        except msgspec.MsgspecError:
            self.kill()
            return unknown(f"{job.validator} answered something that is no tag", "lied")

    def kill(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    @property
    def _in(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def _out(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()


def _environment() -> dict[str, str]:
    """Ours, without what looks like a secret."""
    return {key: value for key, value in os.environ.items() if not any(part in key.upper() for part in SECRETS)}
