"""Command-line options of ``scripts/select_draft`` and what they may be."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hw.providers import known_profiles
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.prompts import MEASURED_SETS, Prompt
from scripts.select_lib import prompts
from scripts.select_lib.candidates import Candidate, Target, Unusable, lookup, read_candidate, read_target

EPILOG = """\
what it measures
  acceptance   by position 1 to 8, greedy and sampled. The target answers the prompts once, by itself; each candidate is then
               led along these answers, from the target's KV of the prompt where it can take that, as in service. What the
               running system counts is the same within 2 points, and the run says so, or by how much not.
  cost         of a draft token by context (64, 512, 1024) and by sequences at once (1, 4, 8), of a prompt token, memory, load
               time; of the target's step by tokens verified; and of both beside each other, where they share memory.
  prediction   tokens a second for drafts of 1 to 8 tokens, drafted while the target waits (synchronous) or while it verifies
               (overlapped). The best two are then run in the real engine, and predicted is printed beside measured.
  rules of thumb (size, architecture, acceptance below 0.75) are warnings, with what the measured costs make of them.

  The answers, the target's KV and everything measured are kept: the same command goes on where it was interrupted, and with one
  more --draft it measures only that one. Times need a quiet machine; acceptance does not.

examples
  scripts/select_draft                                          models/target against every models/draft-*, on prose
  scripts/select_draft --set prose,copy,code,json               on several kinds of text: which draft suits which
  scripts/select_draft --prompts mine.jsonl --count 40          on your own prompts, {"prompt": "..."} a line
  scripts/select_draft --target ~/m/target --draft ~/m/draft-int4 --draft ~/m/draft-1b --out results/mine.json
  scripts/select_draft --verify 0                               predictions only
  scripts/select_draft --quick                                  three prompts, batch 1: does it work?
"""
QUICK = {"count": 3, "tokens": 32, "repetitions": 1, "batches": "1", "verify": 0}
FULL = {"count": 12, "tokens": 96, "repetitions": 3, "batches": "1,4,8", "verify": 2}
MOST_BATCH, MOST_TOKENS = 8, 512


@dataclass(frozen=True)
class Options:
    """The command line, checked. ``refused``: candidates that cannot draft for this target, and why."""

    target: Target
    candidates: list[Candidate]
    refused: list[str]
    prompts: list[Prompt]
    tokens: int
    batches: tuple[int, ...]
    repetitions: int
    verify: int
    dtype: str
    provider: str
    out: Path
    fresh: bool
    argv: tuple[str, ...]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/select_draft",
        description="Which draft to use for a target: acceptance and cost of each candidate, what they predict, and a trial of the best.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--target", type=Path, metavar="DIR", help="target checkpoint (default: models/target)")
    add("--draft", type=Path, metavar="DIR", action="append",
        help="a candidate, a folder that scripts/prepare_models or scripts/distil made; may be repeated (default: every models/draft-*)")  # fmt: skip
    add("--no-suffix", action="store_true", help="leave out the source without weights")
    add("--set", metavar="A,B", default="prose", help=f"prompt sets, of {', '.join(MEASURED_SETS)} (default: prose)")
    add("--prompts", type=Path, metavar="FILE",
        help="your own prompts instead: JSON lines with messages or prompt, or plain text, one prompt a line")  # fmt: skip
    add("--count", type=int, metavar="N", help="prompts of each set (default: 12; quick: 3)")
    add("--tokens", type=int, metavar="N", help="longest answer (default: 96; quick: 32)")
    add("--batches", metavar="N,M", help=f"sequences at once, up to {MOST_BATCH} (default: 1,4,8; quick: 1)")
    add("--repetitions", type=int, metavar="N", help="turns of everything that is timed (default: 3; quick: 1)")
    add("--verify", type=int, metavar="N", help="run so many of the best in the real engine (default: 2; quick: 0)")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="the target's as served (default: bfloat16)",
    )
    add("--provider", choices=known_profiles(), default="cpu", help="of the drafts (default: cpu)")
    add("--out", type=Path, metavar="FILE", default=ROOT / "results" / "select_draft.json",
        help="JSON; Markdown and a plot are written beside it (default: results/select_draft.json)")  # fmt: skip
    add("--fresh", action="store_true", help="measure everything anew")
    add("--quick", action="store_true", help="three prompts, one sequence, once, nothing verified")
    return result


def read_options(argv: Sequence[str]) -> Options:
    """Parse; exits with a sentence on what cannot be."""
    command = parser()
    raw = command.parse_args(argv)
    for name, value in (QUICK if raw.quick else FULL).items():
        if getattr(raw, name) is None:
            setattr(raw, name, value)
    try:
        return _checked(raw, argv)
    except ValueError as error:  # Unusable is one
        command.error(str(error))


def _checked(raw: argparse.Namespace, argv: Sequence[str]) -> Options:
    if min(raw.count, raw.repetitions) < 1 or raw.verify < 0:
        raise ValueError("--count and --repetitions start at 1, --verify at 0")
    if not 16 <= raw.tokens <= MOST_TOKENS:
        raise ValueError(f"--tokens {raw.tokens}: 16 to {MOST_TOKENS}")
    if raw.out.suffix != ".json":
        raise ValueError(f"--out {raw.out}: names the JSON file; Markdown and plot are written beside it")
    try:
        batches = tuple(sorted({int(part) for part in raw.batches.split(",") if part.strip()}))
    except ValueError:
        raise ValueError(f"--batches takes numbers, not {raw.batches!r}") from None
    if 1 not in batches or batches[0] < 1 or batches[-1] > MOST_BATCH:
        raise ValueError(f"--batches: 1 must be among them, and none above {MOST_BATCH}")
    chosen = prompts.load(_split(raw.set), raw.prompts, raw.count)
    if not chosen:
        raise ValueError(f"--set names at least one of {', '.join(MEASURED_SETS)}")
    target = read_target((raw.target or ROOT / "models" / "target").resolve())
    given = [folder.resolve() for folder in raw.draft or []]
    candidates, refused = read_candidates(given or prepared(), target, strict=len(given) == 1)
    if not raw.no_suffix:
        candidates.append(lookup())
    if not candidates:
        raise ValueError(
            "; ".join(refused) or "no candidates: scripts/prepare_models makes models/draft-*, --draft names one"
        )
    return Options(
        target=target,
        candidates=candidates,
        refused=refused,
        prompts=chosen,
        tokens=raw.tokens,
        batches=batches,
        repetitions=raw.repetitions,
        verify=raw.verify,
        dtype=raw.dtype,
        provider=raw.provider,
        out=raw.out,
        fresh=raw.fresh,
        argv=tuple(argv),
    )


def read_candidates(folders: Sequence[Path], target: Target, *, strict: bool) -> tuple[list[Candidate], list[str]]:
    """Those that can draft for ``target``, each once, and a sentence for each other one.

    Raises:
        Unusable: for the first of those, where ``strict``.
    """
    found: list[Candidate] = []
    refused = []
    for folder in dict.fromkeys(folders):
        try:
            candidate = read_candidate(folder, target)
        except Unusable as error:
            if strict:
                raise
            refused.append(str(error))
            continue
        if any(other.name == candidate.name for other in found):
            refused.append(f"{folder}: another candidate is called {candidate.name}; rename its folder")
        else:
            found.append(candidate)
    return found, refused


def prepared() -> list[Path]:
    """Drafts in ``models/``."""
    return sorted(folder for folder in (ROOT / "models").glob("draft-*") if folder.is_dir())


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
