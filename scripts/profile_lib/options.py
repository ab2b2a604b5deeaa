"""Command-line options of ``scripts/profile`` and what they may be."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench_lib.engine import ROOT

SECTIONS = ("channel", "contention", "steps")

EPILOG = """\
sections
  channel      One message between target and draft over the real channel (Unix socket, and ZeroMQ with CURVE), hop by hop: out,
               waiting for the draft's step, back; while the draft's core is quiet and while it computes. Beside it the bare
               round trip of a Unix socket, ZeroMQ ipc, tcp, and tcp with CURVE: what the channel is made of. Needs no models.
  contention   A plain step of the target on its own cores, alone and beside a draft that computes all the time on another
               core, and a step of that draft, alone and beside the target; for each MODELS/draft-* with 1 and 2 rows in its
               batch. They share nothing but memory: how much slower both get is what a second core is worth here.
  steps        A step of the target's engine by how many drafted tokens each sequence verifies (0 to 24), at batch 1 and 8, with
               the target's own cores and with all cores. Where the row stays flat, verifying costs nothing.

how it measures
  Target and draft are processes of their own, bound to their cores as scripts/bench binds them: the last core drafts, the others
  verify. Everything within a section takes turns, repetition by repetition, because the speed of a virtual machine drifts by
  more than what is looked for. So compare within a row: ratios are taken within each repetition. Median, smallest, 90th (and
  for messages 99th) percentile. The target is eager on CPUs, as the embedded default serves it. Close other programs: their
  share of the machine before and after is written into the result. Ten minutes or so on two cores with the embedded default.

A section that fails says why, and the others go on; the exit status is then 1. Ctrl-C keeps the sections that are done.

examples
  scripts/profile                                  everything, into results/profile.json and results/profile.md
  scripts/profile --only channel --repetitions 1   a look at the channel in half a minute
  scripts/profile --only contention,steps --models models/Qwen3-0.6B --out results/qwen.json
"""


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    sections: tuple[str, ...]
    repetitions: int
    models: Path
    out: Path


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/profile",
        description="Measure what the parts of a round cost on this machine: the channel, the shared memory, verifying.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--only", metavar="A,B", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)} (default: all)")
    add("--repetitions", type=int, metavar="N", default=5, help="turns of everything that is compared (default: 5)")
    add(
        "--models",
        type=Path,
        metavar="DIR",
        default=ROOT / "models",
        help="folder with target/ and draft-*/ (default: models/; scripts/prepare_models fills it)",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        default=ROOT / "results" / "profile.json",
        help="JSON result; Markdown is written beside it (default: results/profile.json)",
    )
    return result


def read_options(argv: Sequence[str] | None = None) -> Options:
    """Parse; exits with a sentence on what cannot be. Sections run in the order of :data:`SECTIONS`."""
    command = parser()
    raw = command.parse_args(argv)
    named = {part.strip() for part in raw.only.split(",") if part.strip()}
    if not named:
        command.error(f"--only names at least one of {', '.join(SECTIONS)}")
    if unknown := named - set(SECTIONS):
        command.error(f"no section {', '.join(sorted(unknown))}; there are: {', '.join(SECTIONS)}")
    if raw.repetitions < 1:
        command.error("--repetitions starts at 1")
    if raw.out.suffix == ".md":
        command.error("--out names the JSON file; the Markdown is written beside it")
    sections = tuple(section for section in SECTIONS if section in named)
    if sections != ("channel",) and not raw.models.is_dir():
        command.error(f"--models: {raw.models} is not a folder; scripts/prepare_models fills one")
    return Options(sections, raw.repetitions, raw.models, raw.out)
