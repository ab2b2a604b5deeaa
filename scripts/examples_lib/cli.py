"""Command line of ``scripts/examples``."""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console

from deployments.config.load import REPOSITORY
from deployments.demo.client import DemoError
from scripts.bench_lib.served import ServedBackend
from scripts.examples_lib import code, law, shop, show, tutor
from scripts.examples_lib.app import App
from scripts.examples_lib.config import config, write_config
from scripts.examples_lib.example import Example

EXAMPLES: dict[str, Example] = {
    name: cast("Example", module) for name, module in {"law": law, "shop": shop, "code": code, "tutor": tutor}.items()
}
ALL = "all"
HINT = """\
The examples need the application to have evidence of theirs. This makes a config that has it, and serves it:
  scripts/examples --write-config examples-app
  scripts/serve --config examples-app/ray_config.yaml"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if options.write_config:
        print(write_config(options.write_config))
        return 0
    if not options.names:
        for name, example in EXAMPLES.items():
            console.print(f"{name:6} {example.LINE}", highlight=False, soft_wrap=True)
        console.print("scripts/examples NAME runs one, scripts/examples all every one.", highlight=False)
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    told = Console(stderr=True)
    try:
        with contextlib.nullcontext(options.url) if options.url else _served(told) as url:
            app = App(url)
            for name in options.names:
                found = EXAMPLES[name].run(app)
                if options.json:
                    print(json.dumps({"example": name, "model": app.model, **found.as_dict()}), flush=True)
                else:
                    show.report(console, name, found)
    except (DemoError, RuntimeError) as error:
        told.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        if options.url and "HTTP 400" in str(error):
            told.print(HINT, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class Served(ServedBackend):
    """The application that was started for the examples."""

    @property
    def url(self) -> str:
        return self._url


@contextlib.contextmanager
def _served(told: Console) -> Iterator[str]:
    """The embedded application with the examples' evidence, on a free port; its URL."""
    with tempfile.TemporaryDirectory(prefix="chain-examples-") as folder:
        backend = Served("examples", config(Path(folder)), REPOSITORY / "results" / "examples-logs")
        told.print("starting the application", highlight=False)
        try:
            backend.start([], [], [])
            yield backend.url
        finally:
            backend.stop()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/examples",
        description="Runs examples of the answer chain on real models and says what came of it; without a name, lists them.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(EXAMPLES)}; {ALL}: every one")
    parser.add_argument("--url", help="a running application; default: the embedded one is started for the examples")
    parser.add_argument("--json", action="store_true", help="one JSON object an example, with the whole trace")
    parser.add_argument("--write-config", type=Path, metavar="FOLDER", help="only write the application's config there")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in (*EXAMPLES, ALL)]:
        parser.error(f"no example {unknown[0]!r}; there are: {', '.join(EXAMPLES)}, {ALL}")
    if ALL in options.names:
        options.names = list(EXAMPLES)
    return options


if __name__ == "__main__":
    sys.exit(main())
