"""Command-line options of ``scripts/distil`` and what they may be."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hw.onnx.conditioned_build import NAME
from scripts.bench_lib.engine import ROOT
from scripts.distil_lib.loss import Weights
from scripts.distil_lib.train import Recipe

MEASURED_FOLDER = "measure"  # in --out: answers to the project's own prompt sets, never learned from
STEPS = ("generate", "train", "export", "all")
WEIGHTS = ROOT / "deployments" / "draft" / "weights"

EPILOG = """\
steps
  generate  the target answers prompts of a grammar, prompts it makes up itself, and those of --prompts; --text is taken as it is.
            More can be added at any time, also while a draft is being trained.
  train     learns from what is there. Goes on where it was interrupted; --fresh begins anew.
  export    writes the weights with their record, and the ONNX folder the draft pool loads, checked against what was trained.
  all       one after the other: half of --minutes for answers, the rest for training.

What the project measures with (scripts/prompts, the gold sets) is never learned from, nor is a share of the prompts that the
live figure is taken on. Ctrl-C loses at most a minute.

examples
  scripts/distil all --minutes 120                          a conditioned draft of the shipped target on one core
  scripts/distil generate --target ~/m/Llama-3.2-1B --tokens 3000000 --threads 8
  scripts/distil train --target ~/m/Llama-3.2-1B --minutes 60 --device cuda
  scripts/distil all --kind cut --layers 6 --minutes 240    an ordinary draft of six layers
  scripts/distil export --bits 4                            the last checkpoint again, in 4 bits
