"""The best candidates in the real engine: tokens a second and acceptance as the running system counts them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from hw.onnx.checkpoint import CONDITIONED
from scripts.bench_lib import machine, settings
from scripts.bench_lib.cells import MODEL_SOURCE, Cell, System
from scripts.bench_lib.engine import EngineBackend
from scripts.bench_lib.prompts import WARMUP_SET, load_prompts
from scripts.bench_lib.statistics import Sample, percentile
from scripts.select_lib.candidates import LOOKUP, Candidate
from scripts.select_lib.options import Options

OVERLAPPED, SYNCHRONOUS, WITHOUT_MODEL = "overlapped", "synchronous", "no model"
WHOLE_DRAFT_S = 2.0  # nobody hurries a draft here: what is predicted is about whole ones
OFF = System("off", "all", "engine", "chain", chain_enabled=False)

Tell = Callable[[float, str], None]


def engine_of(
    candidate: Candidate, mode: str, tokens: int, options: Options, cores: settings.Cores
) -> settings.EngineSettings:
    """The engine that verifies ``tokens`` of this candidate alone, every round, whether that pays or not."""
    bounds = settings.ChainBounds(tokens=tokens, model_tokens=tokens)
    name = "chain_sync" if mode == SYNCHRONOUS else "chain"
    engine = settings.engine_settings(name, options.target.folder, cores, "eager", bounds)
    faults = {"draft_deadline_s": WHOLE_DRAFT_S, "draft_deadline_min_s": WHOLE_DRAFT_S}
    config = {
        **engine.arguments["additional_config"],
        "chain_adaptive": False,
        "chain_sources": [LOOKUP] if candidate.kind == LOOKUP else [],
        "chain_faults": faults,
        "chain_hidden": candidate.kind == CONDITIONED,
    }
    return replace(
        engine,
        arguments={**engine.arguments, "dtype": options.dtype, "additional_config": config},
        draft="none" if candidate.kind == LOOKUP else engine.draft,
        draft_options=("--provider", options.provider),
    )


def run(candidate: Candidate, mode: str, tokens: int, options: Options, logs: Any, tell: Tell) -> dict[str, Any]:
    """Greedy answers to the run's prompts, one at a time, in turn with plain decoding on the same engine.

    Figures: ``tokens_per_s`` and ``plain_per_s`` (medians of the turns), ``drafted`` and ``accepted`` tokens, ``committed`` tokens
    and ``steps`` of the turns with drafts, ``by_request`` its accepted and drafted tokens, ``kv`` what the draft did with the target's, ``overhead_ms`` (median of a round), ``other_load`` just before. Raises ``RuntimeError``.
    """
    cores = settings.Cores.split(os.sched_getaffinity(0))
    engine = engine_of(candidate, mode, tokens, options, cores)
    source = LOOKUP if candidate.kind == LOOKUP else MODEL_SOURCE
    drafting = System(
        "drafting", "all", "engine", engine.name, chain_enabled=True, chain_tokens=tokens, chain_sources=(source,)
    )
    cell = Cell("select", 1, 0.0, "eos", options.tokens)
    warmup = load_prompts(WARMUP_SET)
    busy = machine.busy_share()
    tell(0.0, f"{candidate.name}: starting the engine")
    folder = candidate.folder if candidate.folder is not None else options.target.folder
    backend = EngineBackend(engine, cores, folder, logs)
    samples: dict[str, list[Sample]] = {drafting.name: [], OFF.name: []}
    try:
        backend.start(warmup[:2], [1], [0.0])
        for turn in range(options.repetitions):
            for place, system in enumerate((drafting, OFF)[:: -1 if turn % 2 else 1]):
                tell((2 * turn + place + 1) / (2 * options.repetitions + 1), f"{candidate.name} in the engine, {mode}, {tokens} tokens: {system.name}")  # fmt: skip
                work = [(cell, list(options.prompts))]
                samples[system.name] += backend.measure(work, system, turn, warmup[turn % len(warmup)])
    finally:
        backend.stop()
    return figures(samples[drafting.name], samples[OFF.name]) | {"other_load": round(busy, 3)}


def figures(drafting: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """What the turns amount to."""
    requests = [request for sample in drafting for request in sample.requests]
    committed = sum(request.tokens for request in requests)
    accepted = sum(int(sample.stats.get("accepted_tokens", 0)) for sample in drafting)
    overhead = percentile([value for sample in drafting for value in sample.overhead_ms], 0.5)
    misses = {
        name: int(sum(sample.stats.get(name, 0.0) for sample in drafting))
        for name in sorted({name for sample in drafting for name in sample.stats if name.startswith("miss:")})
    }
    return {
        "tokens_per_s": median(sample.tokens_per_s for sample in drafting),
        "plain_per_s": median(sample.tokens_per_s for sample in plain),
        "drafted": sum(int(sample.stats.get("drafted_tokens", 0)) for sample in drafting),
        "accepted": accepted,
        "committed": committed,
        "steps": committed - accepted,
        "overhead_ms": overhead,
        "by_request": [[request.accepted, request.drafted] for request in requests],
        "kv": {
            name: int(sum(sample.draft_stats.get(name, 0.0) for sample in drafting))
            for name in sorted({name for sample in drafting for name in sample.draft_stats if name.startswith("kv_")})
        },
        "without_draft": {name: count for name, count in misses.items() if count},
    }
