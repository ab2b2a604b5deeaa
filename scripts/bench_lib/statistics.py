"""Pure figures: what the raw measurements of one run of the benchmark amount to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from scripts.bench_lib.cells import Cell, System

# Parts of a mean round of the chain, and what its counters call them (milliseconds).
ROUND_COSTS = {"verify": "verify_ms", "wait": "wait_ms", "draft": "draft_ms", "overhead": "overhead_ms"}


@dataclass(frozen=True)
class RequestFigures:
    """One answered request. ``tokens`` are completion tokens: what the client got, never what a draft guessed."""

    tokens: int
    drafted: int = 0
    accepted: int = 0
    verifies: int = 0  # engine steps of this request that checked a draft


@dataclass(frozen=True)
class Sample:
    """One system, one cell, one repetition."""

    cell: Cell
    system: System
    repetition: int
    seconds: float
    requests: tuple[RequestFigures, ...]
    overhead_ms: tuple[float, ...] = field(default=(), repr=False)  # round - draft - verify, one for each round
    cpu_seconds: float | None = None  # of the engine's process; None behind a URL
    draft_cpu_seconds: float | None = None  # of the draft's, where it has one
    stats: dict[str, float] = field(default_factory=dict, repr=False)  # the chain's own counters, where it has them
    draft_stats: dict[str, float] = field(default_factory=dict, repr=False)  # likewise the draft process' own

    @property
    def tokens_per_s(self) -> float:
        return sum(request.tokens for request in self.requests) / self.seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    if not values:
        raise ValueError("no values")
    return {"median": median(values), "min": min(values), "max": max(values)}


def percentile(values: Iterable[float], share: float) -> float | None:
    """Nearest-rank percentile, ``share`` in (0, 1]; None without values."""
    ordered = sorted(values)
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    if not ordered:
        return None
    rank = -(-len(ordered) * round(share * 1000) // 1000)  # ceil without float error
    return ordered[max(0, rank - 1)]


def acceptance(requests: Iterable[RequestFigures]) -> dict[str, Any]:
    """Accepted share of drafted tokens: pooled over all tokens, and as the mean over requests (with its extremes)."""
    drafting = [request for request in requests if request.drafted]
    if not drafting:
        return {"pooled": None, "per_request": None}
    shares = [request.accepted / request.drafted for request in drafting]
    return {
        "pooled": sum(r.accepted for r in drafting) / sum(r.drafted for r in drafting),
        "per_request": fmean(shares),
        "per_request_min": min(shares),
        "per_request_max": max(shares),
    }


def tokens_per_verify(requests: Iterable[RequestFigures]) -> float | None:
    """Tokens a step that checked a draft brought: its accepted ones and the target's own. None if none was checked."""
    rows = list(requests)
    verifies = sum(row.verifies for row in rows)
    return (verifies + sum(row.accepted for row in rows)) / verifies if verifies else None


def drafted_rounds(requests: Iterable[RequestFigures]) -> float | None:
    """Share of the sequences' engine steps that checked a draft. Each step brings one token of the target's own."""
    rows = list(requests)
    steps = sum(row.tokens - row.accepted for row in rows)
    return sum(row.verifies for row in rows) / steps if steps else None


def outcome_cache(samples: Iterable[Sample]) -> dict[str, Any] | None:
    """How often the draft had already followed the target's own token when it differed from the guess; None: not counted."""
    counted = [s.draft_stats for s in samples if "cache_hits" in s.draft_stats]
    if not counted:
        return None
    hits = sum(stats["cache_hits"] for stats in counted)
    misses = sum(stats.get("cache_misses", 0.0) for stats in counted)
    return {"hit_rate": hits / (hits + misses) if hits + misses else None, "hits": int(hits), "misses": int(misses)}


def round_costs(samples: Iterable[Sample]) -> dict[str, float] | None:
    """Milliseconds of a mean round by what they were spent on, over all samples; None where the chain does not say."""
    parts: dict[str, float] = {}
    rows = [s.stats for s in samples if s.stats.get("rounds", 0.0) > 0]
    for part, name in ROUND_COSTS.items():
        known = [stats for stats in rows if name in stats]
        if known:
            rounds = sum(stats["rounds"] for stats in known)
            parts[part] = sum(stats[name] * stats["rounds"] for stats in known) / rounds
    return parts or None


