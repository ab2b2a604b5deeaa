"""The result as JSON, as Markdown and for a terminal. All times in it are milliseconds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.profile_lib.bare_ends import KINDS
from scripts.profile_lib.channel import MODES
from scripts.profile_lib.contention import KEYS
from scripts.profile_lib.hops_near import HOPS

SPREAD = "median (min to 90th percentile)"


@dataclass(frozen=True)
class Part:
    """One table."""

    title: str
    headings: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


def parts(result: dict[str, Any]) -> list[Part]:
    """Tables of the sections that succeeded."""
    found = []
    if "channel" in result:
        found += channel(result["channel"])
    if "contention" in result:
        found.append(contention(result["contention"]["rows"]))
    if "steps" in result:
        found += steps(result["steps"])
    return found


def channel(section: dict[str, Any]) -> list[Part]:
    headings = ("Hop", *(f"{mode}: {figure}" for mode in MODES for figure in ("median", "p99")), "What it is")
    rows = [
        [
            hop,
            *(f"{section['hops'][mode][hop][figure]:.3f}" for mode in MODES for figure in ("median", "p99")),
            meaning,
        ]
        for hop, meaning in HOPS.items()
    ]
    note = "; ".join(
        f"{mode}: {section['hops'][mode]['round_trip']['count']} messages, {section['missed'][mode]} unanswered"
        for mode in MODES
    )
    trips = [
        [meaning, *(f"{section['round_trips'][kind][figure]:.3f}" for figure in ("median", "min", "p90", "p99"))]
        for kind, meaning in KINDS.items()
    ]
    return [
        Part("The channel: one message, hop by hop (ms), by what the draft does meanwhile", headings, rows, note + "."),
        Part(
            "Bare round trips to a quiet end (ms)",
            ("Connection", "median", "min", "p90", "p99"),
            trips,
            "To be compared with the channel's transport to a quiet draft.",
        ),
    ]


def contention(rows: Sequence[dict[str, Any]]) -> Part:
    headings = ("Draft", "Rows", "Target alone", "beside it", "slower", "Draft step alone", "beside target", "slower")
    content = []
    for row in rows:
        cells = [spread(row[f"{key}_ms"]) for key in KEYS]
        content.append(
            [
                row["draft"],
                str(row["rows"]),
                *cells[:2],
                times(row["target_slower"]),
                *cells[2:],
                times(row["draft_slower"]),
            ]
        )
    note = f"{SPREAD}. A draft step makes one token for each row. Slower: ratio within a repetition, median of those."
    return Part("Contention: a step on its own core, alone and beside the other (ms)", headings, content, note)


def steps(section: dict[str, Any]) -> list[Part]:
    verified = sorted({row["verified"] for row in section["rows"]})
    lines: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for row in section["rows"]:
        lines.setdefault((row["threads"], row["batch"]), {})[row["verified"]] = row
    headings = ("Threads", "Batch", *map(str, verified))
    cost = [[str(t), str(b), *(spread(line[v]["ms"]) for v in verified)] for (t, b), line in lines.items()]
    ratio = [[str(t), str(b), *(times(line[v]["ratio"]) for v in verified)] for (t, b), line in lines.items()]
    note = f"{SPREAD}. {section['uneven']} steps verified another number of tokens and are left out."
    return [
        Part("Steps: an engine step by drafted tokens verified for each sequence (ms)", headings, cost, note),
        Part("The same as ratio to the step that verifies none, within repetitions", headings, ratio),
    ]


def spread(value: dict[str, float]) -> str:
    return f"{value['median']:.1f} ({value['min']:.1f}-{value['p90']:.1f})"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def markdown(result: dict[str, Any]) -> str:
    """One table for each part, after what a reader must know to judge it."""
    load, probe = result["other_load"], result["speed_probe_ms"]
    lines = ["# Profile", "", f"Commit `{result['commit']}` on {result['machine']}.", ""]
    lines += [", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".", ""]
    lines += [
        f"- {result['repetitions']} repetitions, interleaved; target on cores {_list(result['cores']['target'])}, "
        f"draft on core {result['cores']['draft']}.",
        f"- Other programs used {load['before']:.0%} of the machine before and {load['after']:.0%} after. A fixed piece of work took "
        f"{probe['before']:.1f} ms before and {probe['after']:.1f} ms after.",
    ]
    lines += [f"- **{section} was not measured:** {reason}" for section, reason in result["failed"].items()]
    for part in parts(result):
        lines += section_lines(part)
    return "\n".join(lines) + "\n"


def section_lines(part: Part) -> list[str]:
    """Lines of Markdown: a heading, the table, the note."""
    lines = [
        "",
        f"## {part.title}",
        "",
        "| " + " | ".join(part.headings) + " |",
        "|" + "---|" * len(part.headings),
    ]
    lines += ["| " + " | ".join(row) + " |" for row in part.rows]
    return lines + (["", part.note] if part.note else [])


def table(part: Part) -> Table:
    """The same for a terminal."""
    result = Table(title=part.title, caption=part.note, title_justify="left", caption_justify="left")
    for index, heading in enumerate(part.headings):
        result.add_column(heading, justify="left" if index == 0 or heading == part.headings[-1] else "right")
    for row in part.rows:
        result.add_row(*row)
    return result


def write(result: dict[str, Any], path: Path) -> Path:
    """Write JSON and, beside it, Markdown; returns the Markdown's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    page.write_text(markdown(result), encoding="utf-8")
    return page


def rounded(value: Any) -> Any:
    """Floats to four decimals, everything else as it is."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _list(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))
