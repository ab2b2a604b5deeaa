"""The composition root: what each deployment asks of Ray."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from deployments.app import actor_options, build_draft, build_target, llm_config, vocab_size
from deployments.config import AppConfig, load_args
from deployments.config.autoscaling import Autoscaling
from deployments.config.models import Pool
from deployments.config.wishes import wishes
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


def test_nothing_scales_unless_told_to(config: AppConfig) -> None:
    assert llm_config(config).deployment_config["num_replicas"] == 1
    assert build_draft(config, config.drafts[0])._bound_deployment._deployment_config.autoscaling_config is None


def test_a_section_makes_a_deployment_scale(config: AppConfig) -> None:
    sections = {
        "target": {"max_replicas": 4, "target_ongoing_requests": 8},
        "drafts": {"a": {"min_replicas": 0, "max_replicas": 2}},
    }
    scaling = config.model_copy(update={"autoscaling": Autoscaling.model_validate(sections)})
    target = llm_config(scaling).deployment_config
    assert "num_replicas" not in target
    assert AutoscalingConfig(**target["autoscaling_config"]).max_replicas == 4
    draft = build_draft(scaling, config.drafts[0])._bound_deployment._deployment_config.autoscaling_config
    assert (draft.min_replicas, draft.initial_replicas, draft.max_replicas) == (0, 1, 2)
    assert draft.policy.policy_kwargs["loads"].keys() == {"busy", "sessions", "answers"}
    # one that ends because the load fell finishes what it has said half of
    assert llm_config(config).deployment_config["graceful_shutdown_timeout_s"] == config.fault_policy.drain_timeout_s
    assert target["graceful_shutdown_timeout_s"] == scaling.autoscaling.target.drain_s >= 600


def test_co_location_is_written_into_selectors(config: AppConfig) -> None:
    pools = config.pools | {
        "beside": Pool(near="gpu"),
        "npu": config.pools["npu"].model_copy(update={"labels": {}}),
    }
    near = config.model_copy(update={"pools": pools})
    assert actor_options(near, "beside")["label_selector"] == {"kind": "gpu"}
    assert actor_options(near, "npu")["label_selector"] == {"kind": "!gpu"}  # drafts keep off the target's GPU nodes
    assert wishes(near)[1].apart == {"gpu"}


def test_what_a_pool_holds_is_said(config: AppConfig) -> None:
    scaling = Autoscaling.model_validate({"drafts": {"a": {"max_replicas": 3}}})
    gpu, npu = wishes(config.model_copy(update={"autoscaling": scaling}))
    assert gpu.holds == "target x1"
    assert npu.holds == "draft a (cpu) x1, at most 3"


@pytest.mark.parametrize(
    ("sections", "wakes"),
    [
        ({}, None),
        ({"drafts": {"a": {"max_replicas": 2}}}, None),
        ({"drafts": {"a": {"min_replicas": 0, "max_replicas": 2}}}, ["a"]),
        ({"target": {"max_replicas": 2, "target_ongoing_requests": 4}}, []),
    ],
)
def test_the_target_reports_and_wakes_only_where_asked_to(
    config: AppConfig, sections: dict[str, Any], wakes: list[str] | None
) -> None:
    scaling = config.model_copy(update={"autoscaling": Autoscaling.model_validate(sections)})
    draft = build_draft(scaling, scaling.drafts[0])
    deployment = build_target(scaling, {"a": draft})["application"]._bound_deployment
    assert deployment.func_or_class.__name__ == ("TargetServer" if wakes is None else "AutoscaledTarget")
    assert deployment.init_kwargs.get("wakes") == wakes


def test_names(config: AppConfig) -> None:
    assert deployment_names(config) == ["Router", "Target:org--model-1_5", "Draft:a"]


def test_vocabulary_of_the_checkpoint(config: AppConfig) -> None:
    assert vocab_size(config) == 128
