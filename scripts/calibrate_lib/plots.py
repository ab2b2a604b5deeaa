"""Two pictures of a sweep: what changes with the knob, and what is gained for what is changed. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench_lib.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from scripts.calibrate_lib.floors import Floor
from scripts.calibrate_lib.intervals import Estimate
from scripts.calibrate_lib.knobs import swept_knob
from scripts.calibrate_lib.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Figure, label, colour; shares of 1.
SHARES = (
    ("changed", "answers changed", VERMILLION),
    ("differing", "tokens that differ", ORANGE),
    ("relaxed", "tokens let pass", PURPLE),
    ("agreement", "answers that agree", GREEN),
    ("score", "task score", BLUE),
)
RATIOS = (("perplexity_ratio", "perplexity", SKY), ("step_gain", "tokens a step", BLUE))
MARKS = "osD^v"


def write_plots(table: Sequence[Row], floor: Floor, out: Path) -> list[Path]:
    """Write ``<stem>-<policy>.png`` for each policy swept and ``<stem>-trade.png``; returns them."""
    written = []
    policies = list(dict.fromkeys(row.setting.swept for row in table if row.setting.swept))
    for policy in policies:
        rows = [row for row in table if row.setting.swept == policy]
        if len({row.setting.value for row in rows}) > 1:
            path = out.with_name(f"{out.stem}-{policy}.png")
            _sweep(policy, rows, path)
            written.append(path)
    if any(row.setting.lossy for row in table):
        path = out.with_name(f"{out.stem}-trade.png")
        _trade(table, floor, path)
        written.append(path)
    return written


def _sweep(policy: str, rows: Sequence[Row], path: Path) -> None:
    """Against the knob; with several combinations of other knobs, only the first of each value."""
    first = list({row.setting.value: row for row in reversed(rows)}.values())
    first.sort(key=lambda row: row.setting.value)
    figure, (upper, lower) = _figure((7.2, 6.4), 2)
    knob = swept_knob(policy)
    positions = list(range(len(first)))  # δ spans decades and may be 0: evenly spaced
    for axis, curves in ((upper, SHARES), (lower, RATIOS)):
        for name, label, colour in curves:
            _curve(axis, positions, [getattr(row.all, name) for row in first], label, colour)
    _curve(lower, positions, [row.speed.to_lossless for row in first], "tokens/s", VERMILLION)
    lower.axhline(1.0, color="black", linewidth=1.0, linestyle="--")
    upper.set_ylabel("share (bars: 95 %)")
    lower.set_ylabel("ratio to lossless (bars: 95 %)")
    upper.set_ylim(-0.02, 1.02)
    for axis in (upper, lower):
        axis.set_xticks(positions, [f"{row.setting.value:g}" for row in first])
        axis.grid(linewidth=0.4, alpha=0.6)
        axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    lower.set_xlabel("δ" if knob == "delta" else knob)
    figure.suptitle(f"{policy}: what changes with {'δ' if knob == 'delta' else knob}", fontsize=11)
    figure.savefig(path, dpi=120)


def _curve(axis: "Axes", positions: Sequence[int], values: Sequence[Estimate | None], label: str, colour: str) -> None:
    known = [(place, value) for place, value in zip(positions, values, strict=True) if value is not None]
    if not known:
        return
    below = [value.value - (value.low if value.low is not None else value.value) for _, value in known]
    above = [(value.high if value.high is not None else value.value) - value.value for _, value in known]
    axis.errorbar(
        [place for place, _ in known], [value.value for _, value in known], yerr=[below, above], label=label, color=colour,
        marker="o", markersize=4, linewidth=1.3, elinewidth=0.8, capsize=2,
    )  # fmt: skip


def _trade(table: Sequence[Row], floor: Floor, path: Path) -> None:
    """Each setting: answers changed against tokens a step, with the speed where it was measured."""
    gains: dict[str, Callable[[Row], Estimate | None]] = {"tokens a step × lossless": lambda row: row.all.step_gain}
    if any(row.speed.to_lossless is not None for row in table if row.setting.lossy):
        gains["tokens/s × lossless"] = lambda row: row.speed.to_lossless
    figure, axes = _figure((0.6 + 4.5 * len(gains), 4.2), 1, len(gains))
    kinds = list(dict.fromkeys(row.setting.swept or "presets" for row in table if row.setting.lossy))
    for axis, (title, gain_of) in zip(axes, gains.items(), strict=True):
        labels: dict[tuple[float, float], list[str]] = {}  # settings that do the same share a point
        for kind in kinds:
            rows = [row for row in table if row.setting.lossy and (row.setting.swept or "presets") == kind]
            colour, mark = (
                (BLUE, ORANGE, GREEN, PURPLE, VERMILLION)[kinds.index(kind) % 5],
                MARKS[kinds.index(kind) % 5],
            )
            for row in rows:
                gain = gain_of(row)
                if gain is not None and row.all.changed is not None:
                    _point(axis, row.all.changed, gain, colour, mark)
                    labels.setdefault((row.all.changed.value, gain.value), []).append(
                        f"{row.setting.value:g}" if row.setting.swept else row.setting.name
                    )
            axis.scatter([], [], color=colour, marker=mark, label=kind)
        for place, names in labels.items():
            axis.annotate(", ".join(names), place, (3, 3), textcoords="offset points", fontsize=7)
        axis.axhline(1.0, color="black", linewidth=1.0, linestyle="--")
        if floor.metric == "changed":
            axis.axvline(floor.limit, color=GREY, linewidth=1.0, linestyle=":", label="floor")
        axis.margins(x=0.3, y=0.15)  # room for names
        axis.set_xlabel("answers changed")
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(linewidth=0.4, alpha=0.6)
        axis.legend(fontsize=8, frameon=False)
    figure.suptitle("What is gained for what is changed (bars: 95 %)", fontsize=11)
    figure.savefig(path, dpi=120)


def _point(axis: "Axes", changed: Estimate, gain: Estimate, colour: str, mark: str) -> None:
    sides = [[changed.value - (changed.low or 0.0)], [(changed.high or changed.value) - changed.value]]
    ends = None
    if gain.low is not None and gain.high is not None:
        ends = [[gain.value - gain.low], [gain.high - gain.value]]
    axis.errorbar(
        [changed.value],
        [gain.value],
        xerr=sides,
        yerr=ends,
        fmt=mark,
        color=colour,
        markersize=4,
        elinewidth=0.5,
        alpha=0.8,
    )


def _figure(size: tuple[float, float], rows: int, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())
