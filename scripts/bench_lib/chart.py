"""One picture for each prompt set: how fast each system is beside plain vLLM, batch by batch. Needs matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench_lib.statistics import row_key

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with every common colour blindness; relatives share a colour and differ in hatching.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
STYLES = {
    "plain_target_core": (GREY, ""),
    "ngram": (ORANGE, ""),
    "suffix": (GREEN, ""),
    "chain": (BLUE, ""),
    "chain_sync": (BLUE, "///"),
    "chain_no_kv": (BLUE, "xxx"),
    "chain_model": (SKY, ""),
    "chain_model_sync": (SKY, "///"),
    "chain_suffix": (PURPLE, ""),
    "chain_off": ("#FFFFFF", ""),
    "wrong_draft": (VERMILLION, ""),
    "always_the": (VERMILLION, "///"),
}
_OTHERS = (YELLOW, PURPLE, SKY, ORANGE, GREEN)  # chain_t1, chain_t2, ...

BASELINE: dict[str, Any] = {"color": "black", "linewidth": 1.2, "linestyle": "--"}
BAR_INCHES = 0.3
PANEL_INCHES = 3.6
LEGEND_COLUMNS = 4


@dataclass(frozen=True)
class Bar:
    """One system at one batch: tokens/s as a ratio to plain on all cores, with the extremes of the repetitions."""

    system: str
    batch: int
    ratio: float
    low: float
    high: float


Panel = tuple[float, str]  # temperature, until


def panels(runs: Sequence[dict[str, Any]], name: str) -> dict[Panel, list[Bar]]:
    """The bars of set ``name``. The baseline itself is the line at 1, and what cannot be compared with it has no bar."""
    found: dict[Panel, list[Bar]] = {}
    for row in runs:
        ratio, key = row["ratio_plain_all_cores"], row_key(row)
        if row["set"] != name or ratio is None or key.split("@")[0] == "plain":
            continue
        spread = row.get("paired_ratio_plain_all_cores") or {"min": ratio, "max": ratio}
        bar = Bar(key, row["batch"], ratio, min(spread["min"], ratio), max(spread["max"], ratio))
        found.setdefault((row["temperature"], row["until"]), []).append(bar)
    return found


def write_charts(result: dict[str, Any], path: Path) -> list[Path]:
    """Write ``<stem>-<set>.png`` beside the result at ``path``; returns the files. ``ImportError`` without matplotlib."""
    written = []
    for name in dict.fromkeys(row["set"] for row in result["runs"]):
        found = panels(result["runs"], name)
        if found:
            target = path.with_name(f"{path.stem}-{name}.png")
            _draw(name, found, list(result.get("systems", [])), target)
            written.append(target)
    return written


def _draw(name: str, found: dict[Panel, list[Bar]], order: list[str], target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [bar for panel in found.values() for bar in panel]
    systems = sorted({bar.system for bar in bars}, key=lambda s: _rank(s, order))
    batches = sorted({bar.batch for bar in bars})
    figure = Figure(
        figsize=(max(6.4, 1.2 + BAR_INCHES * len(batches) * (len(systems) + 1)), PANEL_INCHES * len(found) + 0.8),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(f"Prompt set “{name}”: tokens per second relative to plain vLLM on all cores", fontsize=11)
    axes = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axis, (panel, content) in zip(axes, sorted(found.items()), strict=True):
        _panel(axis, panel, content, systems, batches)
    figure.legend(handles=legend(systems), loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=9, frameon=False)
    figure.savefig(target, dpi=120)


def legend(systems: Sequence[str]) -> "list[Artist]":
    """Its entries are made here: a panel where a system is missing has no bar to take the look from."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Artist] = [Line2D([], [], label="plain, all cores", **BASELINE)]
    for system in systems:
        colour, hatch = style(system, systems)
        entries.append(Patch(label=system, facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.6))
    return entries


def _panel(axis: "Axes", panel: Panel, content: list[Bar], systems: list[str], batches: list[int]) -> None:
    temperature, until = panel
    axis.axhline(1.0, **BASELINE)
    width = 1 / (len(systems) + 1)
    for index, system in enumerate(systems):
        own = {bar.batch: bar for bar in content if bar.system == system}
        places = [batches.index(batch) + (index - (len(systems) - 1) / 2) * width for batch in own]
        heights = [bar.ratio for bar in own.values()]
        errors = [[b.ratio - b.low for b in own.values()], [b.high - b.ratio for b in own.values()]]
        colour, hatch = style(system, systems)
        axis.bar(places, heights, width, color=colour, hatch=hatch, edgecolor="black", linewidth=0.6)
        axis.errorbar(places, heights, yerr=errors, fmt="none", ecolor="black", elinewidth=0.9, capsize=2)
        for place, bar in zip(places, own.values(), strict=True):
            axis.annotate(f"{bar.ratio:.2f}", (place, bar.high), (0, 3), textcoords="offset points",
                          ha="center", va="bottom", rotation=90, fontsize=7,
                          bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6})  # fmt: skip
    axis.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axis.set_ylabel("ratio (error bars: min to max)", fontsize=9)
    ends = "forced length" if until == "length" else "the model ends by itself"
    axis.set_title(f"temperature {temperature:g}, {ends}", fontsize=10, loc="left")
    axis.set_ylim(0, 1.15 * max([1.0, *(bar.high for bar in content)]))
    axis.grid(axis="y", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)


def style(system: str, systems: Sequence[str]) -> tuple[str, str]:
    """Fill colour and hatching of a system; those behind HTTP are dotted."""
    name, _, way = system.partition("@")
    known = STYLES.get(name)
    if known is None:
        others = [each for each in systems if each.partition("@")[0] not in STYLES]
        known = _OTHERS[others.index(system) % len(_OTHERS)], "\\\\\\"
    colour, hatch = known
    return colour, hatch + ("..." if way else "")


def _rank(system: str, order: list[str]) -> tuple[int, str]:
    name = system.partition("@")[0]
    return (order.index(name) if name in order else len(order), system)
