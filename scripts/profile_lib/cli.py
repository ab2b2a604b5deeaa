"""Command line of ``scripts/profile``: runs the chosen sections one after another and writes what they found."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from scripts.bench_lib import machine
from scripts.bench_lib.cli import BUSY_SHARE
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.settings import Cores
from scripts.profile_lib import channel, contention, report, steps
from scripts.profile_lib.options import read_options
from scripts.profile_lib.section import Section, Setting

MEASURES: dict[str, Section] = {
    "channel": channel.measure,
    "contention": contention.measure,
    "steps": steps.measure,
}


def run(measures: Mapping[str, Section], setting: Setting, console: Console) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and failures, both by section. Ctrl-C ends the section it meets and leaves out those after it."""
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    # Drawn only when something is told, that is between measurements: a bar that moves by itself takes time on some core.
    columns = (TextColumn("{task.description:<10}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[doing]}"), console=console, auto_refresh=False) as progress:
        for name, measure in measures.items():
            task = progress.add_task(name, total=1.0, doing="")

            def tell(fraction: float, doing: str, task: Any = task, name: str = name) -> None:
                progress.update(task, completed=fraction, doing=doing, refresh=True)
                if not console.is_terminal:
                    console.print(f"{name}: {fraction:4.0%} {doing}", highlight=False, markup=False)

            try:
                found[name] = measure(setting, tell)
                progress.update(task, completed=1.0, doing="", refresh=True)
            except (RuntimeError, OSError, ValueError) as error:
                failed[name] = str(error)
                progress.update(task, doing="failed", refresh=True)
                console.print(f"[red]{name}:[/] {escape(str(error))}", highlight=False)
            except KeyboardInterrupt:
                remaining = list(measures)[list(measures).index(name) :]
                failed |= dict.fromkeys(remaining, "interrupted")
                console.print("[yellow]interrupted: writing what was measured[/]")
                break
    return found, failed


def main(argv: Sequence[str] | None = None) -> int:
    """0: everything was measured; 1: a section failed; 130: interrupted."""
    options = read_options(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    cores = Cores.split(os.sched_getaffinity(0))
    setting = Setting(cores, options.models, options.repetitions, ROOT / "results" / f"{options.out.stem}-logs")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    busy, probe = machine.busy_share(), machine.probe_ms()
    if busy > BUSY_SHARE:
        console.print(f"[yellow]other programs keep {busy:.0%} of this machine busy: the figures will say little[/]")
    found, failed = run({name: MEASURES[name] for name in options.sections}, setting, console)
    result: dict[str, Any] = {
        "commit": machine.commit(ROOT),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "cores": asdict(cores),
        "repetitions": options.repetitions,
        "seconds": round(time.monotonic() - started, 1),
        "other_load": {"before": busy, "after": machine.busy_share()},
        "speed_probe_ms": {"before": probe, "after": machine.probe_ms()},
        "failed": failed,
        **found,
    }
    for part in report.parts(result):
        console.print(report.table(part))
    page = report.write(result, options.out)
    console.print(f"written: {options.out}, {page}", soft_wrap=True)
    if "interrupted" in failed.values():
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
