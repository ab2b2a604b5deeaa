"""Command line of ``scripts/kv``."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from scripts.kv_lib import options
from scripts.kv_lib.capture import PROMPT, Prompt, capture
from scripts.kv_lib.convert import Wish, convert
from scripts.kv_lib.inspect import inspect
from scripts.kv_lib.pair_process import run_pair
from scripts.kv_lib.problem import EXPECTED, Problem, explain
from scripts.kv_lib.tokens import read_tokens, salt
from scripts.kv_lib.verify import verify

_WIDTH = 140  # of tables where no terminal says


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: refused or failed, the reason is on standard error; 2: wrong options; 130: interrupted."""
    parser = options.parser()
    given = parser.parse_args(argv)
    options.check(parser, given)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    try:
        return _run(given, console)
    except EXPECTED as error:
        print(f"scripts/kv {given.command}: {explain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(given: argparse.Namespace, console: Console) -> int:
    match given.command:
        case "inspect":
            return inspect(given.file, console, as_json=given.json)
        case "verify":
            tokens = None if given.tokens is None else read_tokens(given.tokens)
            return verify(given.file, console, tokens=tokens, salt=salt(given.tenant, given.salt))
        case "convert":
            wish = Wish(
                k=given.k_dtype or given.dtype,
                v=given.v_dtype or given.dtype,
                scale=given.scale,
                block_tokens=given.block_tokens,
                order=given.order,
                packing=given.packing,
                heads=given.heads,
                layers=given.layers,
            )
            return convert(given.file, given.out, wish, console)
        case "capture":
            prompt = Prompt(_prompt(given), given.max_tokens)
            return capture(given.draft, prompt, given.out, salt(given.tenant, given.salt), console)
        case "pair":
            return run_pair(given)
        case _:
            from scripts.kv_lib.bench import bench  # loads torch and compiles loops

            return bench(given, console)


def _prompt(given: argparse.Namespace) -> str:
    if given.prompt_file is None:
        return PROMPT if given.prompt is None else str(given.prompt)
    try:
        return str(given.prompt_file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise Problem(f"{given.prompt_file} is not text") from None


if __name__ == "__main__":
    sys.exit(main())
