"""A conditioned draft in the configuration: it just works with its own target, and is refused with any other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import save_file

from deployments.app import build, build_router
from deployments.config import AppConfig, ConfigError, load_args
from deployments.config.conditioned import conditioned_problems
from deployments.target.engine_args import chain_settings
from deployments.validate import check_file
from hw.onnx.checkpoint import Manifest, conditioned_facts, tokenizer_fingerprint, weights_fingerprint
from tests.conditioned import Random, Sizes

DRAFTS = [{"name": "d", "model": "draft", "pool": "cpu"}, {"name": "plain", "model": "plain", "pool": "cpu"}]
ARGS: dict[str, Any] = {
    "target": {"name": "t", "model": "target", "pool": "cpu"},
    "drafts": DRAFTS,
    "pools": {"cpu": {"cpus": 1}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target of a few numbers, a conditioned draft of it, and one that is none."""
    import numpy as np

    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}
    for name in ("target", "draft", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
    save_file({"w": np.arange(6, dtype=np.float32)}, str(tmp_path / "target" / "model.safetensors"))
    (tmp_path / "target" / "config.json").write_text(json.dumps({"vocab_size": 96, "max_position_embeddings": 64}))
    (tmp_path / "plain" / "model.onnx").touch()
    weights = weights_fingerprint(tmp_path / "target")
    Random(Sizes()).write(
        tmp_path / "draft", target_weights=weights, tokenizer=tokenizer_fingerprint(tmp_path / "plain")
    )
    return tmp_path


def config(folder: Path) -> AppConfig:
    return load_args(ARGS, folder)


def other_target(folder: Path) -> None:
    import numpy as np

    save_file({"w": np.arange(1, 7, dtype=np.float32)}, str(folder / "target" / "model.safetensors"))


def test_its_own_target_is_fine_and_keeps_hidden_states(folder: Path) -> None:
    assert conditioned_problems(config(folder)) == []
    assert chain_settings(config(folder)).hidden
    without = load_args({**ARGS, "drafts": [{**DRAFTS[0], "replicas": 0}, DRAFTS[1]]}, folder)
    assert not chain_settings(without).hidden


def test_whole_answers_are_asked_of_the_others_only(folder: Path) -> None:
    application = build_router(
        config(folder),
        {"application": None, "card": None},
        {"d": "conditioned", "plain": "plain"},
        None,  # type: ignore[arg-type, dict-item]
    )
    assert application._bound_deployment.init_kwargs["drafts"] == {"plain": "plain"}


def test_another_target_is_refused_with_both_fingerprints(folder: Path) -> None:
    trained, there = weights_fingerprint(folder / "target"), ""
    other_target(folder)
    there = weights_fingerprint(folder / "target")
    (problem,) = conditioned_problems(config(folder))
    assert problem.startswith("args.drafts[0].model: d was trained on the hidden states of another target")
    assert re.findall(r"[0-9a-f]{64}", problem) == [trained, there]
    resolved = config(folder)
    models = [{**DRAFTS[index], "model": str(draft.model)} for index, draft in enumerate(resolved.drafts)]
    with pytest.raises(ConfigError, match=trained):
        build({**ARGS, "target": {**ARGS["target"], "model": str(resolved.target.model)}, "drafts": models})


def test_validate_says_so(folder: Path) -> None:
    file = folder / "app.yaml"
    content = {
        "applications": [{"name": "chain", "route_prefix": "/", "import_path": "deployments.app:build", "args": ARGS}]
    }
    file.write_text(yaml.safe_dump(content))
    assert check_file(file)[1] == []
    other_target(folder)
    (problem,) = check_file(file)[1]
    assert problem.startswith("applications[0].args.drafts[0].model: d was trained on")


def test_a_prepared_target_says_its_fingerprint_itself(folder: Path) -> None:
    facts = conditioned_facts(folder / "draft")
    assert facts is not None
    (folder / "target" / "model.safetensors").unlink()
    assert "has no weights" in conditioned_problems(config(folder))[0]
    sizes = dict.fromkeys(("layers", "kv_heads", "head_dim", "vocab_size", "max_context", "rope_theta"), 0)
    Manifest("checkpoint", "k", facts.target_weights, "t", "X", created_by={}, **sizes).write(folder / "target")  # type: ignore[arg-type]
    assert conditioned_problems(config(folder)) == []


def test_a_broken_folder_is_a_problem_not_a_crash(folder: Path) -> None:
    facts = json.loads((folder / "draft" / "chain.json").read_text())
    (folder / "draft" / "chain.json").write_text(json.dumps({**facts, "format": 99}))
    assert "has format 99" in conditioned_problems(config(folder))[0]
