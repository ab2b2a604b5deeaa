"""``scripts/kv bench``: runs the chosen sections and writes what they found."""

import argparse
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hw.kv import kernels
from hw.kv.layouts import AMX_VNNI, K_TRANSPOSED
from hw.kv.probe import probe_packing
from scripts.bench_lib import machine
from scripts.bench_lib.cli import BUSY_SHARE
from scripts.bench_lib.engine import ROOT
from scripts.kv_lib import bench_pages, bench_path, bench_report
from scripts.kv_lib.capture import manifest_of
from scripts.kv_lib.turns import Tell

_CALLS = 5  # turns of each thing within a repetition
_REPETITIONS, _QUICK_REPETITIONS = 7, 2
_QUICK_BLOCKS, _QUICK_SIZES = (16, 128), (1, 64, 512)

Measure = Callable[[Tell], Any]


def bench(given: argparse.Namespace, console: Console) -> int:
    """0: measured and written. Raises Problem."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    started = time.monotonic()
    busy, probe = machine.busy_share(), machine.probe_ms()
    if busy > BUSY_SHARE:
        console.print(f"[yellow]other programs keep {busy:.0%} of this machine busy: the figures will say little[/]")
    kernels.warm_up()
    repetitions = given.repetitions or (_QUICK_REPETITIONS if given.quick else _REPETITIONS)
    engine = None if given.quick else engine_packing(manifest_of(given.draft).geometry.head_dim)
    found = _sections(given, repetitions, engine or K_TRANSPOSED, console)
    result: dict[str, Any] = {
        "commit": machine.commit(ROOT),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "threads": 1,
        "draft": given.draft.name,
        "engine_packing": engine,
        "repetitions": repetitions,
        "calls": _CALLS,
        "seconds": round(time.monotonic() - started, 1),
        "other_load": {"before": busy, "after": machine.busy_share()},
        "speed_probe_ms": {"before": probe, "after": machine.probe_ms()},
        **found,
    }
    for part in bench_report.parts(result):
        console.print(bench_report.table(part))
    page = bench_report.write(result, given.out)
    console.print(f"written: {given.out}, {page}", soft_wrap=True, highlight=False)
    return 0


def engine_packing(head_dim: int) -> str | None:
    """How vLLM's CPU engine packs bfloat16 on this host; None where it is not installed or packs in a way nobody knows."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        packing = probe_packing(torch.bfloat16, bench_path.BLOCK_TOKENS, head_dim)
    except (ImportError, AttributeError, RuntimeError):
        return None
    return packing if packing in (K_TRANSPOSED, AMX_VNNI) else None


def _sections(given: argparse.Namespace, repetitions: int, packing: str, console: Console) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Drawn only between measurements: a bar that moves by itself takes time on some core.
    columns = (TextColumn("{task.description:<8}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[doing]}"), console=console, auto_refresh=False) as progress:

        def run(name: str, measure: Measure) -> None:
            if name not in given.only:
                return
            task = progress.add_task(name, total=1.0, doing="")
            found[name] = measure(
                lambda fraction, doing: progress.update(task, completed=fraction, doing=doing, refresh=True)
            )
            progress.update(task, completed=1.0, doing="", refresh=True)

        blocks = _QUICK_BLOCKS if given.quick else bench_pages.BLOCK_TOKENS
        geometry = manifest_of(given.draft).geometry
        run("pages", lambda tell: bench_pages.measure(geometry, given.tokens, blocks, repetitions, _CALLS, tell))
        if set(given.only) == {"pages"}:
            return found
        sizes = _QUICK_SIZES if given.quick else bench_path.SIZES
        longest = max(given.tokens, *(sizes if "sizes" in given.only else ()))
        with bench_path.Way(given.draft, longest, packing) as way:
            run("import", lambda tell: bench_path.measure_import(way, given.tokens, repetitions, _CALLS, tell))
            run("sizes", lambda tell: bench_path.measure_sizes(way, sizes, repetitions, _CALLS, tell))
            run("digests", lambda tell: bench_path.measure_digests(way, given.tokens, repetitions, _CALLS, tell))
    return found
