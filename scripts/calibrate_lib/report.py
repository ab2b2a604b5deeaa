"""The report: what was measured, as Markdown and for a terminal, and in words what follows from it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os.path import relpath
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.bench_lib.cli import BUSY_SHARE
from scripts.calibrate_lib.floors import METRICS, Candidate, Recommendation
from scripts.calibrate_lib.intervals import Estimate
from scripts.calibrate_lib.knobs import LOSSLESS, PLAIN
from scripts.calibrate_lib.options import Options
from scripts.calibrate_lib.rows import Row

SPEED = ("Setting", "Tokens let pass", "Tokens/step × lossless", "Tokens/s × lossless", "Tokens/s × plain", "Accepted")
CHANGES = ("Setting", "Answers changed", "Tokens that differ", "First at", "Answers that agree", "Similarity")
QUALITY = ("Setting", "Perplexity", "Perplexity × lossless", "Task score", "Change of score")
TERMINAL = ("Setting", "Let pass", "Changed", "Agree", "Perplexity ×", "Score", "Tokens/step ×", "Tokens/s ×")


def command(argv: Sequence[str]) -> str:
    """What makes this report again."""
    return " ".join(["scripts/calibrate", *(shlex.quote(part) for part in argv if part != "--fresh")])


def sentence(advice: Recommendation) -> str:
    """What to do, and how sure that is."""
    floor = advice.floor.text
    match advice.outcome:
        case "found":
            assert advice.choice is not None
            return f"At {floor}: {_says(advice.choice, advice)}, {_gain(advice.choice)}. {_sure(advice)}"
        case "no_gain":
            assert advice.nearest is not None
            return (
                f"At {floor} no setting is faster than lossless on this pair: use lossless. "
                f"What keeps the floor, such as {_says(advice.nearest, advice)}, has no gain that could be told from "
                f"chance: {_gain(advice.nearest)}."
            )
        case "none_keeps":
            assert advice.nearest is not None
            return (
                f"At {floor} no setting that lets anything pass keeps the floor on this pair: use lossless. "
                f"Nearest is {_says(advice.nearest, advice)}, {_gain(advice.nearest)}."
            )
        case "no_effect":
            return f"At {floor}: no setting let a single token pass; all are lossless in effect. Try laxer values."
        case "too_few":
            assert advice.nearest is not None
            n = _of(advice.nearest, advice).n
            return f"At {floor}: {n} answers are too few to tell, {advice.floor.least_answers} are needed. Nothing is recommended."
        case "unmeasured":
            return f"At {floor}: not measured."


def advice_dict(advice: Recommendation) -> dict[str, Any]:
    """For the JSON report."""
    shown = advice.choice or advice.nearest
    return {
        "floor": asdict(advice.floor),
        "outcome": advice.outcome,
        "setting": advice.choice.name if advice.choice else None,
        "sure": advice.sure,
        "nearest": shown.name if shown else None,
        "figure": asdict(_of(shown, advice)) if shown else None,
        "text": sentence(advice),
    }


def markdown(
    about: Mapping[str, Any],
    table: Sequence[Row],
    advice: Sequence[Recommendation],
    images: Sequence[Path],
    options: Options,
) -> str:
    """The whole page."""
    answers = table[-1].all.changed.n if table[-1].all.changed else 0
    pair, sampling = about["pair"], about["sampling"]
    lines = [
        "# Calibration of acceptance policies",
        "",
        f"What a lossy policy trades on target `{pair['target']}` with draft `{pair['draft']}`, made by",
        "",
        "```sh",
        about["command"],
        "```",
        "",
        f"**{sentence(advice[0])}**",
        "",
        *(
            []
            if about["complete"]
            else ["**The run was interrupted: the same command goes on with what is missing.**", ""]
        ),
        "## Other floors",
        "",
        *_markdown(("Floor", "Setting", "Figure (95 %)", "Gain"), [_floor_row(each) for each in advice]),
        "",
        "A setting keeps a floor if its figure does; *for sure* if the far end of the interval does, too. Of those that keep it and "
        "are faster than lossless beyond chance, the one that saves the target most steps is named. Presets are not candidates.",
        "",
        "## Gain",
        "",
        *_markdown(SPEED, [_speed(row) for row in table]),
        "",
        "## What changes",
        "",
        *_markdown(CHANGES, [_changes(row) for row in table]),
        "",
        "## Quality",
        "",
        *_markdown(QUALITY, [_quality(row) for row in table]),
        "",
        "## By set",
        "",
        *_markdown(*_by_set(table)),
        "",
    ]
    for image in images:
        lines += [f"![{image.stem}]({relpath(image, options.report.parent)})", ""]
    lines += ["## How it was measured", "", *(f"- {note}" for note in _notes(about, answers, sampling))]
    return "\n".join(lines) + "\n"


def table(content: Sequence[Row]) -> Table:
    """For a terminal."""
    result = Table(title="against lossless", title_justify="left", header_style="bold", padding=(0, 1))
    for heading in TERMINAL:
        result.add_column(heading, justify="left" if heading == "Setting" else "right", no_wrap=True)
    for row in content:
        found = row.all
        result.add_row(
            row.setting.name,
            _percent(found.relaxed),
            _percent(found.changed),
            _percent(found.agreement),
            _plain(found.perplexity_ratio, 3),
            _percent(found.score),
            _plain(found.step_gain),
            _plain(row.speed.to_lossless),
        )
    return result


def _notes(about: Mapping[str, Any], answers: int, sampling: Mapping[str, Any]) -> list[str]:
    speed, load = about["speed"], about["other_load"]
    kind = (
        "greedy"
        if sampling["temperature"] == 0
        else f"temperature {sampling['temperature']:g}, the same seed for every setting"
    )
    notes = [
        f"{answers} answers a setting, {kind}. Quality: target in {sampling['dtype']}, {sampling['tokens']} draft tokens a round, all "
        "verified and judged, drafts of the model only, both models in one process in which time plays no part: the same command gives the same "
        "figures on any load. As served, fewer tokens are drafted where that does not pay, and fewer mismatches come up; and a draft that "
        "starts from the target's KV, not from its own reading of the prompt as here, agrees a little more often.",
        "*Changed*: a client sees another text or another end. *Agree*: what counts of the answer is the same, which is the number, the "
        "code, or the words without case and space. *Differ*: place by place, so one inserted token makes all behind it differ. "
        "*Let pass*: tokens that the target would not have said itself. *First at*: median place of the first other token.",
        "*Perplexity* is the target's, teacher-forced over prompt and answer, at temperature 1; × lossless is the ratio to that of its own "
        "answers. *Similarity*: cosine of the sentence model; it calls opposites similar, so it is not evidence on its own.",
        "*Score*: arithmetic by its last number, extraction by the field and no other one, code by parsing; its change is over the same items.",
        "Intervals are 95 %: Wilson for shares of answers, Newcombe's for the change of a paired share, bootstrap over answers for ratios, "
        "order statistics of paired turns for speed. No interval: fewer than five answers (six turns), or nothing varied.",
        f"`{PLAIN}` is decoding without drafts: where it differs from `{LOSSLESS}`, rounding did it, not a policy.",
    ]
    if speed is not None:
        notes.append(
            f"Speed: served as configured ({about['pair']['served_dtype']}, adaptive, draft on a core of its own), one request at a time, "
            f"{speed['length']} tokens forced, prompt sets {', '.join(speed['sets'])}; settings in turn, paired by turn and set. Tokens a "
            "step come from the quality run and repeat exactly."
        )
        if load > BUSY_SHARE:
            notes.append(f"**Other programs kept {load:.0%} of the machine busy: take no speed figure from this run.**")
    notes.append(
        f"Commit `{about['commit']}` on {about['machine']}; {', '.join(f'{k} {v}' for k, v in about['versions'].items())}."
    )
    return notes


# --- rows -------------------------------------------------------------------------------------------------------------


def _speed(row: Row) -> list[str]:
    found, speed = row.all, row.speed
    accepted = f"{speed.acceptance:.2f}" if speed.acceptance is not None else _plain(found.acceptance)
    return [
        row.setting.name, _percent(found.relaxed), _ranged(found.step_gain), _ranged(speed.to_lossless),
        _ranged(speed.to_plain), accepted,
    ]  # fmt: skip


def _changes(row: Row) -> list[str]:
    found = row.all
    first = f"{found.first_difference:g}" if found.first_difference is not None else "–"
    return [
        row.setting.name, _shares(found.changed), _shares(found.differing), first, _shares(found.agreement),
        _ranged(found.similarity, 3),
    ]  # fmt: skip


def _quality(row: Row) -> list[str]:
    found = row.all
    return [
        row.setting.name, _plain(found.perplexity), _ranged(found.perplexity_ratio, 3), _shares(found.score),
        _shares(found.score_change, signed=True),
    ]  # fmt: skip


def _by_set(content: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    names = list(content[0].by_set)
    heads = ["Setting", *(f"{name}: changed" for name in names)]
    scored = [name for name in names if content[0].by_set[name].score is not None]
    heads += [f"{name}: score" for name in scored]
    lines = []
    for row in content:
        cells = [_percent(row.by_set[name].changed) for name in names]
        lines.append([row.setting.name, *cells, *(_percent(row.by_set[name].score) for name in scored)])
    return heads, lines


def _floor_row(advice: Recommendation) -> list[str]:
    shown = advice.choice or advice.nearest
    if shown is None:
        return [advice.floor.text, advice.outcome.replace("_", " "), "–", "–"]
    estimate = _of(shown, advice)
    figure = _figure(estimate, advice)
    if advice.choice is not None:
        return [
            advice.floor.text,
            f"**{shown.name}**{' (for sure)' if advice.sure else ''}",
            figure,
            _ranged(shown.gain),
        ]
    why = {"no_gain": "none is faster", "none_keeps": "none keeps it", "too_few": "too few answers"}[advice.outcome]
    return [advice.floor.text, f"lossless: {why}; nearest {shown.name}", figure, _ranged(shown.gain)]


# --- words and numbers ------------------------------------------------------------------------------------------------


def _of(candidate: Candidate, advice: Recommendation) -> Estimate:
    found = advice.floor.of(candidate.figures)
    assert found is not None
    return found


def _figure(estimate: Estimate, advice: Recommendation) -> str:
    return _ranged(estimate, 3) if advice.floor.metric in ("perplexity", "similarity") else _shares(estimate)


def _says(candidate: Candidate, advice: Recommendation) -> str:
    return f"`{candidate.name}` ({METRICS[advice.floor.metric][2]}: {_figure(_of(candidate, advice), advice)})"


def _gain(candidate: Candidate) -> str:
    what = "tokens/s" if candidate.speed is not None else "tokens a step (speed was not measured)"
    return f"{what} {_ranged(candidate.gain)} × lossless"


def _sure(advice: Recommendation) -> str:
    if advice.sure:
        return "The whole interval keeps the floor."
    assert advice.choice is not None
    far = advice.floor.far_end(_of(advice.choice, advice))
    if far is None:
        return "There is no interval: it is not sure."
    n = _of(advice.choice, advice).n
    return f"Not for sure: {n} answers do not exclude {_number(far, advice)}."


def _number(value: float, advice: Recommendation) -> str:
    return f"{value:.3f}" if advice.floor.metric in ("perplexity", "similarity") else f"{value:.1%}"


def _plain(estimate: Estimate | None, digits: int = 2) -> str:
    return "–" if estimate is None else f"{estimate.value:.{digits}f}"


def _percent(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{estimate.value:.1%}"


def _ranged(estimate: Estimate | None, digits: int = 2) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return _plain(estimate, digits)
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f}–{estimate.high:.{digits}f})"


def _shares(estimate: Estimate | None, *, signed: bool = False) -> str:
    if estimate is None:
        return "–"
    sign = "+" if signed else ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{sign}.1%}"
    between = " to " if signed else "–"
    return f"{estimate.value:{sign}.1%} ({estimate.low:{sign}.1%}{between}{estimate.high:{sign}.1%})"


def _markdown(headings: Sequence[str], content: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    return head + ["| " + " | ".join(row) + " |" for row in content]
