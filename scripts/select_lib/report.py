"""The rows of a run as a table for a terminal, as Markdown and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from scripts.select_lib import recommend
from scripts.select_lib.acceptance import DEPTH
from scripts.select_lib.answers import GREEDY, SAMPLED, TEMPERATURES
from scripts.select_lib.predict import step_ms
from scripts.select_lib.rows import AGREE, LENGTHS, Row, Trial, modes_of
from scripts.select_lib.trial import OVERLAPPED, SYNCHRONOUS

BUSY_SHARE = 0.1  # of the machine taken by others: times say little then

NOT_SO = -1.0  # it cannot be used that way

Cells = Sequence[Sequence[str]]


def table(rows: Sequence[Row]) -> Table:
    """The overview."""
    found = Table(title="Drafts for this target", title_justify="left")
    heads, content = overview(rows)
    for place, head in enumerate(heads):
        found.add_column(head, justify="left" if place == 0 else "right", overflow="fold")
    for line in content:
        found.add_row(*map(escape, line))
    return found


def overview(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and a line a candidate, the fastest first."""
    largest = rows[0].batches[-1]
    heads = ["Draft", "Accepted at 1", "sampled", "at 4", "ms a token", "of a step", "MiB", "Best", "× plain", "Tried"]
    if largest > 1:
        heads.insert(-1, f"× plain, {largest} at once")
    content = []
    for row in recommend.ranked(rows):
        greedy = row.rounds(GREEDY, DEPTH).by_position()
        mode, best = row.best(1)
        line = [
            row.candidate.name,
            _share(greedy[0]),
            _share(row.first(SAMPLED)),
            _share(greedy[3]),
            *_costs(row),
            f"{mode}, T = {best.tokens}",
            f"{row.speedup(1):.2f}",
            ", ".join(f"{trial.speedup:.2f} ({trial.mode}, T = {trial.tokens})" for trial in row.trials) or "–",
        ]
        if largest > 1:
            line.insert(-1, f"{row.speedup(largest):.2f}")
        content.append(line)
    return heads, content


def trial_words(row: Row, trial: Trial) -> str:
    """Predicted beside measured."""
    measured = trial.measured
    words = (
        f"{row.candidate.name}, {trial.mode}, T = {trial.tokens}: {measured['tokens_per_s']:.1f} tokens/s, predicted "
        f"{trial.predicted_per_s:.1f}; plain {measured['plain_per_s']:.1f}, predicted {trial.predicted_plain_per_s:.1f}; so "
        f"{trial.speedup:.2f} times plain, predicted {trial.predicted_speedup:.2f}."
    )
    if trial.difference is None or trial.acceptance is None or trial.predicted_acceptance is None:
        return words + " Nothing was drafted, so there is no acceptance to compare."
    limit, differs = f"{100 * AGREE:.0f}", abs(trial.difference)
    if trial.agrees:
        verdict = f"within {limit} points"
    elif differs <= trial.noise:
        verdict = f"MORE THAN {limit} POINTS, though no more than so few answers scatter (±{100 * trial.noise:.1f}): raise --count"
    else:
        verdict = f"MORE THAN {limit} POINTS: do not trust the acceptance of this run"
    return words + (
        f" Acceptance counted by the running system {trial.acceptance:.3f}, measured {trial.predicted_acceptance:.3f}: "
        f"{100 * trial.difference:+.1f} points, {verdict}."
    )


