"""The evidence section: what it asks for, and what is wrong with it before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from deployments.app import build_evidence
from deployments.chain.faults import FaultPolicy
from deployments.config import ConfigError, load_args
from deployments.config.wishes import wishes
from deployments.evidence.build import evidence_problems, make_sources
from deployments.names import deployment_names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"vocab_size": 100}')
    (tmp_path / "documents").mkdir()
    (tmp_path / "rules.yaml").write_text("rules: [{name: a, pattern: x, draft: y}]")
    return tmp_path


def args(**evidence: Any) -> dict[str, Any]:
    return {
        "target": {"name": "smol", "model": "target", "pool": "cpu"},
        "pools": {"cpu": {"cpus": 1}, "other": {"cpus": 2}},
        "evidence": {"pool": "other", **evidence},
    }


def problems(folder: Path, **evidence: Any) -> list[str]:
    try:
        return evidence_problems(load_args(args(**evidence), folder))
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ({"documets": "documents"}, "args.evidence.documets: unknown key; did you mean 'documents'?"),
        ({"pool": "npu"}, "args.evidence.pool: no pool 'npu'; pools: cpu, other"),
        ({"history": True}, "documents and history need index"),
        ({"documents": "none", "index": "index"}, "args.evidence.documents: no folder"),
        ({"documents": "documents", "index": "target/config.json"}, "config.json is not a folder"),
        ({"documents": "documents", "index": "documents"}, "args.evidence.index: lies inside documents"),
        ({"history": True, "index": "index", "sentences": "none"}, "no sentence model in"),
        ({"rules": "none.yaml"}, "none.yaml: cannot be read"),
        ({"similarity": 1.5}, "args.evidence.similarity: Input should be less than or equal to 1"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, evidence: dict[str, Any], expected: str) -> None:
    found = problems(folder, **evidence)
    assert any(expected in problem for problem in found), found


def test_a_broken_rule_stops_the_application_with_its_name(folder: Path) -> None:
    (folder / "rules.yaml").write_text("rules: [{name: broken, pattern: '(', draft: y}]")
    with pytest.raises(ConfigError, match=r"args.evidence.rules: .*rule 'broken': pattern"):
        build_evidence(load_args(args(rules="rules.yaml"), folder))


def test_only_what_is_configured_is_made(folder: Path) -> None:
    def names(**evidence: Any) -> list[str]:
        spec = load_args(args(**evidence), folder).evidence
        assert spec is not None
        return [source.name for source in make_sources(spec, FaultPolicy())]

    assert names() == ["templates"]
    assert names(templates=False) == []
    assert names(rules="rules.yaml") == ["rules", "templates"]


def test_it_is_placed_named_and_counted(folder: Path) -> None:
    config = load_args(args(rules="rules.yaml"), folder)
    assert config.evidence is not None
    assert config.evidence.rules == folder / "rules.yaml"
    assert deployment_names(config)[-1] == "Evidence"
    assert any(wish.pool == "other" for wish in wishes(config))
    application = build_evidence(config)
    assert application is not None
    assert application._bound_deployment.ray_actor_options["num_cpus"] == 2
    without = args()
    del without["evidence"]
    assert build_evidence(load_args(without, folder)) is None
