"""What every section is given, and the child processes it starts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench_lib.child import Child
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.settings import Cores

Tell = Callable[[float, str], None]  # how much of a section is done (0 to 1), and what comes next


@dataclass(frozen=True)
class Setting:
    """The same for all sections of a run. ``models``: folder with ``target/`` and ``draft-*/``; ``logs``: of the children."""

    cores: Cores
    models: Path
    repetitions: int
    logs: Path

    def two_cores(self) -> tuple[int, int]:
        """One core of the target's own and the draft's; raises ``RuntimeError`` where there is only one."""
        if len(self.cores.all) < 2:
            raise RuntimeError("needs two cores: with one, target and draft cannot work beside each other")
        return self.cores.target[0], self.cores.draft

    def target(self) -> Path:
        """Folder of the target's checkpoint; raises ``FileNotFoundError``."""
        folder = self.models / "target"
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"no target checkpoint in {folder}: run scripts/prepare_models")
        return folder

    def drafts(self) -> list[Path]:
        """Folders of all draft models, by name; raises ``FileNotFoundError`` without any."""
        found = sorted(folder for folder in self.models.glob("draft-*") if (folder / "model.onnx").is_file())
        if not found:
            raise FileNotFoundError(f"no draft-*/model.onnx in {self.models}: run scripts/prepare_models")
        return found


Section = Callable[[Setting, Tell], dict[str, Any]]


@contextmanager
def running(
    name: str, command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int], logs: Path
) -> Iterator[Child]:
    """A child bound to ``cores`` from its first instruction, ended with the block."""
    child = Child(name, command, environment, cores, logs / f"{name}.log", ROOT)
    try:
        yield child
    finally:
        child.stop()
