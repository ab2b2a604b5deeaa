"""What the benchmark asks of whoever answers prompts: an engine process or a server behind a URL."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from scripts.bench_lib.cells import Cell, System
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.statistics import Sample

Work = tuple[Cell, list[Prompt]]


class Backend(Protocol):
    """Serves one or two systems. Every failure is a ``RuntimeError`` with one clear sentence."""

    name: str

    def start(self, warmup: list[Prompt], batches: list[int], temperatures: list[float]) -> float:
        """Load and warm up; returns seconds."""

    def measure(self, work: Sequence[Work], system: System, repetition: int, settle: Prompt) -> list[Sample]:
        """Answer each cell's prompts in groups of its batch, one cell directly after the other; a sample for each.

        What was kept of earlier answers is forgotten before the first cell only: later ones meet a system that has learned.
        """

    def stop(self) -> None: ...


def chain_field(system: System, tenant: str = "") -> str | None:
    """The request option that turns this project's chain on or off and bounds its drafts; None for an engine that has none.

    ``tenant`` goes into it where no router adds one; requests without a tenant learn nothing from one another.
    """
    if system.chain_enabled is None:
        return None
    field: dict[str, Any] = {"enabled": system.chain_enabled}
    if system.chain_tokens is not None:
        field["tokens"] = system.chain_tokens
    if system.chain_sources:
        field["sources"] = list(system.chain_sources)
    if system.chain_policy:
        field["policy"] = json.loads(system.chain_policy)
    if tenant:
        field["tenant"] = tenant
    return json.dumps(field)