"""


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    step: str
    target: Path
    out: Path
    kind: str
    minutes: float
    steps: int | None
    tokens: int
    answer_tokens: int
    own: float
    batch: int
    prompts: Path | None
    text: Path | None
    recipe: Recipe
    seed: int
    threads: int
    device: str
    fresh: bool
    held: int
    bits: int
    head_bits: int
    name: str
    notes: tuple[str, ...]
    weights: Path
    models: Path
    argv: tuple[str, ...]

    @property
    def checkpoint(self) -> Path:
        return self.out / f"{self.kind}.checkpoint"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/distil",
        description="Train a draft for a target from what the target itself writes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("step", choices=STEPS, help="what to do, see below")
    add(
        "--target",
        type=Path,
        metavar="DIR",
        default=ROOT / "models" / "target",
        help="llama-like checkpoint (default: models/target)",
    )
    add("--out", type=Path, metavar="DIR", help="answers, features and checkpoints (default: results/distil-TARGET)")
    add("--kind", choices=("conditioned", "cut"), default="conditioned", help="a layer that sees the target's hidden states "
        "(default), or the first layers and the last")  # fmt: skip
    add("--minutes", type=float, metavar="N", default=60.0, help="time for the step, or for all (default: 60)")
    add("--threads", type=int, metavar="N", default=1, help="CPU threads (default: 1)")
    add("--device", default="cpu", help="of training: cpu or cuda (default: cpu)")
    add("--seed", type=int, metavar="N", default=0)

    add = result.add_argument_group("answers").add_argument
    add("--tokens", type=int, metavar="N", default=1_500_000, help="stop at so many answer tokens (default: 1500000)")
    add("--answer-tokens", type=int, metavar="N", default=256, help="longest answer (default: 256)")
    add(
        "--own", type=float, metavar="X", default=0.4, help="share of prompts the target makes up itself (default: 0.4)"
    )
    add("--batch", type=int, metavar="N", default=128, help="answered at once (default: 128)")
    add("--prompts", type=Path, metavar="FILE", help="prompts, one a line, or .jsonl with messages or prompt")
    add("--text", type=Path, metavar="FILE", help="text that is learned from as it stands")

    recipe = Recipe()
    add = result.add_argument_group("training").add_argument
    add("--layers", type=int, metavar="N", help="of the draft (default: 1; of a cut model: 4)")
    add("--head", type=int, metavar="N", default=recipe.head, help=f"tokens with logits (default: {recipe.head})")
    add(
        "--unroll",
        type=int,
        metavar="N",
        default=recipe.unroll,
        help=f"steps trained on own features (default: {recipe.unroll})",
    )
    add(
        "--rate",
        type=float,
        metavar="X",
        default=recipe.rate,
        help=f"of learning, at its highest (default: {recipe.rate:g})",
    )
    add(
        "--batch-tokens",
        type=int,
        metavar="N",
        default=recipe.batch_tokens,
        help=f"of a step (default: {recipe.batch_tokens})",
    )
    add(
        "--longest",
        type=int,
        metavar="N",
        default=recipe.longest,
        help=f"tokens of a sequence learned from (default: {recipe.longest})",
    )
    add("--share", type=float, metavar="X", default=recipe.weights.share, help="of positions whose logits are compared; the "
        f"features of all are (default: {recipe.weights.share:g})")  # fmt: skip
    add("--steps", type=int, metavar="N", help="stop after so many steps, too")
    add("--held", type=int, metavar="N", default=64, help="held-out answers the live figure is taken on (default: 64)")
    add("--fresh", action="store_true", help="forget the checkpoint that is there")

    add = result.add_argument_group("export").add_argument
    add("--bits", type=int, choices=(4, 8, 32), default=8, help="of the draft's layers (default: 8)")
    add("--head-bits", type=int, choices=(4, 8, 32), default=4, help="of its head (default: 4)")
    add("--note", action="append", default=[], metavar="TEXT", help="a line for the record; may be repeated")
    add("--name", metavar="NAME", help="of the weights (default: the target's and the kind)")
    add(
        "--weights",
        type=Path,
        metavar="DIR",
        default=WEIGHTS,
        help="where weights are kept (default: deployments/draft/weights)",
    )
    add("--models", type=Path, metavar="DIR", help=f"where {NAME}/ is built (default: the target's neighbour)")
    return result


def read_options(argv: Sequence[str]) -> Options:
    """Exits with a sentence when an option is not what it may be."""
    parse = parser()
    given = parse.parse_args(argv)
    target: Path = given.target.expanduser()
    label = target.resolve().name
    if not 0 < given.share <= 1:
        parse.error("--share is a share above 0, at most 1")
    if not 0 <= given.own <= 1:
        parse.error("--own is a share from 0 to 1")
    for name in (
        "minutes",
        "threads",
        "tokens",
        "answer_tokens",
        "batch",
        "head",
        "unroll",
        "rate",
        "batch_tokens",
        "longest",
    ):
        if getattr(given, name) <= 0:
            parse.error(f"--{name.replace('_', '-')} must be above 0")
    cut = given.kind == "cut"
    recipe = Recipe(
        layers=given.layers or (4 if cut else 1),
        head=given.head,
        unroll=1 if cut else given.unroll,
        batch_tokens=given.batch_tokens,
        longest=given.longest,
        rate=given.rate,
        seed=given.seed,
        weights=Weights(share=given.share),
    )
    return Options(
        step=given.step,
        target=target,
        out=given.out or ROOT / "results" / f"distil-{label}",
        kind=given.kind,
        minutes=given.minutes,
        steps=given.steps,
        tokens=given.tokens,
        answer_tokens=given.answer_tokens,
        own=given.own,
        batch=given.batch,
        prompts=given.prompts,
        text=given.text,
        recipe=recipe,
        seed=given.seed,
        threads=min(given.threads, len(os.sched_getaffinity(0))),
        device=given.device,
        fresh=given.fresh,
        held=given.held,
        bits=given.bits,
        head_bits=given.head_bits,
        name=given.name or f"{label}-{given.kind}",
        notes=tuple(given.note),
        weights=given.weights,
        models=given.models or target.absolute().parent,
        argv=tuple(argv),
    )
