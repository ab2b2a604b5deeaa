"""From records to figures, their JSON, their Markdown, and a sentence on whether the chain helps."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from scripts.answers_lib.questions import Question
from scripts.answers_lib.records import Record
from scripts.answers_lib.statistics import Values, accuracy, consistency, interval, ratio
from scripts.answers_lib.systems import System, reading

HEADINGS = (
    "System",
    "Right",
    "95%",
    "Consistent",
    "95%",
    "All wordings right",
    "Seconds p50",
    "x time",
    "x target CPU",
    "x passes",
)
BASELINE = "target"


def summarise(
    records: Sequence[Record], systems: Sequence[System], questions: Sequence[Question], wordings: int
) -> dict[str, Any]:
    """Figures of every system over the questions that all of them have answered in every wording.

    Raises:
        ValueError: there is no such question.
    """
    found = {record.key: record for record in records}
    asked = whole(records, systems, questions, wordings)
    if not asked:
        raise ValueError("no question has been answered by every system in every wording")
    grids = {s.name: [[found[_origin(s), q.id, w] for w in range(wordings)] for q in asked] for s in systems}
    rows = {s.name: _row(s, asked, grids[s.name], grids.get(BASELINE)) for s in systems}
    result: dict[str, Any] = {
        "questions": len(asked),
        "wordings": wordings,
        "systems": {name: row for name, (row, _, _) in rows.items()},
        "outcomes": {
            s.name: outcomes(grids[s.name], rows[s.name][1], grids.get(BASELINE))
            for s in systems
            if s.chain is not None and s.name != BASELINE
        },
    }
    if BASELINE in rows:
        _, right, steady = rows[BASELINE]
        result["compared_with_target"] = {
            name: {
                "accuracy": interval(accuracy(own) - accuracy(right)),
                "consistency": interval(own_steady - steady) if wordings > 1 else None,
            }
            for name, (_, own, own_steady) in rows.items()
            if name != BASELINE
        }
    return result


def whole(
    records: Sequence[Record], systems: Sequence[System], questions: Sequence[Question], wordings: int
) -> list[Question]:
    """The questions that every system has answered in every wording."""
    known = {record.key for record in records}
    return [q for q in questions if all((_origin(s), q.id, w) in known for s in systems for w in range(wordings))]


def _origin(system: System) -> str:
    return system.name if system.chain is not None else "chain"


def _row(
    system: System, questions: Sequence[Question], grid: list[list[Record]], base: list[list[Record]] | None
) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.bool_]], Values]:
    readings = [[reading(system, q, r) for r in row] for q, row in zip(questions, grid, strict=True)]
    right = np.asarray([[a == q.right for a in row] for q, row in zip(questions, readings, strict=True)], np.bool_)
    steady = consistency(readings)
    row: dict[str, Any] = {
        "title": system.title,
        "accuracy": interval(accuracy(right)),
        "consistency": interval(steady) if grid and len(grid[0]) > 1 else None,
        "all_wordings_right": float(right.all(axis=1).mean()),
        "unreadable": float(np.mean([a is None for line in readings for a in line])),
        "by_kind": {
            kind: float(np.mean([line.mean() for line, q in zip(right, questions, strict=True) if q.kind == kind]))
            for kind in dict.fromkeys(q.kind for q in questions)
        },
    }
    if system.chain is not None:
        row |= costs(grid, base if base is not grid else None)
    return row, right, steady


def costs(grid: list[list[Record]], base: list[list[Record]] | None) -> dict[str, Any]:
    """Time and the target's work, and as ratios of sums to the target alone (over the same questions)."""
    flat = [record for line in grid for record in line]
    row: dict[str, Any] = {
        "seconds_p50": float(np.median([record.seconds for record in flat])),
        "tokens_mean": float(np.mean([record.tokens for record in flat])),
    }
    if base is None:
        return row
    pairs = [
        (own.text, alone.text)
        for line, other in zip(grid, base, strict=True)
        for own, alone in zip(line, other, strict=True)
    ]
    row["same_text"] = float(np.mean([own == alone for own, alone in pairs]))
    row["time_ratio"] = ratio(_sums(grid, "seconds"), _sums(base, "seconds"))
    row["passes_ratio"] = ratio(_sums(grid, "passes"), _sums(base, "passes"))
    if all(record.cpu_seconds is not None for line in [*grid, *base] for record in line):
        row["cpu_ratio"] = ratio(_sums(grid, "cpu_seconds"), _sums(base, "cpu_seconds"))
    return row


def _sums(grid: list[list[Record]], field: str) -> Values:
    return np.asarray([sum(getattr(record, field) for record in line) for line in grid], np.float64)


