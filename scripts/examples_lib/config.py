"""The application that all examples run on: ``ray_config.yaml`` with evidence of theirs."""

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from deployments.config.load import REPOSITORY
from deployments.config.serve_file import read
from scripts.examples_lib import law, shop

FILE = "ray_config.yaml"
POOL = "examples"


def evidence(folder: Path) -> dict[str, Any]:
    """``args.evidence`` but for its pool; documents and rules are written into ``folder``, which must exist."""
    documents, index = folder / "documents", folder / "index"
    for made in (documents, index):
        made.mkdir(exist_ok=True)
    (documents / law.CONTRACT.name).write_bytes(law.CONTRACT.read_bytes())
    rules = folder / "rules.yaml"
    rules.write_text(yaml.safe_dump({"rules": shop.rules()}, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return {
        "documents": str(documents),
        "index": str(index),
        "rules": str(rules),
        "sentences": str(REPOSITORY / "models" / "sentences"),
        "templates": False,
    }


def config(folder: Path) -> dict[str, Any]:
    """A Serve config; what it names beside models lies in ``folder``."""
    folder = folder.resolve()
    content = copy.deepcopy(read(REPOSITORY / FILE))
    args = content["applications"][0]["args"]
    args["pools"][POOL] = {"cpus": 0}  # it runs beside the others, for a moment at a time
    args["evidence"] = {"pool": POOL, **evidence(folder)}
    return content


def write_config(folder: Path) -> Path:
    """The same as a file in ``folder``, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    # JSON's escapes are YAML's: paths of any kind stay what they are
    file.write_text(yaml.safe_dump(json.loads(json.dumps(config(folder))), sort_keys=False), encoding="utf-8")
    return file
