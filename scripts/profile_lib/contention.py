"""Section ``contention``: a plain step of the target and a step of the draft, alone and beside each other.

The target has its own cores, the draft another one; what they share is memory. All times are milliseconds.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from scripts.bench_lib.child import Child, python
from scripts.bench_lib.engine import DRAFT_TIMEOUT_S, LOAD_TIMEOUT_S, RUN_TIMEOUT_S
from scripts.bench_lib.settings import ChainBounds, draft_environment, engine_environment, engine_settings
from scripts.profile_lib.figures import Samples, paired_ratio, pooled, within
from scripts.profile_lib.section import Setting, Tell, running

ROWS = (1, 2)  # sequences in the draft's batch
STEPS = 20  # of the target in one measurement
ALONE_S = 1.0  # a measurement of the draft alone
HEAD_START_S = 0.2  # the draft computes for so long before anything counts
KEYS = ("target_alone", "target_beside", "draft_alone", "draft_beside")


def measure(setting: Setting, tell: Tell) -> dict[str, Any]:
    """Figures for each draft and number of rows; raises ``RuntimeError`` or ``FileNotFoundError`` saying what is missing."""
    _, draft_core = setting.two_cores()
    cores = setting.cores.target
    folders = setting.drafts()
    checkpoint = setting.target().resolve()
    arguments = engine_settings("plain_target_core", checkpoint, setting.cores, "eager", ChainBounds()).arguments
    with ExitStack() as stack:
        drafts: dict[str, Child] = {}
        for folder in folders:
            tell(0.0, f"loading {folder.name}")
            command = python("scripts.profile_lib.draft_child")
            draft = stack.enter_context(
                running(f"contention-{folder.name}", command, draft_environment(), (draft_core,), setting.logs)
            )
            draft.ask(DRAFT_TIMEOUT_S, command="load", folder=str(folder.resolve()), core=draft_core, slots=max(ROWS))
            drafts[folder.name] = draft
        tell(0.0, "loading the target")
        command, environment = python("scripts.profile_lib.engine_child"), engine_environment(cores)
        target = stack.enter_context(running("contention-target", command, environment, cores, setting.logs))
        target.ask(LOAD_TIMEOUT_S, command="load", arguments=arguments)
        steps(target)  # warms up

        cells = [(name, rows) for name in drafts for rows in ROWS]
        samples: dict[tuple[str, int], dict[str, list[list[float]]]] = {
            cell: {key: [] for key in KEYS} for cell in cells
        }
        parts = [(repetition, cell) for repetition in range(setting.repetitions) for cell in cells]
        for done, (repetition, cell) in enumerate(parts):
            tell(done / len(parts), f"{cell[0]}, rows {cell[1]} ({repetition + 1}/{setting.repetitions})")
            for key, values in one_turn(target, drafts[cell[0]], cell[1]).items():
                samples[cell][key].append(values)
    return {"rows": [row(name, rows, samples[name, rows]) for name, rows in cells]}


def one_turn(target: Child, draft: Child, rows: int) -> dict[str, list[float]]:
    """Both alone, then both at once; milliseconds of each step under :data:`KEYS`."""
    alone = steps(target)
    draft.tell(command="compute", rows=rows)
    time.sleep(HEAD_START_S)
    began = time.perf_counter()
    time.sleep(ALONE_S)
    draft_alone = _pieces(draft, began, time.perf_counter())

    draft.tell(command="compute", rows=rows)
    time.sleep(HEAD_START_S)
    beside = steps(target)
    draft_beside = _pieces(draft, beside["began"], beside["ended"])
    return dict(zip(KEYS, (alone["ms"], beside["ms"], draft_alone, draft_beside), strict=True))


def steps(target: Child) -> dict[str, Any]:
    return target.ask(RUN_TIMEOUT_S, command="time_steps", batch=1, steps=STEPS)


def _pieces(draft: Child, began: float, ended: float) -> list[float]:
    """Stop the draft; milliseconds of its steps between the two times."""
    draft.tell(command="rest")
    pieces = draft.answer(DRAFT_TIMEOUT_S)["pieces"]
    draft.answer(DRAFT_TIMEOUT_S)  # to "rest"
    return [1e3 * seconds for seconds in within(pieces, began, ended)]


def row(name: str, rows: int, samples: Mapping[str, Samples]) -> dict[str, Any]:
    """One line of the result; ``*_slower``: how many times as long beside the other, paired within repetitions."""
    return {
        "draft": name,
        "rows": rows,
        **{f"{key}_ms": pooled(samples[key]) for key in KEYS},
        "target_slower": paired_ratio(samples["target_beside"], samples["target_alone"]),
        "draft_slower": paired_ratio(samples["draft_beside"], samples["draft_alone"]),
    }
