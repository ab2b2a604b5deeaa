"""One picture: acceptance by position, and predicted tokens a second by length of drafts. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from scripts.bench_lib.chart import BASELINE, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from scripts.select_lib.acceptance import DEPTH
from scripts.select_lib.answers import GREEDY, SAMPLED
from scripts.select_lib.rows import LENGTHS, Row
from scripts.select_lib.trial import SYNCHRONOUS

COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY)


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Write ``path``, a PNG. Solid: greedy, or overlapped; dashed: sampled, or synchronous; crosses: measured in the engine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for place, row in enumerate(rows):
        colour = COLOURS[place % len(COLOURS)]
        for kind, style in ((GREEDY, "-"), (SAMPLED, "--")):
            shares = row.rounds(kind, DEPTH).by_position()
            known = [(at, share) for at, share in zip(LENGTHS, shares, strict=True) if share is not None]
            label = row.candidate.name if kind == GREEDY else None
            left.plot([at for at, _ in known], [share for _, share in known], style, color=colour, marker="o", markersize=3, label=label)  # fmt: skip
        plain = row.plain(1)
        for mode, found in row.predictions(1).items():
            style = "--" if mode == SYNCHRONOUS else "-"
            right.plot([p.tokens for p in found], [p.tokens_per_s / plain for p in found], style, color=colour, marker="o", markersize=3)  # fmt: skip
        for trial in row.trials:
            right.plot([trial.tokens], [trial.speedup], "x", color=colour, markersize=9, markeredgewidth=2)
    right.axhline(1.0, **BASELINE)
    left.set_ylim(0, 1.02)
    left.set_ylabel("accepted, given all before were")
    left.set_title("acceptance (dashed: sampled at temperature 1)", fontsize=10, loc="left")
    left.set_xlabel("position in the draft")
    right.set_ylabel("× plain decoding, one request at a time")
    right.set_title("predicted (dashed: synchronous; ×: measured)", fontsize=10, loc="left")
    right.set_xlabel("tokens a round")
    for axis in (left, right):
        axis.set_xticks(list(LENGTHS))
        axis.grid(linewidth=0.4, alpha=0.6)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
