"""Command line of ``scripts/distil``: answers, training, export; each goes on where it was stopped."""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from scripts.distil_lib.options import MEASURED_FOLDER, Options, read_options

SAVE_S, EVERY = 60.0, 20  # seconds between checkpoints; live figures in a run
MEASURED = ("prose",)  # prompt sets of the benchmark that the record gives figures on
GENERATED = 0.5  # of the time of `all`


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"), console=console, disable=not console.is_terminal,
    )  # fmt: skip


class Lines:
    """A line now and then where no bar can be drawn."""

    def __init__(self, console: Console, every: float = 20.0) -> None:
        self._console, self._every, self._last = console, every, 0.0

    def __call__(self, text: str, always: bool = False) -> None:
        now = time.monotonic()
        if always or (not self._console.is_terminal and now - self._last > self._every):
            self._last = now
            self._console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)


def generate(options: Options, console: Console, minutes: float) -> None:
    """Answers until there are enough or the time is up."""
    from scripts.distil_lib.generate import Drawn, Generator, Plan
    from scripts.distil_lib.shards import shard_names
    from scripts.distil_lib.target import TargetShape, fingerprint

    TargetShape.read(options.target)
    plan = Plan(
        tokens=options.tokens, seconds=60 * minutes, answer_tokens=options.answer_tokens, batch=options.batch, own=options.own,
        seed=options.seed, threads=options.threads, prompts=options.prompts, text=options.text,
    )  # fmt: skip
    began, say = time.monotonic(), Lines(console)
    with bar(console) as progress:
        task = progress.add_task("answers", total=1.0, name="loading the target")
        generator = Generator(options.target, fingerprint(options.target), options.out, plan)

        def report(drawn: Drawn) -> None:
            spent = time.monotonic() - began
            text = f"{drawn.tokens:,} tokens in {drawn.sequences:,} answers, {drawn.tokens / max(spent, 1e-9):.0f} a second"
            progress.update(task, completed=max(drawn.tokens / plan.tokens, spent / plan.seconds), name=text)
            say(text)

        drawn = generator(report)
        for name in MEASURED:
            folder = options.out / MEASURED_FOLDER / name
            if not shard_names(folder):
                progress.update(task, name=f"answers to measure with: {name}")
                plan = dataclasses.replace(
                    plan, measured=name, prompts=None, text=None, tokens=1 << 40, seconds=float("inf")
                )
                Generator(options.target, generator.weights, folder, plan, generator.llm)(lambda _: None)
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(drawn.refused.items())) or "none"
    say(f"answers: {drawn.tokens:,} tokens in {options.out}; prompts not used: {refused}", always=True)


def train(options: Options, console: Console, minutes: float) -> None:
    """Train until the time is up, from the checkpoint if there is one."""
    import torch

    from scripts.distil_lib import record
    from scripts.distil_lib.feed import held_sequences
    from scripts.distil_lib.measure import measure
    from scripts.distil_lib.target import Target
    from scripts.distil_lib.train import Trainer, read_checkpoint
    from scripts.distil_lib.work import begin, restored

    torch.set_num_threads(options.threads)
    say = Lines(console)
    target = Target(options.target, options.device)
    there = options.checkpoint.is_file() and not options.fresh
    content = read_checkpoint(options.checkpoint, target.weights, options.recipe) if there else None
    draft = restored(content, target, options.kind) if content else begin(options, target)
    spent = content["state"]["seconds"] if content else 0.0
    trainer = Trainer(draft, target, options.out, options.recipe, budget=spent + 60 * minutes, steps=options.steps)
    if content:
        trainer.load(content)
        say(f"going on after {trainer.state.step:,} steps", always=True)
    found = held_sequences(options.out, target, most=options.held, longest=options.recipe.longest)
    saved, measured = time.monotonic(), time.monotonic()

    def live() -> None:
        nonlocal measured
        figures = measure(draft, found, target, options.recipe.longest)
        state = trainer.state
        state.curve.append(record.point(state.step, state.tokens, state.seconds, trainer.shards, figures))
        say(f"{state.tokens:,} tokens seen, {len(found)} held-out answers: {figures}", always=True)
        measured = time.monotonic()

    with bar(console) as progress:
        task = progress.add_task("training", total=1.0, name="the target's hidden states")

        def after(parts: dict[str, float]) -> None:
            nonlocal saved
            state = trainer.state
            first = f", first guess {state.curve[-1]['first']:.3f}" if state.curve else ""
            text = f"{state.tokens:,} tokens seen, KL {parts['kl']:.2f}{first}"
            progress.update(task, completed=trainer.progress, name=text)
            say(text)
            if time.monotonic() - measured > 60 * minutes / EVERY:
                live()
            if time.monotonic() - saved > SAVE_S:
                trainer.save(options.checkpoint)
                saved = time.monotonic()

        if not found:
            say("no held-out answers yet: no live figure", always=True)
        elif not content:
            live()
        try:
            trainer(after)
        finally:
            if trainer.state.step:
                if found and trainer.progress >= 1:
                    live()
                trainer.save(options.checkpoint)
    say(f"trained: {options.checkpoint}", always=True)


def export(options: Options, console: Console) -> None:
    """Weights, record and model of the last checkpoint."""
    from scripts.distil_lib.work import export_conditioned, export_cut

    say = Lines(console)
    with bar(console) as progress:
        task: TaskID = progress.add_task("export", total=1.0, name="")

        def report(done: float, text: str) -> None:
            progress.update(task, completed=done, name=text)
            say(text)

        kind = export_cut if options.kind == "cut" else export_conditioned
        for line in kind(options, report):
            say(line, always=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    from hw.onnx.build import BuildError
    from hw.onnx.checkpoint import CheckpointError
    from scripts.distil_lib.shards import ShardError
    from scripts.distil_lib.train import CheckpointMismatch

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.step == "generate":
            generate(options, console, options.minutes)
        if options.step == "all":
            _all(options, console)
        if options.step == "train":
            train(options, console, options.minutes)
        if options.step == "export":
            export(options, console)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what is there is kept; the same command goes on from here[/]")
        return 130
    except (ShardError, CheckpointError, CheckpointMismatch, BuildError, ValueError, OSError) as error:
        console.print(f"scripts/distil: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _all(options: Options, console: Console) -> None:
    """Answers in a process of their own, whose memory is free again when a draft is trained."""
    import subprocess

    arguments: list[Any] = [
        "generate",
        *options.argv[options.argv.index("all") + 1 :],
        "--minutes",
        options.minutes * GENERATED,
    ]
    before = options.argv[: options.argv.index("all")]
    command = [sys.executable, "-m", "scripts.distil_lib.cli", *before, *map(str, arguments)]
    child = subprocess.Popen(command)
    try:
        status = child.wait()
    except KeyboardInterrupt:
        child.wait(timeout=60)  # it got the signal as well
        raise
    if status:
        raise ValueError(f"drawing answers ended with status {status}")
    rest = dataclasses.replace(options, step="train")
    train(rest, console, options.minutes * (1 - GENERATED))
    export(rest, console)


if __name__ == "__main__":
    sys.exit(main())
