"""How an example looks in a terminal."""

from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deployments.demo.show import ACCEPTED, OWN, coloured
from scripts.examples_lib.example import Report, Step

COLUMN = 38  # characters of a draft that stands beside others, at least
TAGS = {"valid": "green", "invalid": "red", "unknown": "yellow"}
DECISIONS = {
    "agreed": "drafts agree: the target gets them to verify",
    "only": "a single draft: the target gets it to verify",
    "likeliest": "the target gets the draft that it finds likeliest",
    "unscored": "the target gets all drafts that take part",
    "written": "the target writes with all drafts before it",
    "abstained": "nobody decides",
    "plain": "a plain answer",
}


def report(console: Console, name: str, found: Report) -> None:
    """Everything, in the order in which it happened."""
    console.rule(name)
    for step in found.steps:
        _step(console, step)
    console.print(Text.assemble(("what this shows  ", "bold"), found.shows))
    console.print()
    console.print(Text("what came of it", style="bold"))
    for finding in found.findings:
        console.print(Text.assemble(("  ✓ ", "green") if finding.right else ("  ✗ ", "red"), finding.text))
    if found.unchecked:
        console.print(Text.assemble(("  ? ", "yellow"), found.unchecked))
    console.print()
    console.print(verdict(found))
    console.print()


def verdict(found: Report) -> str:
    """Plainly, how many things went wrong."""
    wrong = len(found.mistakes)
    if not wrong:
        return "Nothing that this example can check went wrong this time."
    which = "one thing" if wrong == 1 else f"{wrong} of {len(found.findings)} things"
    return (
        f"Of what this example can check, {which} went wrong: see ✗. So small a model does that; the run is as it came."
    )


def _step(console: Console, step: Step) -> None:
    told = step.told
    drafts = told.get("drafts", [])
    console.print(Panel(Text(step.question), title="question", title_align="left"))
    if drafts:
        for start in range(0, len(drafts), per_row := max(1, console.width // COLUMN)):
            console.print(_side_by_side(step, drafts, range(start, min(start + per_row, len(drafts)))))
    if len(drafts) > 1 and told.get("distances"):
        console.print(_matrix(step, told["distances"]))
    console.print(_decision(step))
    console.print(Panel(_answer(step), title="answer", title_align="left"))
    console.print(Text.assemble(("accepted draft tokens", ACCEPTED), "   ", ("the target's own", OWN)))
    if apart := told.get("distances_to_answer"):
        nearest = min(range(len(apart)), key=lambda index: apart[index])
        console.print(
            f"nearest draft: {step.name(nearest)}, distance {apart[nearest]:.2f}", highlight=False, markup=False
        )
    console.print()


def _side_by_side(step: Step, drafts: list[dict[str, Any]], which: range) -> Table:
    table = Table(title="drafts" if which.start == 0 else None, title_justify="left", show_lines=True, expand=True)
    for index in which:
        table.add_column(Text(f"{index}  {step.name(index)}"), ratio=1)
    table.add_row(*(Group(*_draft(drafts[index])) for index in which))
    return table


def _draft(draft: dict[str, Any]) -> list[Text]:
    """A draft's text and what is known of it."""
    lines = [Text(draft["text"].strip() + ("" if draft["finished"] else " …")), Text()]
    if draft["note"]:
        lines.append(Text(draft["note"], style="dim"))
    if draft["standing"] is not None:
        lines.append(Text(f"mean log probability {draft['standing']:.2f}", style="dim"))
    for tag in draft["tags"]:
        why = f": {tag['why']}" if tag["why"] else ""
        lines.append(Text.assemble(f"{tag['validator']} ", (tag["tag"], TAGS.get(tag["tag"], "")), why))
    return lines


def _matrix(step: Step, distances: list[list[float]]) -> Table:
    table = Table("", *(str(index) for index in range(len(distances))), title="distances", title_justify="left")
    for index, row in enumerate(distances):
        shown = ("" if index == other else f"{distance:.2f}" for other, distance in enumerate(row))
        table.add_row(Text(f"{index}  {step.name(index)}"), *shown)
    return table


def _decision(step: Step) -> Text:
    told = step.told
    decision = str(told.get("decision", ""))
    lines = [f"{told.get('outcome', 'no trace')}: {DECISIONS.get(decision, decision)}"]
    if told.get("chosen") is not None:
        lines.append(f"chosen: {step.name(told['chosen'])}")
    if told.get("agreeing"):
        lines.append(f"agreeing: {', '.join(map(step.name, told['agreeing']))}")
    lines += [
        f"{step.name(i)} and {step.name(j)} are close, and differ: {why}" for i, j, why in told.get("objections", [])
    ]
    there = {draft["source"] for draft in told.get("drafts", [])}
    for name, why in told.get("reasons", {}).items():
        lines.append(f"{'only part of a' if name in there else 'no'} draft by {step.names.get(name, name)}: {why}")
    return Text.assemble(("decision  ", "bold"), "\n          ".join(lines))


def _answer(step: Step) -> Group | Text:
    """In the colours of who wrote it; where marks of a scaffold are in it, as it came, too."""
    text = coloured((step.answer.chain or {}).get("rounds", []), step.answer.text)
    if text.plain.startswith(step.answer.text.rstrip()):
        return text[: len(step.answer.text.rstrip())]  # without the token that ends it
    return Group(text, Text(), Text("with its scaffold:", style="dim"), Text(step.answer.text))
