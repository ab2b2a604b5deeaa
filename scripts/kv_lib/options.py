"""Command-line options of ``scripts/kv`` and what they may be."""

import argparse
from pathlib import Path
from typing import Any

from hw.kv.manifest import BITS
from scripts.bench_lib.engine import ROOT

DESCRIPTION = """\
Block sets of the KV plane (docs/kv_block_format.md) in files: make one, look at it, verify it, convert it; and measure
how fast keys and values move on this machine.
"""
EPILOG = """\
a first walk
  scripts/kv capture --out prompt.kv                             a real draft reads a prompt; its KV becomes a file
  scripts/kv inspect prompt.kv                                   whose it is, of which model, how it is laid out
  scripts/kv verify prompt.kv --tokens prompt.kv.tokens.json     is it whole, and is it about these tokens?
  scripts/kv convert prompt.kv small.kv --dtype int8             what a receiver with other numbers would make of it
  scripts/kv bench --quick                                       how fast, against a plain copy of the same bytes

Exit status: 0 done; 1 refused or failed (the first word says why, docs/kv_block_format.md lists all of them); 2 wrong options.
"""
CONVERT = """\
examples
  scripts/kv convert a.kv b.kv --dtype bfloat16                    half the bytes; says how far the values moved
  scripts/kv convert a.kv b.kv --k-dtype int8 --v-dtype int4 --scale float16
  scripts/kv convert a.kv b.kv --block-tokens 32 --packing k_transposed    as vLLM's CPU cache holds it
  scripts/kv convert a.kv b.kv --heads 0:1 --layers 0:15           what one tensor-parallel rank of a first stage holds

Dtypes: float32, float16, bfloat16, int8, int4 (with one scale for each token and head). Packings: token_major, k_transposed,
amx_vnni (16-bit numbers, --block-tokens of a multiple of 16). --block-tokens 0 is unblocked. What was quantised once is not
quantised again. Lossless steps can be undone to the same bytes; lossy ones enter the file's lineage.
"""
BENCH = """\
sections
  pages     vLLM's paged cache, bfloat16, by tokens of a block and by packing: out of the pages into canonical form and back;
            the transposition of K apart from the copy of V.
  import    a prompt's KV from shared memory into a slot of the draft: what the draft does when a target sends it KV. Against
            plain copies, and against the draft's own prefill of the same prompt. Also the export in front of it, end to end.
  sizes     export and import by number of tokens: the fixed cost (intercept) and what a byte costs.
  digests   sealing and verifying with and without BLAKE3.

how it measures
  One thread. Every destination is mapped and warm. Everything within a section takes turns, call by call, since the speed of
  a virtual machine drifts by more than what is looked for; ratios are taken within a repetition, then their median. memcpy is
  numpy.copyto between arrays of equal dtype. Close other programs: their share of the machine is written into the result.

examples
  scripts/kv bench --quick
  scripts/kv bench --out docs/benchmarks/kv.json
  scripts/kv bench --only import --draft models/draft-int4 --tokens 1000
"""
PAIR = """\
Starts the target in vLLM and measures what its KV is worth to drafts of the same weights:
  agreement     how often a draft's best guess is the target's greedy token, on prose: with KV of its own, with the target's for
                the prompt, and with the target's for all that is committed (args.kv.refresh)
  first draft   how long after the target's first token the first tokens of a draft are accepted, on a long prompt: with
                the target's KV, and reading the prompt itself

examples
  scripts/kv pair --prompts 4 --repetitions 1
  scripts/kv pair --out docs/benchmarks/kv_pair.json
"""
SECTIONS = ("pages", "import", "sizes", "digests")
DRAFT = ROOT / "models" / "draft-int8"


