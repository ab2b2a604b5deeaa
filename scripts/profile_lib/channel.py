"""Section ``channel``: what one message between target and draft costs, hop by hop, and what bare connections cost.

Both ends are processes of their own, each bound to one core. All times are milliseconds.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench_lib.child import python
from scripts.bench_lib.engine import DRAFT_TIMEOUT_S
from scripts.bench_lib.settings import draft_environment
from scripts.profile_lib.bare_ends import KINDS
from scripts.profile_lib.figures import figures
from scripts.profile_lib.hops_near import HOPS
from scripts.profile_lib.section import Setting, Tell, running

MESSAGES = 100  # of each kind in each repetition


class Mode(NamedTuple):
    """``computes``: what the draft does between two messages."""

    transport: str
    computes: bool


MODES = {
    "quiet, Unix": Mode("unix", False),
    "computing, Unix": Mode("unix", True),
    "quiet, ZeroMQ": Mode("zeromq", False),
    "computing, ZeroMQ": Mode("zeromq", True),
}


def measure(setting: Setting, tell: Tell) -> dict[str, Any]:
    """Figures of each hop by what the draft does meanwhile, and of the round trip over each bare connection.

    Raises ``RuntimeError`` when an end fails, no message is answered, or there is only one core.
    """
    setting.two_cores()
    hops: dict[str, list[dict[str, float]]] = defaultdict(list)
    missed = dict.fromkeys(MODES, 0)
    trips: dict[str, list[float]] = defaultdict(list)
    parts = [(repetition, what) for repetition in range(setting.repetitions) for what in (*MODES, *KINDS)]
    for done, (repetition, what) in enumerate(parts):
        tell(done / len(parts), f"{what} ({repetition + 1}/{setting.repetitions})")
        if what in KINDS:
            trips[what] += bare(setting, what)
        else:
            answer = one_mode(setting, what)
            hops[what] += answer["hops"]
            missed[what] += answer["missed"]
    for mode in MODES:
        if not hops[mode]:
            raise RuntimeError(f"none of {missed[mode]} messages ({mode} draft) was answered in time")
    return {
        "hops": {mode: {hop: figures([each[hop] for each in hops[mode]]) for hop in HOPS} for mode in MODES},
        "missed": missed,
        "round_trips": {kind: figures(trips[kind]) for kind in KINDS},
    }


def one_mode(setting: Setting, mode: str) -> dict[str, Any]:
    """``hops`` of each answered message and how many were ``missed``."""
    near_core, far_core = setting.two_cores()
    transport, computes = MODES[mode]
    command = python("scripts.profile_lib.hops_far", *(["--compute"] if computes else []))
    with (
        running(f"far-{transport}", command, _environment(), (far_core,), setting.logs) as far,
        running(
            f"near-{transport}", python("scripts.profile_lib.hops_near"), _environment(), (near_core,), setting.logs
        ) as near,
    ):
        endpoint = far.ask(DRAFT_TIMEOUT_S, command="endpoint")
        far.ask(DRAFT_TIMEOUT_S, command="authorize", **near.ask(DRAFT_TIMEOUT_S, command="key"))
        return near.ask(DRAFT_TIMEOUT_S, command="measure", endpoint=endpoint, transport=transport, messages=MESSAGES)


def bare(setting: Setting, kind: str) -> list[float]:
    """Round trips over one bare connection to an end that only echoes."""
    near_core, far_core = setting.two_cores()
    ends = "scripts.profile_lib.bare_ends"
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        command = python(ends, "far", kind, str(Path(folder)))
        with running(f"far-{kind}", command, _environment(), (far_core,), setting.logs) as far:
            place = far.answer(DRAFT_TIMEOUT_S)
            command = python(ends, "near", kind, place["address"], place["key"], str(MESSAGES))
            with running(f"near-{kind}", command, _environment(), (near_core,), setting.logs) as near:
                times: list[float] = near.answer(DRAFT_TIMEOUT_S)["ms"]
                return times


def _environment() -> dict[str, str]:
    return {**draft_environment(), "OPENBLAS_NUM_THREADS": "1"}
