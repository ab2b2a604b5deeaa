"""Rules of placement and autoscaling in a configuration: what is refused, and where it says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.config import AppConfig, ConfigError, load_args
from deployments.config.placement import pool_rules, pool_selectors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"vocab_size": 128}))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.onnx").touch()
    return tmp_path


def load(folder: Path, pools: dict[str, Any], draft: str = "d", **sections: Any) -> AppConfig:
    args = {
        "target": {"name": "t", "model": "target", "pool": "gpu"},
        "drafts": [{"name": "a", "model": "draft", "pool": draft}],
        "pools": {"gpu": {"gpus": 1, "labels": {"pool": "gpu"}}, **pools},
        **sections,
    }
    return load_args(args, folder)


def test_drafts_keep_off_a_gpu_target_by_themselves(folder: Path) -> None:
    config = load(folder, {"d": {}, "other": {}})
    assert pool_selectors(config)["d"] == {"pool": "!gpu"}
    assert pool_rules(config)["other"].apart == frozenset()  # holds no draft


@pytest.mark.parametrize(("pool", "selector"), [({"beside_target": True}, {}), ({"near": "gpu"}, {"pool": "gpu"})])
def test_unless_told_otherwise(folder: Path, pool: dict[str, Any], selector: dict[str, str]) -> None:
    assert pool_selectors(load(folder, {"d": pool}))["d"] == selector


@pytest.mark.parametrize(
    ("pools", "sections", "message"),
    [
        ({"d": {"near": "gpus"}}, {}, "args.pools.d: no pool 'gpus'; pools: d, gpu"),
        ({"d": {"apart": ["d"]}}, {}, "args.pools.d: near and apart name other pools, not the pool itself"),
        ({"d": {"aprt": ["gpu"]}}, {}, "args.pools.d.aprt: unknown key; did you mean 'apart'?"),
        ({"d": {"resources": {"NPU": 1.5}}}, {}, "NPU: Ray gives out shares of one device, or whole devices, not 1.5"),
        ({"d": {}}, {"autoscaling": {"drafts": {"b": {"max_replicas": 2}}}}, "args.autoscaling.drafts.b: no such draft; drafts: a"),
        (
            {"d": {}},
            {"autoscaling": {"target": {"max_replicas": 2, "target_ongoing_requests": 4, "kv_use": 0.5}}},
            "args.autoscaling.target.kv_use: unknown key; did you mean 'kv_usage'?",
        ),
        (
            {"d": {}},
            {"autoscaling": {"router": {"min_replicas": 2, "max_replicas": 3, "target_ongoing_requests": 4}}},
            "args.autoscaling.router: starts with 1, not between 2 and 3",
        ),
        ({"d": {}}, {"autoscaling": {"target": {"min_replicas": 0, "max_replicas": 1, "target_ongoing_requests": 4}}}, "min_replicas"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, pools: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, pools, **sections)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems
