"""The record of a training: what was learned from, how, how it went and how good it is. JSON, Markdown and a picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hw.onnx.checkpoint import CheckpointError, Manifest
from scripts.bench_lib.chart import BLUE, GREEN, VERMILLION
from scripts.distil_lib.held_out import held_out
from scripts.distil_lib.measure import Figures
from scripts.distil_lib.shards import TEXT, read_shard, shard_names

LICENCES = {
    "SmolLM2": "SmolLM2-135M-Instruct is under Apache-2.0 (Hugging Face); these weights were derived from it and are under it, too."
}


def data_of(folder: Path, weights: str) -> dict[str, Any]:
    """What there is to learn from, counted."""
    found: dict[str, Any] = {
        "shards": 0, "answers": 0, "answer_tokens": 0, "held_out_answers": 0, "kinds": {}, "sampled_answers": 0, "texts": 0,
    }  # fmt: skip
    for name in shard_names(folder):
        found["shards"] += 1
        for sequence in read_shard(folder, name, weights):
            if held_out(sequence.hashed):
                found["held_out_answers"] += 1
                continue
            found["answers"] += 1
            found["answer_tokens"] += sequence.answer
            found["sampled_answers"] += sequence.temperature > 0
            found["texts"] += sequence.temperature == TEXT
            found["kinds"][sequence.kind] = found["kinds"].get(sequence.kind, 0) + 1
    return found


def licence(target: Path) -> str:
    """What is to be said about the target's licence."""
    try:
        source = Manifest.read(target).source
    except CheckpointError:
        source = target.resolve().name
    for name, text in LICENCES.items():
        if name.casefold() in source.casefold():
            return text
    return f"Derived from {source}: that model's licence applies."


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """``path`` (JSON, the curve a point a line) and beside it the same for people: ``.md``."""
    head = json.dumps({name: value for name, value in record.items() if name != "curve"}, indent=1)
    points = ",\n".join(f"  {json.dumps(point)}" for point in record.get("curve", []))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-2]},\n "curve": [\n{points}\n ]\n}}\n', encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(record), encoding="utf-8")


def markdown(record: Mapping[str, Any]) -> str:
    """The record as a page."""
    data, trained, recipe = record["data"], record["trained"], record["recipe"]
    kinds = ", ".join(f"{count} {kind or 'unnamed'}" for kind, count in sorted(data["kinds"].items()))
    lines = [
        f"# {record['name']}",
        "",
        f"A {record['kind']} draft of {record['target']['source']} (weights `{record['target']['weights'][:16]}`). {record['licence']}",
        "",
        "| measured on | answers | first guess right | by place in a draft of four | tokens a verify |",
        "|---|---|---|---|---|",
    ]
    for name, entry in record["measured"].items():
        figures = entry["figures"]
        places = ", ".join(f"{share:.2f}" for share in figures["acceptance"])
        lines.append(
            f"| {name} | {entry['answers']} | {figures['first']:.3f} | {places} | {figures['committed']:.2f} |"
        )
    lines += [
        "",
        "Greedy answers of the target that were not learned from, replayed as the running system drafts: up to four guesses a "
        "round; a guess by place counts where those before it were right.",
        "",
        f"- learned from: {data['answer_tokens']:,} answer tokens in {data['answers']:,} answers of the target itself to prompts of "
        f"this project's generator ({kinds}), {data['sampled_answers']:,} of them sampled; no other data"
        + (f", {data['texts']:,} given texts" if data["texts"] else ""),
        f"- trained: {trained['steps']:,} steps, {trained['tokens']:,} answer tokens seen "
        f"({trained['tokens'] / max(data['answer_tokens'], 1):.1f} passes over what there was at the end), {trained['seconds'] / 60:.0f} minutes "
        f"on {record['machine']}, {trained['threads']} thread{'s' if trained['threads'] > 1 else ''}, which others used as well",
        f"- recipe: {', '.join(f'{name} {value}' for name, value in recipe.items())}",
        f"- before training (the best guess by least squares): {_start(record)}",
    ]
    for exported in record.get("exports", []):
        compared = exported["compared"]
        lines.append(
            f"- ONNX with {exported['bits']}-bit layers and a {exported['head_bits']}-bit head: the same first guess as in training "
            f"at {compared['agreement']:.1%} of {compared['positions']:,} positions, features {compared['mean']:.2%} apart"
        )
    lines += [f"- {note}" for note in record.get("notes", [])]
    lines += ["", "| answer tokens seen | minutes | first | tokens a verify |", "|---|---|---|---|"]
    for point in _thinned(record.get("curve", [])):
        lines.append(
            f"| {point['tokens']:,} | {point['seconds'] / 60:.0f} | {point['first']:.3f} | {point['committed']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _start(record: Mapping[str, Any]) -> str:
    curve = record.get("curve") or []
    return f"{curve[0]['first']:.3f} of first guesses right" if curve and curve[0]["tokens"] == 0 else "not measured"


def _thinned(curve: Sequence[Mapping[str, Any]], most: int = 14) -> list[Mapping[str, Any]]:
    step = max(1, -(-len(curve) // most))
    kept = list(curve[::step])
    return kept if not curve or kept[-1] is curve[-1] else [*kept, curve[-1]]


def point(step: int, tokens: int, seconds: float, shards: int, figures: Figures) -> dict[str, Any]:
    """One of the curve."""
    return {"step": step, "tokens": tokens, "seconds": round(seconds, 1), "shards": shards, **figures.as_dict()}


def plot(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The curve: right first guesses and tokens a verify against answer tokens seen. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    right = left.twinx()
    seen = [entry["tokens"] / 1e6 for entry in curve]
    left.plot(
        seen, [entry["first"] for entry in curve], color=BLUE, marker="o", markersize=3, label="first guess right"
    )
    last = [entry["alone"][-1] for entry in curve]
    left.plot(
        seen, last, color=GREEN, marker="s", markersize=3, label="fourth guess right, whatever came of the others"
    )
    right.plot(
        seen,
        [entry["committed"] for entry in curve],
        color=VERMILLION,
        marker="D",
        markersize=3,
        label="tokens a verify",
    )
    left.set_xlabel("answer tokens seen (millions)")
    left.set_ylabel("share of guesses")
    right.set_ylabel("tokens a verify, four drafted")
    left.set_ylim(0, None)
    right.set_ylim(1, None)
    left.grid(linewidth=0.4, alpha=0.6)
    handles = [*left.get_lines(), *right.get_lines()]
    left.legend(handles=handles, fontsize=8, frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
