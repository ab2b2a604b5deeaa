"""What ``ray_config.yaml`` ships: the benchmark measures that unless told otherwise."""

from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[2] / "ray_config.yaml"


def base_config() -> dict[str, Any]:
    """The repository's Serve config."""
    content: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return content


def shipped_chain() -> tuple[int, int]:
    """Draft tokens a round, and the most sequences it drafts for at once (0: any number)."""
    args = base_config()["applications"][0]["args"]
    chain = args.get("chain") or {}
    tokens = chain.get("tokens") or max((draft.get("tokens", 1) for draft in args["drafts"]), default=1)
    return int(tokens), int(chain.get("max_batch") or 0)
