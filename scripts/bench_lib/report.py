"""Result object, its Markdown and its terminal table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.bench_lib import machine, schema, statistics
from scripts.bench_lib.statistics import ROUND_COSTS, Sample

HEADINGS = ("System", "Cores", "Via", "Tokens/s", "min-max", "x plain (all cores)", "x plain (target core)", "Accepted",
            "per request", "Tokens/verify", "Cache hits", "Round ms")  # fmt: skip
PHASES = ("Phase", "Batch", "Tokens/s", "Accepted", "Tokens/verify", "Drafted rounds")


def build(samples: Sequence[Sample], root: Path, **more: Any) -> dict[str, Any]:
    """The whole result; raises ``ValueError`` when it breaks its own schema."""
    result: dict[str, Any] = {
        "commit": machine.commit(root),
        "machine": machine.machine(),
        "versions": machine.versions(),
        **more,
        "runs": statistics.summarise(samples),
        "round_overhead_ms": statistics.round_overhead(samples),
    }
    found = schema.problems(result)
    if found:
        raise ValueError("result breaks its schema: " + "; ".join(found[:5]))
    return result


def write(result: dict[str, Any], path: Path) -> Path:
    """Write JSON and, beside it, Markdown; returns the Markdown's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    page.write_text(markdown(result), encoding="utf-8")
    return page


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def markdown(result: dict[str, Any]) -> str:
    """One table for each cell."""
    lines = ["# Benchmark", "", f"Commit `{result['commit']}` on {result['machine']}.", ""]
    lines += [", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items()) + ".", ""]
    lines += [f"- {note}" for note in result.get("notes", [])]
    lines += [f"- Left out: {name}: {reason}" for name, reason in result.get("left_out", {}).items()]
    overhead = result["round_overhead_ms"]
    lines += [f"- Overhead of a round (round - draft - verify): p50 {_ms(overhead['p50'])}, p99 {_ms(overhead['p99'])}"]
    lines += [
        "- Cache hits: how often the draft had already followed the token that the target chose against its guess. "
        f"Round ms: {' / '.join(ROUND_COSTS)} of a mean round."
    ]
    if "transition" in result:
        lines += ["", "## Changing load on the chain's engine", "", *_rows(PHASES, phases(result["transition"]))]
    for title, rows in cells(result):
        lines += ["", f"## {title}", "", *_rows(HEADINGS, [columns(row) for row in rows])]
    return "\n".join(lines) + "\n"


def _rows(headings: Sequence[str], content: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    head = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return head + ["| " + " | ".join(row) + " |" for row in content]


def phases(transition: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Table cells of the changing load's phases."""
    return [
        [
            str(row["phase"]),
            str(row["batch"]),
            f"{row['tokens_per_s']:.1f}",
            _number(row["acceptance"]),
            _number(row["tokens_per_verify"]),
            _number(row["drafted_rounds"]),
        ]
        for row in transition
    ]


def phase_table(transition: Sequence[dict[str, Any]]) -> Table:
    """The changing load for a terminal."""
    result = Table(title="changing load on the chain's engine", title_justify="left", header_style="bold")
    for heading in PHASES:
        result.add_column(heading, justify="right")
    for row in phases(transition):
        result.add_row(*row)
    return result


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The same for a terminal, where a system's unique name says which cores it has and how it was reached."""
    result = Table(title=title, title_justify="left", header_style="bold", padding=(0, 1), min_width=60)
    for heading in ("System", *HEADINGS[3:]):
        text = heading.replace(" (", "\n(").replace(" r", "\nr").replace("/v", "\n/v").replace(" h", "\nh")
        result.add_column(text.replace(" c", "\nc"), justify="left" if heading == "System" else "right", no_wrap=True)
    for row in rows:
        style = "green" if row["system"].startswith("chain") else None
        result.add_row(statistics.row_key(row), *columns(row)[3:], style=style)
    return result


def cells(result: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows grouped by cell, with a title each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result["runs"]:
        title = f"{row['set']}, batch {row['batch']}, temperature {row['temperature']:g}, until {row['until']}"
        groups.setdefault(title, []).append(row)
    order = list(result.get("systems", []))

    def rank(row: dict[str, Any]) -> tuple[int, str]:
        name = statistics.row_key(row).split("@")[0]
        return (order.index(name) if name in order else len(order), row["via"])

    return [(title, sorted(rows, key=rank)) for title, rows in groups.items()]


def columns(row: dict[str, Any]) -> list[str]:
    rates, accepted = row["tokens_per_s"], row["acceptance"]
    return [
        row["system"],
        row["cores"],
        row["via"],
        f"{rates['median']:.1f}",
        f"{rates['min']:.1f}-{rates['max']:.1f}",
        _number(row["ratio_plain_all_cores"]),
        _number(row["ratio_plain_target_core"]),
        _number(accepted["pooled"]),
        _number(accepted["per_request"]),
        _number(row["tokens_per_verify"]),
        _number((row.get("outcome_cache") or {}).get("hit_rate")),
        _costs(row.get("round_ms") or {}),
    ]


def _costs(parts: dict[str, float]) -> str:
    return " / ".join(f"{parts[part]:.1f}" if part in parts else "-" for part in ROUND_COSTS) if parts else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} ms"