def markdown(about: Mapping[str, Any], rows: Sequence[Row], choice: recommend.Choice, image: str) -> str:
    """The whole report."""
    parts = ["# Which draft", "", recommend.sentence(choice), "", "```yaml", about["config"].rstrip(), "```", ""]
    if about["refused"]:
        parts += ["Not candidates:", "", *(f"- {sentence}" for sentence in about["refused"]), ""]
    parts += ["## Overview", "", *_markdown(*overview(rows)), ""]
    parts += [
        "*Accepted at 1*: share of first draft tokens that are the target's own, greedy; *at 4*: of the fourth ones, where the three "
        "before were accepted. *Of a step*: cost of a draft token as a share of a plain step of the target. *× plain*: tokens a second "
        "to the target alone on all its cores, predicted, one request at a time, with the length of drafts that is best. *Tried*: the same, "
        "measured in the real engine with every draft whole.",
        "",
    ]
    if image:
        parts += [f"![acceptance by position, predicted tokens a second]({image})", ""]
    warned = [(row.candidate.name, text) for row in rows for text in row.warnings]
    parts += ["## Warnings", "", *(f"- `{name}`: {text}." for name, text in warned), ""] if warned else []
    tried = [(row, trial) for row in rows for trial in row.trials]
    if tried:
        parts += ["## Predicted and measured", "", *(f"- {trial_words(row, trial)}" for row, trial in tried), ""]
    parts += ["## Acceptance by position", "", *_markdown(*by_position(rows)), ""]
    if len(about["sets"]) > 1:
        parts += ["At the first position, by kind of text, greedy:", "", *_markdown(*by_set(rows, about["sets"])), ""]
    parts += ["## Costs", "", *_markdown(*costs(rows)), "", *_markdown(*target_steps(rows[0])), ""]
    parts += ["What pays, one request at a time:", "", *_markdown(*what_pays(rows)), ""]
    parts += ["## Predicted tokens a second", "", *_markdown(*predicted(rows)), ""]
    return "\n".join([*parts, "## How", "", *(f"- {note}" for note in _notes(about)), ""])


def by_position(rows: Sequence[Row]) -> tuple[list[str], Cells]:
    """Greedy and sampled, with the share of steps that drafted and tokens a step for drafts of four."""
    heads = ["Draft", "", *(str(position) for position in LENGTHS), "tokens a step, T = 4"]
    content = []
    for row in rows:
        for kind in TEMPERATURES:
            rounds = row.rounds(kind, DEPTH)
            shares = [_share(share) for share in rounds.by_position()]
            content.append([row.candidate.name, kind, *shares, f"{row.rounds(kind, 4).per_step:.2f}"])
    return heads, content


def by_set(rows: Sequence[Row], sets: Sequence[str]) -> tuple[list[str], Cells]:
    content = [[row.candidate.name, *(_share(row.first(GREEDY, name)) for name in sets)] for row in rows]
    return ["Draft", *sets], content


def costs(rows: Sequence[Row]) -> tuple[list[str], Cells]:
    """A line a draft model: ms of a call by context and sequences."""
    models = [row for row in rows if row.candidate.asks_model]
    cells = list(dict.fromkeys((context, batch) for row in models for context, batch, _ in row.costs["calls"]))
    heads = ["Draft, ms", *(f"{context}, {batch} at once" for context, batch in cells)]
    heads += ["prompt token", "load s", "MiB", "KV a token, KiB", "KV of the target", "slower beside"]
    content = []
    for row in models:
        known = {(context, batch): ms for context, batch, ms in row.costs["calls"]}
        content.append(
            [
                row.candidate.name,
                *(f"{known[cell]:.2f}" if cell in known else "–" for cell in cells),
                f"{row.costs['read_token_ms']:.2f}",
                f"{row.costs['load_s']:.1f}",
                f"{row.costs['memory_mib']:.0f}",
                f"{row.costs['kv_bytes'] / 1024:.1f}",
                row.follow["kv"],
                _factor(row.costs["beside"]["draft_slower"]),
            ]
        )
    return heads, content


def target_steps(row: Row) -> tuple[list[str], Cells]:
    """What verifying costs."""
    verified = [int(count) for count, _ in next(iter(row.steps["all"].values()))]
    content = []
    for threads, its in row.steps.items():
        words = "all cores" if threads == "all" else "without the draft's core"
        for batch, points in its.items():
            content.append([f"{words}, {batch} at once", *(f"{ms:.1f}" for _, ms in points)])
    return ["Target's step, ms, verifying", *map(str, verified)], content


def what_pays(rows: Sequence[Row]) -> tuple[list[str], Cells]:
    """A line a draft model: what a token costs and may cost, and the acceptance from which on its costs are worth it."""
    content = []
    for row in rows:
        if row.candidate.asks_model:
            step = step_ms(row.step_costs(1, beside=False), 0)
            affordable, tokens = row.affordable()
            modes = modes_of(row.candidate)
            needs = [row.break_even(mode) if mode in modes else NOT_SO for mode in (SYNCHRONOUS, OVERLAPPED)]
            content.append(
                [
                    row.candidate.name,
                    f"{row.token_ms(row.context, 1) / step:.2f}",
                    f"{affordable / step:.2f} (T = {tokens})" if affordable > 0 else "nothing",
                    *(_from(share) for share in needs),
                ]
            )
    heads = ["Draft", "a token costs, of a step", "may cost", "pays from acceptance, synchronous", "overlapped"]
    return heads, content


