"""How the demo's answer looks in a terminal."""

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deployments.demo.client import Answer

ACCEPTED = "bold green"  # a draft guessed it, the target agreed
OWN = "yellow"  # the target's own token
REJECTED = "dim strike red"
MOST_ROUNDS = 16


def answer(console: Console, chained: Answer, plain: Answer) -> None:
    """The coloured answer, its rounds, and its figures next to plain decoding's."""
    trace = chained.chain or {"rounds": [], "summary": {}}
    rounds, summary = trace["rounds"], trace["summary"]
    console.rule("answer")
    console.print(coloured(rounds, chained.text))
    console.print()
    console.print(Text.assemble(("accepted draft tokens", ACCEPTED), "   ", ("the target's own", OWN)))
    console.print(round_table(rounds))
    console.print(figures(summary, chained, plain))
    if chained.text != plain.text:
        console.print("The two answers differ: in bfloat16 two tokens can tie. With dtype: float32 they are the same.")


def coloured(rounds: list[dict[str, Any]], fallback: str) -> Text:
    """The answer, each part in the colour of who wrote it."""
    if not rounds:
        return Text(fallback)
    text = Text()
    for item in rounds:
        text.append(item.get("accepted_text", ""), style=ACCEPTED)
        text.append(item.get("own_text", ""), style=OWN)
    return text


def round_table(rounds: list[dict[str, Any]]) -> Table:
    """The first rounds, one a row."""
    table = Table("round", "draft by", "drafted", "accepted", "text", "wait ms", title="rounds", title_justify="left")
    for number, item in enumerate(rounds[:MOST_ROUNDS], start=1):
        text = Text.assemble(
            (item.get("accepted_text", ""), ACCEPTED),
            (item.get("own_text", ""), OWN),
            (item.get("rejected_text", ""), REJECTED),
        )
        source = item["source"].split("#")[0] or f"[dim]{escape(item.get('reason') or 'none')}[/dim]"
        drafted, accepted = str(len(item["drafted"])), str(item["accepted"])
        table.add_row(str(number), source, drafted, accepted, one_line(text), f"{item['wait_ms']:.1f}")
    if len(rounds) > MOST_ROUNDS:
        table.add_row("…", "", "", "", f"{len(rounds) - MOST_ROUNDS} more", "")
    return table


def one_line(text: Text) -> Text:
    """Line breaks shown as a sign."""
    shown = Text()
    for span in text.split("\n", include_separator=False, allow_blank=True):
        if len(shown):
            shown.append("⏎", style="dim")
        shown.append_text(span)
    return shown


def figures(summary: dict[str, Any], chained: Answer, plain: Answer) -> Table:
    """Acceptance and speed."""
    table = Table("", "chain", "plain", title="figures", title_justify="left")
    acceptance = f"{summary.get('accepted', 0)} of {summary.get('drafted', 0)} ({summary.get('acceptance', 0.0):.0%})"
    table.add_row("draft tokens accepted", acceptance, "-")
    table.add_row("tokens a verification", f"{summary.get('tokens_per_round', 1.0):.2f}", "1.00")
    ratio = chained.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0
    table.add_row("tokens/s", f"{chained.tokens_per_s:.1f} ({ratio:.2f}x)", f"{plain.tokens_per_s:.1f}")
    table.add_row("tokens", str(chained.tokens), str(plain.tokens))
    return table


def try_it(console: Console, url: str, model: str) -> None:
    """What to type next."""
    request = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello!"}],
        "chain": {"trace": True},
    }
    console.rule("try it")
    console.print(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{json.dumps(request)}'",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
