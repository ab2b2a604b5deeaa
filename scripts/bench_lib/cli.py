"""Command line of ``scripts/bench``: options to backends, measurements to a report."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.bench_lib import chart, machine, report, settings
from scripts.bench_lib.backend import Backend
from scripts.bench_lib.cells import plan_cells
from scripts.bench_lib.engine import ROOT, EngineBackend
from scripts.bench_lib.http_backend import HttpBackend
from scripts.bench_lib.options import Options, read_options
from scripts.bench_lib.prompts import WARMUP_SET, in_turn, load_prompts
from scripts.bench_lib.served import ServedBackend, served_config
from scripts.bench_lib.session import Measured, Session, unmeasured_text
from scripts.bench_lib.shipped import base_config
from scripts.bench_lib.transition import plan_transition, summarise_transition, transition_system

BUSY_SHARE = 0.1  # of all cores, by others, above which a warning is due


def backends(options: Options, cores: settings.Cores, logs: Path) -> dict[str, Backend]:
    """One for each process or URL that the chosen systems need."""
    found: dict[str, Backend] = {}
    bounds = settings.ChainBounds(max(options.tokens), options.model_tokens, options.max_batch)
    for system in options.systems:
        if system.engine in found:
            continue
        if system.via == "http" and options.urls[system.name]:
            found[system.engine] = HttpBackend(system.engine, options.urls[system.name])
        elif system.via == "http":
            config = served_config(
                "plain" if system.name == "plain" else "chain",
                base_config(),
                target=options.target,
                draft=options.draft,
                cores=cores,
                mode=options.mode,
                bounds=bounds,
            )
            found[system.engine] = ServedBackend(system.engine, config, logs)
        else:
            engine = settings.engine_settings(system.engine, options.target, cores, options.mode, bounds)
            found[system.engine] = EngineBackend(engine, cores, options.draft, logs)
    return found


def notes(options: Options, cores: settings.Cores) -> list[str]:
    """What a reader must know to judge the figures."""
    return [
        f"Plain, ngram and suffix on all cores ({len(cores.all)}): {options.mode}. Plain on the target's cores "
        f"({len(cores.target)}) and the chain's target: eager. The chain's target has all cores and gives the last one up "
        f"while its draft works. At most {max(options.tokens)} draft tokens a round, {options.model_tokens} of the draft "
        f"model, which drafts for at most {options.max_batch or 'any number of'} sequences at once.",
        "Tokens per second are completion tokens over the time in which the engine answered, prompts included. "
        f"Length: {options.length} tokens forced; eos: at most {options.eos_length}.",
        f"{options.repetitions} repetitions, interleaved cell by cell, idle engines frozen. Median, min-max; ratios are "
        "ratios of medians. Accepted: share of drafted tokens, pooled and as the mean over requests.",
        "Each repetition has other prompts as far as the sets reach (40 each); the suffix modes' memory of earlier answers "
        "and the prefix cache are emptied before every cell; warm-up has prompts of its own.",
        "The drafts of wrong_draft and always_the draft alone, without the chain's suffix source.",
        "Over HTTP, servers that the benchmark starts run one after another, not interleaved with the rest.",
        f"ngram: {settings.NGRAM}; suffix: vLLM's default values. Temperature 1 without seeds.",
    ]


def phases(found: Mapping[str, Backend]) -> list[dict[str, Backend]]:
    """What runs side by side: everything that can be frozen or is somebody else's, then each server of ours alone."""
    together = {name: backend for name, backend in found.items() if not isinstance(backend, ServedBackend)}
    alone: list[dict[str, Backend]] = [{name: own} for name, own in found.items() if isinstance(own, ServedBackend)]
    return ([together] if together else []) + alone


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    cores = settings.Cores.split(os.sched_getaffinity(0))
    logs = ROOT / "results" / f"{options.out.stem}-logs"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    busy, probe = machine.busy_share(), machine.probe_ms()
    if busy > BUSY_SHARE:
        console.print(f"[yellow]other programs keep {busy:.0%} of this machine busy: the figures will say little[/]")
    cells = plan_cells(
        options.sets, options.batches, options.temperatures, options.until, options.length, options.eos_length
    )
    console.print(f"{len(cells)} cells x {len(options.systems)} systems x {options.repetitions} repetitions")
    measured = Measured()
    try:
        prompts = {name: load_prompts(name) for name in options.sets}
        mixed = in_turn(list(prompts.values()))
        transition = plan_transition(mixed, options.temperatures[0]) if options.transition else []
    except ValueError as error:
        console.print(f"[red]{error}[/]")
        return 2
    ends_at = None if options.budget_minutes is None else started + 60.0 * options.budget_minutes
    for group in phases(backends(options, cores, logs)):
        if not measured.interrupted:
            systems = [system for system in options.systems if system.engine in group]
            session = Session(
                systems,
                group,
                prompts,
                load_prompts(WARMUP_SET),
                console,
                options.prompts,
                measured,
                transition=transition if transition_system(systems) else (),
                ends_at=ends_at,
            )
            session.run(cells, options.repetitions, options.start_together)
    if not measured.samples and not measured.transition:
        console.print("[red]nothing was measured[/]")
        return 130 if measured.interrupted else 1
    more: dict[str, Any] = {}
    if options.transition:
        more["transition"] = summarise_transition(measured.transition)
    if options.budget_minutes is not None:
        more["budget"] = {"minutes": options.budget_minutes, "left_out": unmeasured_text(measured.unmeasured)}
    result = report.build(
        measured.samples,
        ROOT,
        quick=options.quick,
        interrupted=measured.interrupted,
        seconds=round(time.monotonic() - started, 1),
        systems=[system.key.split("@")[0] for system in options.systems],
        left_out=measured.left_out,
        other_load={"before": busy, "after": machine.busy_share()},
        speed_probe_ms={"before": probe, "after": machine.probe_ms()},
        start_seconds=measured.start_seconds,
        notes=notes(options, cores) + unmeasured_text(measured.unmeasured),
        **more,
    )
    _show(console, result, options.out)
    return 130 if measured.interrupted else 0


def _show(console: Console, result: dict[str, Any], out: Path) -> None:
    for title, rows in report.cells(result):
        console.print(report.table(title, rows))
    if result.get("transition"):
        console.print(report.phase_table(result["transition"]))
    for sentence in result.get("budget", {}).get("left_out", []):
        console.print(f"[yellow]{sentence}[/]")
    written = [out, report.write(result, out)]
    try:
        written += chart.write_charts(result, out)
    except ImportError as error:
        console.print(f"no charts: {error}; scripts/setup installs what they need", markup=False)
    overhead = result["round_overhead_ms"]
    if overhead["p50"] is not None:
        console.print(f"round overhead p50 {overhead['p50']:.2f} ms, p99 {overhead['p99']:.2f} ms")
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
