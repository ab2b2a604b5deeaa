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
    """Tokens a round of the draft model, and the most sequences it drafts for at once (0: any number)."""
    args = base_config()["applications"][0]["args"]
    chain = args.get("chain") or {}
    tokens = args["drafts"][0].get("tokens", 1) if args["drafts"] else 1
    return int(tokens), int(chain.get("max_batch") or 0)


def shipped_draft() -> str:
    """Name of the folder of the first draft's model."""
    return Path(base_config()["applications"][0]["args"]["drafts"][0]["model"]).name
