"""A load that changes: batch 2, then 16, then 2 again, on one chain engine without a pause. Shows how fast it adapts."""

from collections.abc import Sequence
from typing import Any

from scripts.bench_lib.backend import Work
from scripts.bench_lib.cells import Cell, System
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.statistics import Sample, acceptance, drafted_rounds, tokens_per_verify

BATCHES = (2, 16, 2)
PROMPTS_PER_SEQUENCE = 2  # in each phase; 40 prompts in all, what one set has
LENGTH = 64  # forced


def transition_system(systems: Sequence[System]) -> System | None:
    """The first chosen system that drafts with the chain's own engine; None without one."""
    return next((s for s in systems if s.engine == "chain" and s.asks_model), None)


def plan_transition(prompts: Sequence[Prompt], temperature: float) -> list[Work]:
    """The phases with prompts that none of them shares; ``ValueError`` where there are too few."""
    fresh = list({prompt.id: prompt for prompt in prompts}.values())
    needed = sum(BATCHES) * PROMPTS_PER_SEQUENCE
    if len(fresh) < needed:
        raise ValueError(f"the transition needs {needed} prompts, the chosen sets have {len(fresh)}")
    work: list[Work] = []
    for batch in BATCHES:
        count = batch * PROMPTS_PER_SEQUENCE
        taken, fresh = fresh[:count], fresh[count:]
        work.append((Cell("transition", batch, temperature, "length", LENGTH), taken))
    return work


def summarise_transition(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row for each phase, in their order."""
    return [
        {
            "phase": phase,
            "batch": sample.cell.batch,
            "tokens_per_s": sample.tokens_per_s,
            "acceptance": acceptance(sample.requests)["pooled"],
            "tokens_per_verify": tokens_per_verify(sample.requests),
            "drafted_rounds": drafted_rounds(sample.requests),
        }
        for phase, sample in enumerate(samples, start=1)
    ]
