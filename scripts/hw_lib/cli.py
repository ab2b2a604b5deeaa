"""Command line of ``scripts/hw``: which execution providers this machine has, and the real draft on each of them."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hw.providers import known_profiles
from scripts.bench_lib import machine
from scripts.hw_lib import report
from scripts.hw_lib.ask import ROOT, ask

DRAFTS = ("draft-int8", "draft-int4")
FAILURES = ("failed", "crashed", "late")


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check. Exits with 2 and a sentence for what cannot be."""
    parser = argparse.ArgumentParser(
        prog="scripts/hw",
        description="List the execution providers of this machine and run the real draft on each, in a process of its own.",
        epilog="scripts/hw --install NAME adds a provider's plug-in (openvino, qnn, webgpu). docs/hardware.md explains the rest.",
    )
    parser.add_argument("--list", action="store_true", help="only list, run nothing")
    parser.add_argument(
        "--provider", action="append", choices=known_profiles(), help="only this one; can be repeated (default: all)"
    )
    parser.add_argument(
        "--draft", type=Path, action="append", help="folder of a prepared draft (default: models/draft-*)"
    )
    parser.add_argument("--tokens", type=int, default=32, help="compared after each of four prompts (default: 32)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each provider (default: 300)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args(argv)
    if not 2 <= options.tokens <= 256:
        parser.error(f"--tokens {options.tokens}: 2 to 256")
    if not 1 <= options.limit <= 86400:
        parser.error(f"--limit {options.limit:g}: 1 to 86400 seconds")
    if options.list and options.draft:
        parser.error("--list runs nothing: leave --draft out")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    options.draft = [] if options.list else [folder.resolve() for folder in options.draft or prepared()]
    for folder in options.draft:
        if not (folder / "model.onnx").is_file():
            parser.error(f"{folder} has no model.onnx: run scripts/prepare_models")
    if not options.list and not options.draft:
        parser.error("there is no prepared draft in models/: run scripts/prepare_models, or use --list")
    return options


def prepared() -> list[Path]:
    """Drafts that scripts/prepare_models has left here."""
    return [ROOT / "models" / name for name in DRAFTS if (ROOT / "models" / name / "model.onnx").is_file()]


def main(argv: Sequence[str] | None = None) -> int:
    """0: everything here was run, or listed; 1: a provider failed, crashed or was too late."""
    options = read_options(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    names = [name for name in known_profiles() if name in (options.provider or known_profiles())]
    rows: list[dict[str, Any]] = []
    columns = (
        TextColumn("{task.description:<13}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    # Drawn only between measurements: a bar that moves by itself takes time on some core.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=float(len(names)), doing="")
        for number, name in enumerate(names):

            def tell(fraction: float, doing: str, number: int = number, name: str = name) -> None:
                progress.update(task, description=name, completed=number + fraction, doing=doing, refresh=True)

            tell(0.0, "looking")
            rows.append(ask(name, options.draft, options.tokens, options.limit, tell))
    console.print(report.overview(rows))
    table = report.figures(rows)
    if table is not None:
        console.print(table)
    if options.json is not None:
        result = {"commit": machine.commit(ROOT), "machine": machine.machine(), "providers": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {options.json}", soft_wrap=True)
    return 1 if any(row["status"] in FAILURES for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
