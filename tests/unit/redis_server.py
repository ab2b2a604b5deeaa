"""A real Redis server for tests: the one on PATH, CHAIN_REDIS_SERVER's, or Debian's package unpacked without root."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PACKAGES = ("redis-server", "redis-tools", "liblzf1", "libjemalloc2", "libatomic1")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "chain-of-draft" / "redis-server"
PASSWORD = "not-a-secret"


@cache
def find() -> tuple[str, dict[str, str]]:
    """The program and what it needs in its environment.

    Raises:
        RuntimeError: why there is none.
    """
    for candidate in (os.environ.get("CHAIN_REDIS_SERVER"), shutil.which("redis-server")):
        if candidate:
            return candidate, {}
    program = CACHE / "usr/bin/redis-server"
    if not program.exists():
        _unpack()
    return str(program), {"LD_LIBRARY_PATH": f"{CACHE}/usr/lib/x86_64-linux-gnu:{CACHE}/lib/x86_64-linux-gnu"}


def _unpack() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise RuntimeError("no redis-server on PATH, CHAIN_REDIS_SERVER is not set, and this is no Debian system")
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        (own / "lists" / "partial").mkdir(parents=True)
        (own / "cache" / "archives" / "partial").mkdir(parents=True)
        lists = [f"-oDir::State::Lists={own}/lists", f"-oDir::Cache={own}/cache"]
        try:
            for options in ([], lists):
                if options:  # the system's package lists are empty: take our own
                    _apt([*options, "update"], own)
                if _apt([*options, "download", *PACKAGES], own) == 0:
                    break
            packages = list(own.glob("*.deb"))
            if len(packages) < len(PACKAGES):
                raise RuntimeError("no redis-server on PATH, and Debian's package cannot be downloaded")
            for package in packages:
                subprocess.run(["dpkg", "-x", str(package), str(own / "root")], check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"no redis-server on PATH, and Debian's package cannot be unpacked: {error}") from None
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(own / "root", CACHE, symlinks=True, dirs_exist_ok=True)


def _apt(arguments: list[str], folder: Path) -> int:
    return subprocess.run(["apt-get", "-qq", *arguments], cwd=folder, capture_output=True, timeout=180).returncode


@contextmanager
def running(*options: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server on a Unix socket of its own, with a password; its URL and process.

    Raises:
        RuntimeError: why there is none.
    """
    program, environment = find()
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = f"{folder}/redis.sock"
        process = subprocess.Popen(
            [
                program,
                "--port",
                "0",
                "--unixsocket",
                socket,
                "--requirepass",
                PASSWORD,
                "--save",
                "",
                "--dir",
                folder,
                *options,
            ],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until = time.monotonic() + 10
            while not Path(socket).exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{program} does not start")
                time.sleep(0.02)
            yield f"unix://:{PASSWORD}@{socket}", process
        finally:
            process.kill()
            process.wait()
