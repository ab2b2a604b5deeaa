"""Asks what has not been asked yet, systems in turn, and keeps every answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from scripts.answers_lib.client import Client, Refused
from scripts.answers_lib.questions import Question, QuestionSet
from scripts.answers_lib.records import Store
from scripts.answers_lib.systems import System

LOG_EVERY = 25  # requests between two lines where no bar can be drawn


@dataclass
class Run:
    """One run over a store; stopping it loses nothing."""

    questions: QuestionSet
    chosen: Sequence[Question]
    wordings: int
    store: Store
    console: Console
    commit: str
    cpu: Callable[[], float] | None = None  # processor time of the target so far
    left_out: dict[str, str] = field(default_factory=dict)

    def ask(self, client: Client, systems: Sequence[System]) -> bool:
        """Ask; False when interrupted. A system whose requests are refused is left out with the reason."""
        known = {record.key for record in self.store.records}
        plan = [
            (question, wording, turn)
            for wording in range(self.wordings)
            for turn, question in enumerate(self.chosen, start=wording)
        ]
        total = len(plan) * len(systems)
        with self._progress() as progress:
            task = progress.add_task("asking", total=total, name="")
            try:
                for question, wording, turn in plan:
                    prompt = self.questions.prompt(question, wording)
                    first = turn % len(systems)  # who is first finds no prefix in the cache: everybody in turn
                    for system in [*systems[first:], *systems[:first]]:
                        progress.update(task, name=f"{question.id} · {system.name}")
                        if (system.name, question.id, wording) not in known and system.name not in self.left_out:
                            self._one(client, system, question.id, wording, prompt)
                        progress.advance(task)
                        self._log(progress, int(progress.tasks[0].completed), total)
            except KeyboardInterrupt:
                self.console.print("[yellow]interrupted: the same command goes on from here[/]")
                return False
        return True

    def _one(self, client: Client, system: System, question: str, wording: int, prompt: str) -> None:
        worked = self.cpu() if self.cpu is not None else 0.0
        try:
            record = client.ask(system, question, wording, prompt)
        except Refused as error:
            self.left_out[system.name] = str(error)
            self.console.print(f"[red]{system.name} left out:[/] {error}", highlight=False)
            return
        if self.cpu is not None:
            record = msgspec.structs.replace(record, cpu_seconds=self.cpu() - worked)
        self.store.add(msgspec.structs.replace(record, commit=self.commit))

    def _log(self, progress: Progress, done: int, total: int) -> None:
        if not self.console.is_terminal and done % LOG_EVERY == 0:
            left = progress.tasks[0].time_remaining
            self.console.print(f"{done}/{total}" + (f", {left / 60:.0f} min left" if left else ""), highlight=False)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.fields[name]}"), console=self.console,
        )  # fmt: skip


def warm_up(client: Client, systems: Sequence[System]) -> dict[str, str]:
    """One request to each that is not counted; why systems are refused."""
    refused = {}
    for system in systems:
        try:
            client.ask(system, "", 0, "What colour is a ripe lemon? Answer with one word.")
        except Refused as error:
            refused[system.name] = str(error)
    return refused
