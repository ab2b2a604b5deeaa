"""The embedded application for a run of its own, and the processor time of its target."""

import os
from pathlib import Path

from scripts.bench_lib.served import ServedBackend
from scripts.bench_lib.shipped import base_config

TICKS = os.sysconf("SC_CLK_TCK")
TARGET = "Target:"  # in the title of its replica; the engine's process descends from that


class Application(ServedBackend):
    """``ray_config.yaml`` on a free port."""

    def __init__(self, folder: Path) -> None:
        super().__init__("answers", base_config(), folder)

    def start_serving(self) -> None:
        """Raises RuntimeError where it does not start."""
        self.start([], [], [])

    @property
    def url(self) -> str:
        return self._url

    def target_processes(self) -> list[int]:
        """The target's replica and all that descends from it."""
        assert self._process is not None
        children: dict[int, list[int]] = {}
        titles: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
                except (OSError, IndexError, ValueError):
                    continue  # it ended
                children.setdefault(parent, []).append(int(entry.name))
        ours = _descendants(self._process.pid, children)
        return sorted({found for pid in ours if TARGET in titles[pid] for found in [pid, *_descendants(pid, children)]})


def cpu_seconds(processes: list[int]) -> float:
    """Processor time they have used so far; what ended counts no more."""
    ticks = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            continue
    return ticks / TICKS


def _descendants(root: int, children: dict[int, list[int]]) -> list[int]:
    found, rest = [], list(children.get(root, ()))
    while rest:
        process = rest.pop()
        found.append(process)
        rest += children.get(process, ())
    return found
