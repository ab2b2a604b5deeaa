"""Result object, its Markdown and its terminal table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.bench_lib import machine, schema, statistics
from scripts.bench_lib.statistics import Sample

HEADINGS = ("System", "Cores", "Via", "Tokens/s", "min-max", "x plain (all cores)", "x plain (target core)", "Accepted",
            "per request", "Tokens/verify")  # fmt: skip


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
    for title, rows in cells(result):
        lines += ["", f"## {title}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += ["| " + " | ".join(columns(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The same for a terminal."""
    result = Table(title=title, title_justify="left", header_style="bold", padding=(0, 1), min_width=60)
    for index, heading in enumerate(HEADINGS):
        text = heading.replace(" (", "\n(").replace(" r", "\nr").replace("/v", "\n/v")
        result.add_column(text, justify="left" if index < 3 else "right", no_wrap=True)
    for row in rows:
        result.add_row(*columns(row), style="green" if row["system"].startswith("chain") else None)
    return result


def cells(result: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows grouped by cell, with a title each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result["runs"]:
        title = f"{row['set']}, batch {row['batch']}, temperature {row['temperature']:g}, until {row['until']}"
        groups.setdefault(title, []).append(row)
    order = list(result.get("systems", []))

    def rank(row: dict[str, Any]) -> tuple[int, str]:
        name = "plain_target_core" if (row["system"], row["cores"]) == ("plain", "target") else row["system"]
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
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} ms"
