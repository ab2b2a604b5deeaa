"""One provider in a process of its own: a JSON line for each stage, the last one what was found.

``{"at": 0.3, "doing": "…"}`` while it works, then ``{"row": {…}}``. A provider that crashes takes only this process along.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from hw.providers import find, get_profile


def row(provider: str, folders: list[Path], tokens: int, show: Any) -> dict[str, Any]:
    """``status``: missing (with ``reason``), listed (here, but cannot serve a draft: ``reason``) or run (``drafts``)."""
    from hw.providers.runtime import read_listing  # loads ONNX Runtime, here so that --help needs none

    profile = get_profile(provider)
    listing = read_listing([profile])
    verdict = find(profile, listing)
    found = asdict(verdict) | {"onnxruntime": listing.version}
    if not verdict.here:
        return found | {"status": "missing"}
    if profile.obstacle:
        return found | {"status": "listed", "reason": profile.obstacle}
    if not folders:
        return found | {"status": "listed", "reason": "not asked to run"}
    from scripts.hw_lib.trial import run

    drafts: dict[str, Any] = {}
    for number, folder in enumerate(folders):

        def tell(fraction: float, doing: str, number: int = number, name: str = folder.name) -> None:
            show({"at": (number + fraction) / len(folders), "doing": f"{name}: {doing}"})

        drafts[folder.name] = run(folder, provider, tokens, tell)
    return found | {"status": "run", "drafts": drafts}


def main(argv: list[str] | None = None) -> int:
    """0: the last line is the row. Any other end is for the caller to tell."""
    parser = argparse.ArgumentParser(prog="python -m scripts.hw_lib.child", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--provider", required=True)
    parser.add_argument("--draft", type=Path, action="append", default=[])
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args(argv)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a provider's library prints is not ours

    def show(line: dict[str, Any]) -> None:
        out.write(msgspec.json.encode(line) + b"\n")
        out.flush()

    try:
        show({"row": row(args.provider, args.draft, args.tokens, show)})
    except Exception as error:
        show({"row": {"name": args.provider, "status": "failed", "reason": f"{type(error).__name__}: {error}"}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