def row_key(row: dict[str, Any]) -> str:
    """A row's system under its unique name, as :attr:`System.key`."""
    return System(row["system"], row["cores"], row["via"], "").key


def ratio(samples: Sequence[Sample], baseline: Sequence[Sample]) -> float | None:
    """Ratio of the medians; None when there is nothing to compare with."""
    if not samples or not baseline:
        return None
    return median(s.tokens_per_s for s in samples) / median(s.tokens_per_s for s in baseline)


def paired_spread(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, float] | None:
    """Spread of the ratios within each repetition: both sides ran within seconds of each other."""
    base = {s.repetition: s.tokens_per_s for s in baseline}
    ratios = [s.tokens_per_s / base[s.repetition] for s in samples if s.repetition in base]
    return spread(ratios) if ratios else None


def summarise(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row for each cell and system, in order of first appearance."""
    groups: dict[tuple[Cell, System], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.cell, sample.system), []).append(sample)

    def baseline(cell: Cell, cores: str, via: str) -> list[Sample]:
        for (other, system), rows in groups.items():
            if other == cell and (system.name, system.cores, system.via) == ("plain", cores, via):
                return rows
        return []

    return [
        _row(cell, system, rows, baseline(cell, "all", system.via), baseline(cell, "target", system.via))
        for (cell, system), rows in groups.items()
    ]


def _row(
    cell: Cell, system: System, rows: list[Sample], plain_all: list[Sample], plain_target: list[Sample]
) -> dict[str, Any]:
    requests = [request for sample in rows for request in sample.requests]
    overhead = [value for sample in rows for value in sample.overhead_ms]
    row: dict[str, Any] = {
        "set": cell.set,
        "batch": cell.batch,
        "temperature": cell.temperature,
        "system": system.name,
        "until": cell.until,
        "cores": system.cores,
        "via": system.via,
        "tokens_per_s": spread([sample.tokens_per_s for sample in rows]),
        "ratio_plain_all_cores": ratio(rows, plain_all),
        "ratio_plain_target_core": ratio(rows, plain_target),
        "acceptance": acceptance(requests),
        "tokens_per_verify": tokens_per_verify(requests),
        # beyond the fixed schema
        "paired_ratio_plain_all_cores": paired_spread(rows, plain_all),
        "paired_ratio_plain_target_core": paired_spread(rows, plain_target),
        "repetitions": len(rows),
        "requests": len(requests),
        "completion_tokens": sum(request.tokens for request in requests),
    }
    if overhead:
        row["round_overhead_ms"] = {"p50": percentile(overhead, 0.5), "p99": percentile(overhead, 0.99)}
    worked = [sample.cpu_seconds / sample.seconds for sample in rows if sample.cpu_seconds is not None]
    if worked:  # below what the engine could use, somebody else had the processors (or it waited for a draft)
        row["engine_cores_used"] = spread(worked)
        row["cpu_ms_per_token"] = {
            "engine": median(_per_token(sample, sample.cpu_seconds) for sample in rows),
            "draft": median(_per_token(sample, sample.draft_cpu_seconds) for sample in rows),
        }
    cache, costs = outcome_cache(rows), round_costs(rows)
    if cache is not None:
        row["outcome_cache"] = cache
    if costs is not None:
        row["round_ms"] = costs
    misses = _misses(rows)
    if misses:
        row["rounds_without_draft"] = misses
    return row


def _per_token(sample: Sample, seconds: float | None) -> float:
    return 1e3 * (seconds or 0.0) / sum(request.tokens for request in sample.requests)


def _misses(rows: list[Sample]) -> dict[str, int]:
    total: dict[str, int] = {}
    for sample in rows:
        for name, value in sample.stats.items():
            if name.startswith(("miss:", "dropped:")) and value:
                total[name] = total.get(name, 0) + int(value)
    return total


def round_overhead(samples: Iterable[Sample]) -> dict[str, float | None]:
    """Over every round of the chain with its real draft, whatever the cell."""
    values = [v for s in samples if s.system.engine == "chain" for v in s.overhead_ms]
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
