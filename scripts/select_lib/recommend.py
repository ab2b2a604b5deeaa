"""Which draft to take, in a sentence, and the lines of ``ray_config.yaml`` that do it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts.bench_lib.engine import ROOT
from scripts.select_lib.answers import SAMPLED
from scripts.select_lib.candidates import LOOKUP
from scripts.select_lib.rows import Row, Trial
from scripts.select_lib.trial import OVERLAPPED


@dataclass(frozen=True)
class Choice:
    """A way to use a candidate. ``row`` None: none pays. ``speedup``: to the target alone, one request at a time."""

    row: Row | None
    mode: str = ""
    tokens: int = 0
    speedup: float = 1.0
    trial: Trial | None = None


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The candidates, those predicted to be fastest first."""
    return sorted(rows, key=lambda row: row.speedup(1), reverse=True)


def choose(rows: Sequence[Row]) -> Choice:
    """The fastest: by what was measured in the engine where it was, else by the prediction. Only what beats not drafting counts."""
    found = Choice(None)
    tried = [(row, trial) for row in rows for trial in row.trials]
    for row, trial in tried:
        if trial.speedup > found.speedup:
            found = Choice(row, trial.mode, trial.tokens, trial.speedup, trial)
    if tried:
        return found
    for row in rows:
        mode, best = row.best(1)
        if row.speedup(1) > found.speedup:
            found = Choice(row, mode, best.tokens, row.speedup(1))
    return found


def sentence(choice: Choice) -> str:
    """One sentence for whoever has to decide."""
    row = choice.row
    if row is None:
        return "No candidate is faster than not drafting here: leave `chain.adaptive` on, or turn drafting off."
    how = (
        f"measured in the engine, predicted {choice.trial.predicted_speedup:.2f}"
        if choice.trial is not None
        else "predicted, not tried"
    )
    what = (
        "the source without weights (`suffix`)"
        if row.candidate.kind == LOOKUP
        else f"`{row.candidate.name}`, {choice.tokens} token{'s' * (choice.tokens != 1)} a round, "
        + ("drafted while the target verifies" if choice.mode == OVERLAPPED else "drafted while the target waits")
    )
    largest = row.batches[-1]
    many = ""
    if largest > 1:
        gain = row.speedup(largest)
        many = f"; {largest} at once: {gain:.2f} predicted" + (", so leave `chain.adaptive` on" if gain < 1.0 else "")
    sampled = f", sampled {row.speedup(1, SAMPLED):.2f} predicted" if row.first(SAMPLED) is not None else ""
    return f"Use {what}: {choice.speedup:.2f}x plain decoding for one greedy request at a time ({how}{sampled}){many}."


def config_lines(choice: Choice, provider: str) -> str:
    """What goes under ``args`` of the application."""
    row = choice.row
    if row is None:
        return "drafts: []\nchain: {enabled: false}\n"
    if row.candidate.folder is None:
        return f"drafts: []\nchain: {{enabled: true, sources: [{LOOKUP}], adaptive: true}}\n"
    draft = {
        "name": _name(row.candidate.name),
        "model": _shown(row.candidate.folder),
        "pool": "cpu",
        "provider": provider,
        "tokens": choice.tokens,
        "threads": 1,
    }
    if choice.mode != OVERLAPPED:
        draft["predraft"] = False
    entry = yaml.safe_dump(draft, default_flow_style=True, sort_keys=False, width=1000).strip()
    return f"drafts:\n  - {entry}\nchain: {{enabled: true, sources: [{LOOKUP}], adaptive: true}}\n"


def _name(folder: str) -> str:
    """As the shipped config names its drafts: int8 for draft-int8."""
    return folder.removeprefix("draft-") or folder


def _shown(folder: Path) -> str:
    """Relative to the repository where it lies in it."""
    return str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else str(folder)
