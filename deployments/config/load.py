"""From the mapping under ``args`` to a checked :class:`AppConfig`."""

import ast
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deployments.config.errors import ConfigError, explain, nearest
from deployments.config.models import AppConfig, Chain, Evidence
from hw.onnx.checkpoint import CheckpointError, Manifest

REPOSITORY = Path(__file__).resolve().parents[2]


def load_args(args: Mapping[str, Any], folder: Path | None = None, root: str = "args") -> AppConfig:
    """Check ``args`` and resolve its model paths against ``folder`` (the YAML's), else the repository.

    Raises:
        ConfigError: naming every problem.
    """
    try:
        config = AppConfig.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError(explain(error, AppConfig, root)) from None
    config = _resolved(config, folder)
    problems = engine_kwarg_problems(config.target.engine_kwargs, f"{root}.target.engine_kwargs")
    problems += model_problems(config, root)
    if config.evidence is not None and (wrong := config.evidence.validators.problem()):
        problems.append(f"{root}.evidence.validators.{wrong}")
    if problems:
        raise ConfigError(problems)
    return config


def resolve(path: Path, folder: Path | None) -> Path:
    """An absolute path; a relative one is looked up beside the YAML first, then in the repository."""
    path = path.expanduser()
    if path.is_absolute():
        return path
    if folder is not None and (folder / path).exists():
        return (folder / path).resolve()
    return (REPOSITORY / path).resolve()


def _resolved(config: AppConfig, folder: Path | None) -> AppConfig:
    target = config.target.model_copy(update={"model": resolve(config.target.model, folder)})
    drafts = [draft.model_copy(update={"model": resolve(draft.model, folder)}) for draft in config.drafts]
    return config.model_copy(
        update={
            "target": target,
            "drafts": drafts,
            "evidence": _evidence(config, folder),
            "chain": _chain(config, folder),
        }
    )


def _chain(config: AppConfig, folder: Path | None) -> Chain:
    semantic = config.chain.semantic
    if semantic is None:
        return config.chain
    resolved = semantic.model_copy(update={"model": resolve(semantic.model, folder)})
    return config.chain.model_copy(update={"semantic": resolved})


def _evidence(config: AppConfig, folder: Path | None) -> Evidence | None:
    if config.evidence is None:
        return None
    paths = {name: getattr(config.evidence, name) for name in ("documents", "index", "sentences", "rules")}
    resolved: dict[str, Any] = {name: resolve(path, folder) for name, path in paths.items() if path}
    resolved["validators"] = config.evidence.validators.resolved(lambda path: resolve(path, folder))
    return config.evidence.model_copy(update=resolved)


def model_problems(config: AppConfig, root: str = "args") -> list[str]:
    """Model folders that are not there, or not what they should be."""
    problems = []
    hint = "; run scripts/prepare_models, or point at another folder"
    model = config.target.model
    if not (model / "config.json").is_file():
        problems.append(f"{root}.target.model: no checkpoint (config.json) in {model}{hint}")
    else:
        longest = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
        wanted = config.target.max_model_len
        if longest and wanted and wanted > longest:
            problems.append(f"{root}.target.max_model_len: {wanted} is more than the checkpoint's {longest}")
    for index, draft in enumerate(config.drafts):
        if not any(draft.model.glob("*.onnx")):
            problems.append(f"{root}.drafts[{index}].model: no ONNX model (*.onnx) in {draft.model}{hint}")
    if config.chain.semantic is not None:
        problems += sentence_model_problems(config.chain.semantic.model, f"{root}.chain.semantic.model", hint)
    return problems


def sentence_model_problems(model: Path, path: str, hint: str) -> list[str]:
    """What is wrong with the folder of a sentence model."""
    try:
        kind = Manifest.read(model).kind
    except CheckpointError:
        kind = ""
    if kind != "sentences" or not (model / "model.onnx").is_file():
        return [f"{path}: no sentence model in {model}{hint}"]
    return []


@cache
def engine_argument_names() -> frozenset[str]:
    """The names vLLM accepts, engine and frontend; read from its source, for importing it takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(["vLLM is not installed; run scripts/setup"])
    folder = Path(spec.submodule_search_locations[0])
    names: set[str] = set()
    for file in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
        for node in ast.parse((folder / file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                names.update(
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign)
                    and isinstance(item.target, ast.Name)
                    and item.target.id[0] != "_"
                )
    return frozenset(names)


def engine_kwarg_problems(kwargs: Mapping[str, Any], path: str) -> list[str]:
    """Names that vLLM does not know."""
    if not kwargs:
        return []
    known = engine_argument_names()
    return [
        f"{path}.{key}: not an argument of vLLM{hint if 'mean' in (hint := nearest(key, known)) else ''}"
        for key in kwargs
        if key not in known
    ]