def parser() -> argparse.ArgumentParser:
    """All commands."""
    result = argparse.ArgumentParser(
        prog="scripts/kv", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    one = command("inspect", "Show what a file holds; digests are not compared.")
    one.add_argument("file", type=Path, metavar="FILE")
    one.add_argument("--json", action="store_true", help="all of it as JSON, for programs")

    one = command("verify", "Compare all digests, look at rows and numbers, and compare tokens where they are given.")
    one.add_argument("file", type=Path, metavar="FILE")
    one.add_argument("--tokens", metavar="FILE|IDS", help="token ids from position 0 on: JSON list in a file, or 1,2,3")
    _add_tenant(one)

    one = command("convert", "Convert a file the way a receiver converts what it is offered.", CONVERT)
    one.add_argument("file", type=Path, metavar="FILE")
    one.add_argument("out", type=Path, metavar="OUT")
    for name, text in (("--dtype", "keys and values"), ("--k-dtype", "keys"), ("--v-dtype", "values")):
        one.add_argument(name, choices=tuple(BITS), metavar="D", help=f"of {text} (default: as they are)")
    one.add_argument(
        "--scale", choices=("float32", "float16"), help="dtype of the scales of what is quantised (default: float32)"
    )
    one.add_argument("--block-tokens", type=_count, metavar="N", help="tokens of a block, 0 for unblocked")
    one.add_argument("--order", choices=("HND", "NHD"), help="heads or tokens first within a block")
    one.add_argument("--packing", metavar="NAME", help="token_major, k_transposed or amx_vnni")
    one.add_argument("--heads", type=_range, metavar="A:B", help="keep KV heads A to B-1, global numbers")
    one.add_argument("--layers", type=_range, metavar="A:B", help="keep layers A to B-1, global numbers")
    _add_force(one)

    one = command("capture", "Run a draft over a prompt and write its keys and values as a file, tokens beside it.")
    one.add_argument("--out", type=Path, metavar="FILE", required=True)
    _add_draft(one)
    source = one.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="what to read (default: two sentences)")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same from a file")
    one.add_argument("--max-tokens", type=_positive, metavar="N", default=2048, help="of the prompt (default: 2048)")
    _add_tenant(one)
    _add_force(one)

    one = command("bench", "Measure how fast KV moves on this machine.", BENCH)
    _add_draft(one)
    one.add_argument("--only", type=_sections, metavar="A,B", default=SECTIONS, help=f"of {', '.join(SECTIONS)}")
    one.add_argument("--tokens", type=_positive, metavar="N", default=512, help="of the prompt (default: 512)")
    one.add_argument("--repetitions", type=_positive, metavar="N", help="(default: 7; with --quick 2)")
    one.add_argument("--quick", action="store_true", help="a first look in some seconds: fewer sizes and repetitions")
    one.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=ROOT / "results" / "kv.json",
        help="JSON result; Markdown is written beside it (default: results/kv.json)",
    )

    one = command("pair", "Measure what the target's KV is worth to a draft, both running.", PAIR)
    models = ROOT / "models"
    one.add_argument("--target", type=Path, metavar="DIR", default=models / "target", help="(default: models/target)")
    one.add_argument(
        "--drafts",
        type=Path,
        metavar="DIR",
        nargs="+",
        default=[models / "draft-int8", models / "draft-int4"],
        help="the first is also timed (default: models/draft-int8 models/draft-int4)",
    )
    one.add_argument("--prompts", type=_positive, metavar="N", default=12, help="of the prose set (default: 12)")
    one.add_argument("--tokens", type=_positive, metavar="N", default=64, help="of each answer (default: 64)")
    one.add_argument(
        "--long", type=_positive, metavar="N", default=1000, help="tokens of the long prompt (default: 1000)"
    )
    one.add_argument("--repetitions", type=_positive, metavar="N", default=3, help="of the timing (default: 3)")
    one.add_argument("--out", type=Path, metavar="FILE", help="JSON result as well")
    return result


def check(command: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What no single option can know; exits with a sentence on what cannot be."""
    if options.command == "bench" and options.out.suffix == ".md":
        command.error("--out names the JSON file; the Markdown is written beside it")
    if options.command in ("convert", "capture"):
        if options.out.exists() and not options.force:
            command.error(f"{options.out} is there already: name another file, or give --force to replace it")
        if not options.out.parent.is_dir():
            command.error(f"{options.out.parent} is no folder: make it first")
    if options.command == "convert":
        both = options.dtype and (options.k_dtype or options.v_dtype)
        if both:
            command.error("--dtype is for keys and values; name it, or --k-dtype and --v-dtype")


def _add_tenant(command: argparse.ArgumentParser) -> None:
    group = command.add_mutually_exclusive_group()
    group.add_argument("--tenant", default="", metavar="NAME", help="whose it is (default: the one without a name)")
    group.add_argument("--salt", metavar="HEX", help="the tenant's salt itself")


def _add_force(command: argparse.ArgumentParser) -> None:
    command.add_argument("--force", action="store_true", help="replace a file that is there")


def _add_draft(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft", type=Path, metavar="DIR", default=DRAFT, help="folder of an ONNX draft (default: models/draft-int8)"
    )


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text} is no range: write 0:2 for the first two")
    return int(first), int(last)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens: 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1 on is wanted")
    return int(text)


def _sections(text: str) -> Any:
    named = {part.strip() for part in text.split(",") if part.strip()}
    if not named or named - set(SECTIONS):
        wrong = ", ".join(sorted(named - set(SECTIONS))) or text or "nothing"
        raise argparse.ArgumentTypeError(f"no section {wrong}; there are: {', '.join(SECTIONS)}")
    return tuple(section for section in SECTIONS if section in named)
