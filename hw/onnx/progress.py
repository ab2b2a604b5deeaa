"""How the steps of a preparation are shown while they run."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hw.onnx.build import Report


class Display:
    """Progress bars on a terminal, one line at the start and end of each step elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("  {task.fields[name]:<12}"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line, above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def step(self, name: str, what: str) -> Iterator[Report]:
        """Announce a step, show what is reported of it, and say how long it took."""
        self.say(f"  {name}: {what}")
        began = time.monotonic()
        task = self._progress.add_task(what, name=name, total=1.0)
        try:
            yield lambda fraction, doing: self._progress.update(task, completed=fraction, description=doing)
        finally:
            self._progress.remove_task(task)
        self.say(f"  {name}: ready in {time.monotonic() - began:.0f} s")
