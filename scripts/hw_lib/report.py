"""Rows as tables for a terminal."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from hw.providers import get_profile


def overview(rows: list[dict[str, Any]]) -> Table:
    """Every provider: what it is, whether it is here, on which device, and why not."""
    table = Table(title="Execution providers", title_justify="left")
    for heading in ("Provider", "For", "Status", "Version", "Device or reason"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        device = row.get("device") or {}
        words = row.get("reason") or " ".join(filter(None, (device.get("kind"), device.get("name"))))
        title = get_profile(row["name"]).title
        table.add_row(row["name"], title, row["status"], row.get("version", ""), escape(words))
    return table


def figures(rows: list[dict[str, Any]]) -> Table | None:
    """What was measured; None when nothing was."""
    measured = [(row["name"], name, draft) for row in rows for name, draft in row.get("drafts", {}).items()]
    if not measured:
        return None
    table = Table(
        title="The draft on each provider, beside the CPU provider in the same process (one thread)",
        title_justify="left",
        caption="Agreement: greedy tokens equal to the CPU provider's, each after the CPU's own text. On the CPU: nodes the "
        "provider did not take. KV error: of logits after the prompt's KV was read and written elsewhere.",
        caption_justify="left",
    )
    headings = (
        "Provider",
        "Draft",
        "ms a token",
        "on CPU",
        "prefill ms",
        "on CPU",
        "Agreement",
        "Nodes on the CPU",
        "KV error",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("Provider", "Draft") else "right")
    for provider, name, draft in measured:
        table.add_row(
            provider,
            name,
            f"{draft['decode_ms']:.1f}",
            f"{draft['decode_cpu_ms']:.1f}",
            f"{draft['prefill_ms']:.0f}",
            f"{draft['prefill_cpu_ms']:.0f}",
            f"{draft['agreement']:.1%}",
            f"{draft['fallback']['share']:.1%}",
            f"{draft['kv']['continue_error']:.2g}",
        )
    return table
