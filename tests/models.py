"""Where tests find the prepared models."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def model(name: str) -> Path:
    """Folder of a prepared model (``target``, ``draft-int4``, …); fails with what to do when it is not there."""
    folder = Path(os.environ.get("CHAIN_MODELS", ROOT / "models")) / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: run scripts/prepare_models")
    return folder
