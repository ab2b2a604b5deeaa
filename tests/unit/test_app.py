"""The composition root: what each deployment asks of Ray."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.app import actor_options, llm_config, vocab_size
from deployments.config import AppConfig, load_args
from deployments.names import deployment_names


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"vocab_size": 128, "model_type": "llama"}))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.onnx").touch()
    args: dict[str, Any] = {
        "target": {"name": "org/model-1.5", "model": "target", "pool": "gpu", "tensor_parallel_size": 2},
        "drafts": [
            {"name": "a", "model": "draft", "pool": "npu"},
            {"name": "off", "model": "draft", "pool": "npu", "replicas": 0},
        ],
        "pools": {
            "gpu": {"gpus": 1, "cpus": 4, "labels": {"kind": "gpu"}, "runtime_env": {"env_vars": {"A": "1"}}},
            "npu": {"cpus": 0, "resources": {"NPU": 1}, "labels": {"kind": "npu"}},
        },
        "limits": {"max_ongoing_requests": 7},
    }
    return load_args(args, tmp_path)


def test_a_draft_asks_for_its_pools_resources_only(config: AppConfig) -> None:
    assert actor_options(config, "npu") == {
        "num_cpus": 0,  # said, for Ray's own default is one
        "resources": {"NPU": 1},
        "label_selector": {"kind": "npu"},
    }


def test_the_target_in_ray_serve_llms_terms(config: AppConfig) -> None:
    llm = llm_config(config)
    assert llm.placement_group_config == {"bundle_per_worker": {"GPU": 1.0}}
    assert llm.deployment_config["placement_group_bundle_label_selector"] == [{"kind": "gpu"}]
    assert llm.deployment_config["max_ongoing_requests"] == 7
    assert llm.experimental_configs["stream_batching_interval_ms"] == 0
    assert llm.engine_kwargs["worker_cls"].endswith("GpuTargetWorker")
    assert llm.runtime_env == {"env_vars": {"A": "1"}}


def test_names(config: AppConfig) -> None:
    assert deployment_names(config) == ["Router", "Target:org--model-1_5", "Draft:a"]


def test_vocabulary_of_the_checkpoint(config: AppConfig) -> None:
    assert vocab_size(config) == 128