def predicted(rows: Sequence[Row]) -> tuple[list[str], Cells]:
    """Every mode and batch by length of drafts."""
    content = []
    for row in rows:
        for batch in row.batches:
            for mode, found in row.predictions(batch).items():
                name = f"{row.candidate.name}, {mode}, {batch} at once"
                content.append([name, f"{row.plain(batch):.1f}", *(f"{each.tokens_per_s:.1f}" for each in found)])
    return ["", "plain", *(f"T = {tokens}" for tokens in LENGTHS)], content


def as_dict(row: Row) -> dict[str, Any]:
    """A row for JSON."""
    predictions = {
        kind: {
            str(batch): {
                mode: [
                    {"tokens": p.tokens, "round_ms": p.round_ms, "tokens_per_s": p.tokens_per_s, "hidden": p.hidden}
                    for p in found
                ]
                for mode, found in row.predictions(batch, kind).items()
            }
            for batch in row.batches
        }
        for kind in TEMPERATURES
    }
    return {
        "name": row.candidate.name,
        "kind": row.candidate.kind,
        "kv": row.follow["kv"],
        "acceptance": {
            kind: {
                "by_position": row.rounds(kind, DEPTH).by_position(),
                "tested": list(row.rounds(kind, DEPTH).tested),
                "pooled": {str(tokens): row.rounds(kind, tokens).acceptance for tokens in LENGTHS},
                "tokens_a_step": {str(tokens): row.rounds(kind, tokens).per_step for tokens in LENGTHS},
            }
            for kind in TEMPERATURES
        },
        "costs": dict(row.costs),
        "plain_per_s": {str(batch): row.plain(batch) for batch in row.batches},
        "predictions": predictions,
        "warnings": row.warnings,
        "trials": [
            {
                "mode": trial.mode,
                "tokens": trial.tokens,
                "predicted_per_s": trial.predicted_per_s,
                "predicted_plain_per_s": trial.predicted_plain_per_s,
                "predicted_acceptance": trial.predicted_acceptance,
                "acceptance": trial.acceptance,
                "difference": trial.difference,
                "agrees": trial.agrees,
                "noise": trial.noise,
                "measured": dict(trial.measured),
            }
            for trial in row.trials
        ],
    }


def _costs(row: Row) -> list[str]:
    if not row.candidate.asks_model:
        return ["0", "0", "–"]
    token = row.token_ms(row.context, 1)
    step = step_ms(row.step_costs(1, beside=False), 0)
    return [f"{token:.2f}", f"{token / step:.2f}", f"{row.costs['memory_mib']:.0f}"]


def _notes(about: Mapping[str, Any]) -> list[str]:
    load = max(about["other_load"])
    quiet = (
        f"**Other programs kept up to {load:.0%} of the machine busy: take the times of this run for rough ones, and its acceptance as it is.**"
        if load > BUSY_SHARE
        else f"The machine was quiet: other programs took at most {load:.0%} of it when it was looked at."
    )
    return [
        quiet,
        f"`{about['command']}`: {about['prompts']} prompts ({', '.join(about['sets'])}), answers of at most {about['tokens']} tokens, target in "
        f"{about['dtype']}; greedy, and sampled at temperature 1 with keyed noise.",
        "Acceptance: each draft is led along the target's own answers; rounds of T tokens are replayed from that, each starting where the "
        "one before ended. Drafts that can take the target's KV start from its KV of the prompt, as in service.",
        "Prediction: a step commits 1 + a₁ + a₁a₂ + … tokens. Synchronous: verify(T) + T · draft + overhead. Overlapped: verify "
        "+ what the draft has not ready when it ends, with both slowed down as they were beside each other. "
        "`scripts/select_lib/predict.py` has the formulas and their sources.",
        f"Commit `{about['commit']}` on {about['machine']}; {', '.join(f'{k} {v}' for k, v in about['versions'].items())}.",
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _from(share: float | None) -> str:
    return "never" if share is None else "–" if share == NOT_SO else f"{share:.2f}"


def _factor(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"


def _markdown(heads: Sequence[str], content: Cells) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return lines + ["| " + " | ".join(line) + " |" for line in content]
