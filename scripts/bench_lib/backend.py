"""What the benchmark asks of whoever answers prompts: an engine process or a server behind a URL."""

import json
from typing import Protocol

from scripts.bench_lib.cells import Cell, System
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.statistics import Sample


class Backend(Protocol):
    """Serves one or two systems. Every failure is a ``RuntimeError`` with one clear sentence."""

    name: str

    def start(self, warmup: list[Prompt], batches: list[int], temperatures: list[float]) -> float:
        """Load and warm up; returns seconds."""

    def measure(self, cell: Cell, system: System, repetition: int, prompts: list[Prompt], settle: Prompt) -> Sample:
        """Answer ``prompts`` in groups of the cell's batch."""

    def stop(self) -> None: ...


def chain_field(system: System) -> str | None:
    """The request option that turns this project's chain on or off and bounds its drafts; None for an engine that has none."""
    if system.chain_enabled is None:
        return None
    tokens = {} if system.chain_tokens is None else {"tokens": system.chain_tokens}
    return json.dumps({"enabled": system.chain_enabled, **tokens})
