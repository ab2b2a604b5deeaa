"""One run of the benchmark: start the backends, let the systems take turns, keep what was measured."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scripts.bench_lib.backend import Backend, Work
from scripts.bench_lib.cells import Cell, System, Turn, turns
from scripts.bench_lib.prompts import Prompt, prompts_for
from scripts.bench_lib.statistics import Sample
from scripts.bench_lib.transition import transition_system


@dataclass
class Measured:
    """What came out, whole or interrupted; several sessions may add to one."""

    samples: list[Sample] = field(default_factory=list)
    transition: list[Sample] = field(default_factory=list)  # one for each phase
    unmeasured: list[Turn] = field(default_factory=list)  # the time budget ended before them
    left_out: dict[str, str] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False


@dataclass
class Session:
    """Lets systems take turns. An interrupted session still leaves everything up to the interruption."""

    systems: Sequence[System]
    backends: Mapping[str, Backend]
    prompts: Mapping[str, list[Prompt]]
    warmup: list[Prompt]
    console: Console
    prompts_at_least: int = 4
    measured: Measured = field(default_factory=Measured)
    transition: Sequence[Work] = ()  # phases for the chain, before everything else
    ends_at: float | None = None  # time.monotonic() after which no turn begins, except the very first; None: never

    def run(self, cells: Sequence[Cell], repetitions: int, start_together: int = 1) -> None:
        """Start, measure, stop. Ctrl-C ends it early, an engine's failure ends only that engine."""
        if self._over():
            self.measured.unmeasured += turns(cells, self.systems, repetitions)
            return
        pool = ThreadPoolExecutor(start_together)  # outlives the children: one dies with the thread that started it
        try:
            self._start(cells, pool)
            self._transit()
            self._measure(cells, repetitions)
        except KeyboardInterrupt:
            self.measured.interrupted = True
            self.console.print("[yellow]interrupted: writing what was measured[/]")
        finally:
            for backend in self.backends.values():
                backend.stop()
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, cells: Sequence[Cell], pool: ThreadPoolExecutor) -> None:
        with self._progress("engines") as progress:
            task = progress.add_task("starting", total=len(self.backends), name="")

            def start(backend: Backend) -> None:
                progress.update(task, name=backend.name)
                self._guard(backend, lambda: self._started(backend, cells))
                progress.advance(task)

            list(pool.map(start, self.backends.values()))

    def _started(self, backend: Backend, cells: Sequence[Cell]) -> None:
        cells = [*cells, *(cell for cell, _ in self.transition)]
        batches = sorted({cell.batch for cell in cells})
        temperatures = sorted({cell.temperature for cell in cells})
        self.measured.start_seconds[backend.name] = backend.start(self.warmup, batches, temperatures)

    def _transit(self) -> None:
        """The changing load comes first: no earlier cell has taught the chain anything."""
        system = transition_system(self.systems)
        if not self.transition or system is None or system.engine in self.measured.left_out:
            return
        backend, settle = self.backends[system.engine], self.warmup[0]
        self.console.print(f"changing load: {', '.join(f'batch {cell.batch}' for cell, _ in self.transition)}")

        def measure() -> None:
            self.measured.transition += backend.measure(self.transition, system, 0, settle)

        self._guard(backend, measure)

    def _measure(self, cells: Sequence[Cell], repetitions: int) -> None:
        plan = list(turns(cells, self.systems, repetitions))
        with self._progress("runs") as progress:
            task = progress.add_task("measuring", total=sum(_weight(t.cell) * len(t.systems) for t in plan), name="")
            for index, turn in enumerate(plan):
                if self._over():
                    self.measured.unmeasured += plan[index:]
                    return
                for system in turn.systems:
                    backend = self.backends[system.engine]
                    if backend.name not in self.measured.left_out:
                        progress.update(
                            task, name=f"{turn.cell.label} · {system.key} ({turn.repetition + 1}/{repetitions})"
                        )
                        self._guard(backend, self._one(backend, turn.cell, system, turn.repetition))
                        self._log(progress)
                    progress.advance(task, _weight(turn.cell))

    def _over(self) -> bool:
        """Has the time budget ended? One turn is measured whatever it takes."""
        return bool(self.measured.samples) and self.ends_at is not None and time.monotonic() >= self.ends_at

    def _one(self, backend: Backend, cell: Cell, system: System, repetition: int) -> Callable[[], None]:
        def measure() -> None:
            prompts = prompts_for(self.prompts[cell.set], cell.batch, repetition, self.prompts_at_least)
            settle = self.warmup[len(self.measured.samples) % len(self.warmup)]
            self.measured.samples += backend.measure([(cell, prompts)], system, repetition, settle)

        return measure

    def _log(self, progress: Progress) -> None:
        """One line a measurement where no bar can be drawn."""
        if not self.console.is_terminal and self.measured.samples:
            last, task = self.measured.samples[-1], progress.tasks[0]
            left = f"{task.time_remaining / 60:.0f} min left" if task.time_remaining is not None else ""
            self.console.print(
                f"{task.percentage:3.0f} % {last.cell.label} · {last.system.key} ({last.repetition + 1}): "
                f"{last.tokens_per_s:.1f} tokens/s {left}",
                highlight=False,
            )

    def _guard(self, backend: Backend, action: Callable[[], None]) -> None:
        try:
            action()
        except RuntimeError as error:
            self.measured.left_out[backend.name] = str(error)
            self.console.print(f"[red]{backend.name} left out:[/] {error}", highlight=False, markup=True)
            backend.stop()

    def _progress(self, what: str) -> Progress:
        count = MofNCompleteColumn() if what == "engines" else TextColumn("{task.percentage:.0f} %")
        return Progress(
            TextColumn("{task.description}"), BarColumn(24), count, TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.fields[name]}"), console=self.console,
        )  # fmt: skip


def unmeasured_text(unmeasured: Sequence[Turn]) -> list[str]:
    """What a time budget left out: a sentence for each group of systems; empty when it left out nothing."""
    groups: dict[tuple[str, ...], list[Turn]] = {}
    for turn in unmeasured:
        groups.setdefault(tuple(sorted(system.key for system in turn.systems)), []).append(turn)
    return [
        f"Time budget: {len(left)} turns of {', '.join(keys)} left out, {_cells(left)}" for keys, left in groups.items()
    ]


def _cells(left: Sequence[Turn]) -> str:
    never = list(dict.fromkeys(turn.cell.label for turn in left if turn.repetition == 0))
    fewer = len({turn.cell for turn in left}) - len(never)
    parts = [f"never measured: {'; '.join(never)}"] if never else []
    return ", ".join(parts + ([f"{fewer} cells with fewer repetitions"] if fewer else []))


def _weight(cell: Cell) -> float:
    """Rough seconds: throughput grows with the batch, though less than in proportion."""
    tokens = max(cell.batch, 4) * cell.max_tokens
    return float(tokens / (90.0 * cell.batch**0.65) + 0.5)