def outcomes(
    grid: list[list[Record]], right: np.ndarray[Any, np.dtype[np.bool_]], base: list[list[Record]] | None
) -> dict[str, dict[str, Any]]:
    """The same by what the drafts amounted to. Each request is its own here: wordings of a question differ in outcome."""
    found: dict[str, list[tuple[Record, Record | None, bool]]] = {}
    for q, line in enumerate(grid):
        for w, record in enumerate(line):
            alone = base[q][w] if base is not None else None
            found.setdefault(record.outcome or "none told", []).append((record, alone, bool(right[q, w])))
    result = {}
    for outcome, items in sorted(found.items()):
        chained, plain = [[r] for r, _, _ in items], [[p] for _, p, _ in items if p is not None]
        result[outcome] = {
            "requests": len(items),
            "accuracy": float(np.mean([ok for _, _, ok in items])),
            **costs(chained, plain if len(plain) == len(chained) else None),
        }
    return result


def verdict(result: Mapping[str, Any]) -> list[str]:
    """Whether it helps on this pair, as far as the figures can tell."""
    said = []
    for name, compared in result.get("compared_with_target", {}).items():
        for what, figures in compared.items():
            if figures is not None:
                said.append(f"`{name}`: {what} {_difference(figures)}.")
    for name, row in result["systems"].items():
        if "same_text" in row:
            said.append(f"`{name}`: word for word what the target alone answers in {row['same_text']:.0%} of requests.")
    for name, parts in result.get("outcomes", {}).items():
        figures = parts.get("consensus", {})
        if "time_ratio" in figures:
            work = f"{figures['cpu_ratio'][0]:.2f} times the target's processor time" if "cpu_ratio" in figures else ""
            time = f"{figures['time_ratio'][0]:.2f} times the time of the target's plain answer"
            said.append(
                f"`{name}`, where drafts agree ({figures['requests']} requests): {' and '.join(filter(None, [time, work]))}."
            )
    return said


def _difference(figures: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in figures)
    span = f"({mean:+.1f} points, 95% interval {low:+.1f} to {high:+.1f})"
    if low == high == 0:
        return "the same as the target's alone"
    if low <= 0 <= high:
        return f"not measurably different from the target's alone {span}"
    return f"{'higher' if mean > 0 else 'lower'} than the target's alone {span}"


def write(result: Mapping[str, Any], path: Path) -> Path:
    """Write JSON and, beside it, Markdown; returns the Markdown's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    page.write_text(markdown(result), encoding="utf-8")
    return page


def markdown(result: Mapping[str, Any]) -> str:
    """The whole result as a page."""
    lines = ["# Does the answer chain help?", ""]
    lines += [f"`scripts/answers`, commit `{result.get('commit', '')}`, {result.get('machine', '')}.", ""]
    lines += [f"- {note}" for note in result.get("notes", [])]
    lines += [f"- Left out: `{name}`: {why}" for name, why in result.get("left_out", {}).items()]
    lines += ["", *[f"- {sentence}" for sentence in verdict(result)], ""]
    lines += _table(HEADINGS, [cells(name, row) for name, row in result["systems"].items()])
    lines += ["", *[f"- `{name}`: {row['title']}" for name, row in result["systems"].items()]]
    kinds = list(next(iter(result["systems"].values()))["by_kind"])
    shares = [[name, *(f"{row['by_kind'][k]:.2f}" for k in kinds)] for name, row in result["systems"].items()]
    lines += ["", "## Right answers by kind", "", *_table(("System", *kinds), shares)]
    parts = [
        [name, outcome, str(row["requests"]), f"{row['accuracy']:.2f}", *(_ratio(row.get(key)) for key in RATIOS)]
        for name, found in result["outcomes"].items()
        for outcome, row in found.items()
    ]
    head = ("System", "Drafts", "Requests", "Right", "x time", "x target CPU", "x passes")
    return "\n".join([*lines, "", "## By what the drafts amounted to", "", *_table(head, parts)]) + "\n"


RATIOS = ("time_ratio", "cpu_ratio", "passes_ratio")


def cells(name: str, row: Mapping[str, Any]) -> list[str]:
    """One line of the main table."""
    steady = row["consistency"]
    return [
        name,
        f"{row['accuracy'][0]:.3f}",
        _span(row["accuracy"]),
        f"{steady[0]:.3f}" if steady else "",
        _span(steady) if steady else "",
        f"{row['all_wordings_right']:.3f}",
        f"{row['seconds_p50']:.2f}" if "seconds_p50" in row else "",
        *(_ratio(row.get(key)) for key in RATIOS),
    ]


def table(result: Mapping[str, Any]) -> Table:
    """The main table for a terminal."""
    found = Table(title=f"{result['questions']} questions, {result['wordings']} wordings each", title_justify="left")
    for heading in HEADINGS:
        found.add_column(heading, justify="left" if heading == "System" else "right")
    for name, row in result["systems"].items():
        found.add_row(*cells(name, row))
    return found


def _span(figures: Sequence[float]) -> str:
    return f"{figures[1]:.2f}-{figures[2]:.2f}"


def _ratio(figures: Sequence[float] | None) -> str:
    return f"{figures[0]:.2f} ({_span(figures)})" if figures else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
