"""Command line of ``scripts/answers``."""

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from scripts.answers_lib import questions, report, served, systems
from scripts.answers_lib.client import Client
from scripts.answers_lib.records import Store
from scripts.answers_lib.run import Run, warm_up
from scripts.bench_lib import machine
from scripts.bench_lib.shipped import FILE

ROOT = Path(__file__).resolve().parents[2]
EPILOG = """\
systems
  target       the target alone
  draft        the draft model alone, its greedy answer
  majority     what most of the K drafts answer
  chain        the answer chain as it is by default: lossless, so its answers are the target's and only cost differs
  chain_chat   the same with the acceptance policy "chat": what drafts say may stand
  chain_write  the same, but where drafts diverge the target writes with all of them in view
  draft and majority are read off the drafts in the trace of chain.

how it measures
  Every question in five wordings, all systems in turn, at temperature 0. An answer is right if a program that reads it
  finds the gold answer. Consistent: share of pairs of wordings answered alike, right or wrong. Intervals are bootstrapped
  over questions, for wordings of one stand and fall together. Costs are ratios of sums to the target alone; target CPU is
  known only where this script starts the application itself. Every answer is kept in results/ as it comes: after an
  interruption the same command goes on.

examples
  scripts/answers --quick                            14 questions in two wordings: a first look in a few minutes
  scripts/answers --out docs/answers.json            all of it
  scripts/answers --url http://127.0.0.1:8000        against a running application
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts what runs in the background deaf to SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        every = systems.systems(options.k)
        chosen = [every[name] for name in _known(options.systems, every)]
        found = questions.load()
        asked = found.chosen(options.kinds, options.each)
        store = Store(ROOT / "results", _settings(options))
        if options.fresh:
            store.forget()
        run = Run(found, asked, options.wordings, store, console, machine.commit(ROOT))
        finished = _ask(run, options, systems.asked(chosen, every), console)
        left = [name for name in run.left_out if name in every]
        kept = [s for s in chosen if s.name not in left and not (s.derive is not None and "chain" in left)]
        if not finished and not report.whole(store.records, kept, asked, options.wordings):
            console.print("interrupted before any question was whole; the same command goes on from here")
            return 130
        result = report.summarise(store.records, kept, asked, options.wordings)
    except (ValueError, RuntimeError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 1
    commits = sorted({record.commit[:12] for record in store.records})
    result |= {
        "commit": ", ".join(commits),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "model": options.url or "ray_config.yaml",
        "notes": notes(options, finished),
        "left_out": run.left_out,
    }
    console.print(report.table(result))
    for sentence in report.verdict(result):
        console.print(f"- {sentence}", highlight=False)
    console.print(f"written: {options.out}, {report.write(result, options.out)}", soft_wrap=True)
    return 0 if finished else 130


def _ask(run: Run, options: argparse.Namespace, sent: list[systems.System], console: Console) -> bool:
    run.store.begin()
    everything = {(s.name, q.id, w) for s in sent for q in run.chosen for w in range(options.wordings)}
    if everything <= {record.key for record in run.store.records}:
        console.print("everything has been asked already (--fresh asks again)")
        return True
    own = None if options.url else served.Application(ROOT / "results" / "answers-logs")
    try:
        if own is not None:
            console.print("starting the application")
            own.start_serving()
            run.cpu = partial(served.cpu_seconds, own.target_processes())
        client = Client(own.url if own is not None else options.url, max_tokens=options.max_tokens, temperature=0.0)
        run.left_out |= warm_up(client, sent)
        return run.ask(client, sent)
    except KeyboardInterrupt:
        return False
    finally:
        if own is not None:
            own.stop()


def notes(options: argparse.Namespace, finished: bool) -> list[str]:
    """What a reader must know to judge the figures."""
    said = [
        f"At most {options.max_tokens} tokens an answer, temperature 0, k = {options.k}: the first draft is greedy, the others are "
        "sampled at the draft's diversity temperature.",
        "Right: a program that reads the answer finds the gold answer. Consistent: share of pairs of wordings answered alike, right "
        "or wrong; what cannot be read agrees with nothing. Intervals: bootstrap over questions.",
        "x time, x target CPU, x passes: ratios of sums to the target alone, 95% interval. A pass is a decoding step of the target, "
        "and one more where it scored drafts. The draft's own work is in the time only.",
        "Systems take turns on each question in rotating order, one request at a time; all but the first find its prompt in the "
        "prefix cache.",
        "Where the target computes in bfloat16, logits a rounding step apart can come out either way: verifying several tokens at "
        "once can then go on otherwise than plain decoding, and `chain` than `target`. In float32 their texts are the same.",
        *options.note,
    ]
    if not finished:
        said.append("Interrupted: only questions that every system answered in every wording are counted.")
    return said


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What answers depend on, beside the code."""
    return {
        "questions": questions.SHIPPED.read_text(encoding="utf-8"),
        "max_tokens": options.max_tokens,
        "k": options.k,
        "url": options.url or "",
        "config": "" if options.url else yaml.safe_load(FILE.read_text(encoding="utf-8")),
    }


def _known(names: str, every: dict[str, systems.System]) -> list[str]:
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in every:
            raise ValueError(f"no system {name!r}; known: {', '.join(every)}")
    if not chosen:
        raise ValueError("--systems is empty")
    return chosen


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    command = argparse.ArgumentParser(
        prog="scripts/answers",
        description="Ask systems the shipped questions: how often they are right, how steadily, at what cost.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--url", help="a running application (default: start ray_config.yaml's)")
    add("--quick", action="store_true", help="two questions of each kind in two wordings")
    add("--systems", metavar="A,B", default=",".join(systems.systems(1)), help="default: all of those below")
    add("--kinds", metavar="A,B", type=lambda text: text.split(","), help="kinds of questions (default: all)")
    add("--each", type=int, metavar="N", help="questions of each kind (default: all; quick: 2)")
    add("--wordings", type=int, metavar="N", help="of each question (default: 5; quick: 2)")
    add("--k", type=int, default=3, help="drafts of the chain and of majority (default: 3)")
    add("--max-tokens", type=int, default=48, metavar="N", help="of one answer (default: 48)")
    add(
        "--out",
        type=Path,
        default=ROOT / "results" / "answers.json",
        help="JSON; Markdown beside it (default: results/answers.json)",
    )
    add(
        "--note",
        action="append",
        default=[],
        metavar="TEXT",
        help="a sentence for the report, of the machine's load, say",
    )
    add("--fresh", action="store_true", help="forget what an earlier run with the same settings was answered")
    options = command.parse_args(argv)
    options.each = options.each or (2 if options.quick else None)
    options.wordings = options.wordings or (2 if options.quick else questions.WORDINGS)
    if not 1 <= options.wordings <= questions.WORDINGS:
        command.error(f"--wordings takes 1 to {questions.WORDINGS}")
    if min(options.k, options.max_tokens, options.each or 1) < 1:
        command.error("--k, --max-tokens and --each start at 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
