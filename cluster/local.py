"""A private Ray on this machine: its own folder and ports, ended with everything it started."""

import contextlib
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.processes import adopt_orphans, descendants, end_descendants

STOP_GRACE_S = 8.0
PREFIX = "chain-ray-"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray runs its workers at niceness 15: beside any other busy process an engine then gets next to nothing of its core
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A running private Ray."""

    address: str
    folder: Path

    @property
    def logs(self) -> Path:
        """Where Ray and Serve write their logs."""
        return self.folder / "session_latest" / "logs"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_taken(host: str, port: int) -> bool:
    """Would binding fail?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


@contextlib.contextmanager
def private_ray(
    pythonpath: Path,
    *,
    cpus: int | None = None,
    resources: dict[str, float] | None = None,
    labels: dict[str, str] | None = None,
    keep_folder: bool = False,
) -> Iterator[LocalRay]:
    """Start Ray, hand it out, and leave no process behind however the block ends.

    ``pythonpath`` is put first on the import path of every worker.
    """
    before = {process.pid for process in descendants()}
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # short: Unix socket paths are limited to 107 characters
    saved = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_ADDRESS", *SETTINGS)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pythonpath), saved["PYTHONPATH"]]))
    os.environ.update({name: value for name, value in SETTINGS.items() if saved[name] is None})
    os.environ.pop("RAY_ADDRESS", None)  # "private" must not mean somebody else's cluster
    try:
        yield _start(folder, cpus, resources, labels)
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _stop(before)
        if not keep_folder:
            shutil.rmtree(folder, ignore_errors=True)


def _start(
    folder: Path, cpus: int | None, resources: dict[str, float] | None, labels: dict[str, str] | None
) -> LocalRay:
    import ray

    context = ray.init(
        address="local",
        num_cpus=cpus,
        resources=resources,
        labels=labels,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=str(folder),
    )
    return LocalRay(str(context.address_info["gcs_address"]), folder)


def _stop(before: set[int]) -> None:
    import ray
    from ray import serve

    # Ray prints warnings about its own controller's end; they would only worry
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(Exception):
            if ray.is_initialized():
                serve.shutdown()
        with contextlib.suppress(Exception):
            ray.shutdown()
    end_descendants(before, STOP_GRACE_S)
