"""Section ``steps``: what an engine step costs by how many drafted tokens it verifies. All times are milliseconds.

The chain's engine, eager, with a draft that answers at once and is wrong, so that every step commits one token a sequence.
"""

from dataclasses import dataclass
from typing import Any

from scripts.bench_lib.child import python
from scripts.bench_lib.engine import LOAD_TIMEOUT_S, RUN_TIMEOUT_S
from scripts.bench_lib.settings import ChainBounds, Cores, engine_environment, engine_settings
from scripts.profile_lib.figures import Samples, paired_ratio, pooled
from scripts.profile_lib.section import Setting, Tell, running

VERIFIED = (0, 1, 2, 4, 8, 16, 24)  # drafted tokens a sequence
BATCHES = (1, 8)
STEPS = 6  # timed in one turn of a cell


@dataclass(frozen=True)
class Cell:
    """``threads``: OpenMP threads of the engine, which is bound to all cores."""

    threads: int
    batch: int
    verified: int

    @property
    def plain(self) -> "Cell":
        """The step it is compared with."""
        return Cell(self.threads, self.batch, 0)


def plan(cores: Cores, repetition: int) -> list[Cell]:
    """All cells; every other repetition backwards, so that none always follows the same one."""
    threads = sorted({len(cores.target), len(cores.all)})
    cells = [Cell(count, batch, verified) for count in threads for batch in BATCHES for verified in VERIFIED]
    return cells[::-1] if repetition % 2 else cells


def arguments(setting: Setting) -> dict[str, Any]:
    """What ``vllm.LLM`` is given: the benchmark's chain engine, which verifies all that is drafted."""
    chain = engine_settings("chain", setting.target().resolve(), setting.cores, "eager", ChainBounds(max(VERIFIED)))
    return chain.arguments | {"additional_config": {"chain_adaptive": False}}


def measure(setting: Setting, tell: Tell) -> dict[str, Any]:
    """Figures of each cell; raises ``RuntimeError`` or ``FileNotFoundError`` saying what is missing."""
    loaded = arguments(setting)
    environment = engine_environment(setting.cores.all)
    command = python("scripts.profile_lib.engine_child")
    samples: dict[Cell, list[list[float]]] = {cell: [] for cell in plan(setting.cores, 0)}
    uneven = 0
    tell(0.0, "loading the engine")
    with running("steps", command, environment, setting.cores.all, setting.logs) as engine:
        engine.ask(LOAD_TIMEOUT_S, command="load", arguments=loaded)
        for batch in BATCHES:  # warms up
            engine.ask(RUN_TIMEOUT_S, command="time_steps", batch=batch, steps=1, verified=max(VERIFIED))
        parts = [(turn, cell) for turn in range(setting.repetitions) for cell in plan(setting.cores, turn)]
        for done, (turn, cell) in enumerate(parts):
            tell(
                done / len(parts),
                f"{cell.threads} threads, batch {cell.batch}, {cell.verified} tokens ({turn + 1}/{setting.repetitions})",
            )
            answer = engine.ask(
                RUN_TIMEOUT_S,
                command="time_steps",
                batch=cell.batch,
                steps=STEPS,
                verified=cell.verified,
                threads=cell.threads,
            )
            samples[cell].append(answer["ms"])
            uneven += answer["uneven"]
    return {"rows": [row(cell, samples[cell], samples[cell.plain]) for cell in samples], "uneven": uneven}


def row(cell: Cell, samples: Samples, plain: Samples) -> dict[str, Any]:
    """One line of the result; ``ratio``: to the step that verifies nothing, paired within repetitions."""
    return {
        "threads": cell.threads,
        "batch": cell.batch,
        "verified": cell.verified,
        "ms": pooled(samples),
        "ratio": paired_ratio(samples, plain),
    }
