"""Command line of ``scripts/select_draft``: measure what is missing, predict, try the best, and say which to take."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.bench_lib import machine
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.settings import Cores
from scripts.select_lib import plot, recommend, report, rules, trial
from scripts.select_lib.drafts import Tell
from scripts.select_lib.measure import Measurements
from scripts.select_lib.options import Options, read_options
from scripts.select_lib.rows import Row
from scripts.select_lib.store import NotOurs, Store, part_key


class Run:
    """One run: its rows grow as parts are measured."""

    def __init__(self, options: Options, store: Store, console: Console) -> None:
        self.rows: list[Row] = []
        self.other_load = [round(machine.busy_share(), 3)]
        self._options, self._store, self._console = options, store, console
        self._logs = ROOT / "results" / f"{options.out.stem}-logs"
        self._measurements = Measurements(options, store, Cores.split(os.sched_getaffinity(0)), self._logs)

    def __call__(self) -> None:
        """Raises ``RuntimeError`` (a process failed) and ``KeyboardInterrupt``; what was measured is kept."""
        options, measurements = self._options, self._measurements
        stages = 2 + len(options.candidates) + options.verify
        with self._progress() as progress:
            bar = progress.add_task("", total=float(stages), doing="")

            def stage(number: int) -> Tell:
                def tell(fraction: float, doing: str) -> None:
                    progress.update(bar, completed=number + fraction, doing=doing, refresh=True)
                    if not self._console.is_terminal:
                        percent = 100 * (number + fraction) / stages
                        self._console.print(f"{percent:3.0f} % {doing}", highlight=False, markup=False)

                return tell

            try:
                answers = measurements.answers(stage(0))
                steps = measurements.steps(stage(1))
                for number, candidate in enumerate(options.candidates):
                    follow, costs = measurements.candidate(candidate, stage(2 + number))
                    row = Row(candidate, answers, follow, costs, steps)
                    row.warnings = rules.of_facts(candidate, options.target)
                    row.warnings += rules.of_measurements(row, answers.sets)
                    self.rows.append(row)
            finally:
                measurements.close()
            for number, row in enumerate(recommend.ranked(self.rows)[: options.verify]):
                self._try(row, stage(2 + len(options.candidates) + number))
            progress.update(bar, completed=float(stages), doing="")

    def _try(self, row: Row, tell: Tell) -> None:
        mode, best = row.best(1)
        options, measurements = self._options, self._measurements
        key = part_key(
            f"trial-{row.candidate.name}",
            follow=measurements.follow_key(row.candidate),
            **measurements.timing,
            mode=mode,
            tokens=best.tokens,
            repetitions=options.repetitions,
        )
        if key not in self._store.parts:
            self._store.keep(key, trial.run(row.candidate, mode, best.tokens, options, self._logs, tell))
        measured = self._store.parts[key]
        self.other_load.append(measured["other_load"])
        row.trials.append(row.trial(mode, best.tokens, measured))

    def _progress(self) -> Progress:
        # Drawn only when something is told, that is between measurements: a bar that moves by itself takes time on some core.
        return Progress(
            BarColumn(24), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(), TextColumn("{task.fields[doing]}"),
            console=self._console, auto_refresh=False, transient=True,
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured and reported; 1: a process failed; 2: cannot be; 130: interrupted. What was measured is reported in any case."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        store = Store.open(options.out, fresh=options.fresh)
    except NotOurs as error:
        console.print(f"scripts/select_draft: {error}", style="red", markup=False)
        return 2
    for sentence in options.refused:
        console.print(f"not a candidate: {sentence}", style="yellow", markup=False, soft_wrap=True)
    run = Run(options, store, console)
    if run.other_load[0] > report.BUSY_SHARE:
        console.print(
            f"[yellow]other programs keep {run.other_load[0]:.0%} of this machine busy: times will say little[/]"
        )
    ended = _guarded(run, console)
    if not run.rows:
        console.print("nothing was measured yet", style="red")
        return ended or 1
    _report(run, options, store, console, ended)
    return ended


def _guarded(run: Callable[[], None], console: Console) -> int:
    try:
        run()
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what was measured is kept; the same command goes on from here[/]")
        return 130
    except RuntimeError as error:
        console.print(f"scripts/select_draft: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def _report(run: Run, options: Options, store: Store, console: Console, ended: int) -> None:
    choice = recommend.choose(run.rows)
    about: dict[str, Any] = {
        "command": " ".join(["scripts/select_draft", *(_shown(part) for part in options.argv)]),
        "commit": machine.commit(ROOT),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "other_load": run.other_load,
        "target": options.target.folder.name,
        "dtype": options.dtype,
        "prompts": len(options.prompts),
        "sets": list(dict.fromkeys(prompt.set for prompt in options.prompts)),
        "tokens": options.tokens,
        "refused": [_shown(sentence) for sentence in options.refused],
        "complete": ended == 0,
        "recommendation": recommend.sentence(choice),
        "config": recommend.config_lines(choice, options.provider),
    }
    store.save(**about, rows=[report.as_dict(row) for row in run.rows])
    image = options.out.with_suffix(".png")
    try:
        plot.write_plot(run.rows, image)
    except ImportError:
        console.print("no plot: matplotlib is not installed", style="yellow")
    page = options.out.with_suffix(".md")
    page.write_text(report.markdown(about, run.rows, choice, image.name if image.exists() else ""), encoding="utf-8")
    console.print(report.table(run.rows))
    for row in run.rows:
        for text in row.warnings:
            console.print(f"{row.candidate.name}: {text}", style="yellow", markup=False, soft_wrap=True)
        for each in row.trials:
            colour = "green" if each.agrees else "red"
            console.print(report.trial_words(row, each), style=colour, markup=False, soft_wrap=True, highlight=False)
    console.print(about["recommendation"], soft_wrap=True, highlight=False, markup=False)
    console.print(f"\nunder args in ray_config.yaml:\n{about['config']}", markup=False, highlight=False)
    console.print(f"written: {options.out}, {page}, {image}", soft_wrap=True)


def _shown(text: str) -> str:
    """Without where this repository lies."""
    return text.replace(f"{ROOT}/", "")


if __name__ == "__main__":
    sys.exit(main())
