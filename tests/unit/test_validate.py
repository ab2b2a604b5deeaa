"""Linting of Serve config files and the cluster check, without a cluster."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from cluster.pools import Node, Wish, matches
from cluster.preflight import check
from deployments.config import AppConfig, load_args
from deployments.config.load import REPOSITORY
from deployments.config.serve_file import lint, read, unknown_overrides
from deployments.config.tokenizers import tokenizer_problems
from deployments.config.wishes import placement_problems

GOOD: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "chain",
            "route_prefix": "/",
            "import_path": "deployments.app:build",
            "args": {},
            "deployments": [{"name": "Router", "num_replicas": 2}],
        }
    ],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(yaml.safe_dump(GOOD))
    *parents, last = path.split(".")
    holder: Any = content
    for part in parents:
        holder = holder[int(part)] if part.isdigit() else holder.setdefault(part, {})
    holder[last] = value
    return content


def test_good_file_has_no_problems() -> None:
    assert lint(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("http_option", {}, "http_option: Serve ignores this key here; did you mean 'http_options'?"),
        ("http_options.prot", 1, "http_options.prot: Serve ignores this key here; did you mean 'port'?"),
        ("import_path", "x", "import_path: Serve ignores this key here; it belongs in application"),
        ("num_replicas", 2, "num_replicas: Serve ignores this key here; it belongs in deployment"),
        (
            "applications.0.num_replicas",
            2,
            "applications[0].num_replicas: Serve ignores this key here; it belongs in deployment",
        ),
        ("applications.0.http_options", {}, "it belongs in the top level"),
        ("applications.0.drafts", [], "applications[0].drafts: Serve ignores this key here; it belongs in args"),
        ("applications.0.rout_prefix", "/", "did you mean 'route_prefix'?"),
        (
            "applications.0.deployments.0.num_replica",
            2,
            "applications[0].deployments[0].num_replica: Serve ignores this key here; did you mean 'num_replicas'?",
        ),
        ("applications.0.deployments.0.num_cpus", 2, "it belongs in ray_actor_options"),
        ("applications.0.deployments.0.ray_actor_options", {"num_cpu": 2}, "did you mean 'num_cpus'?"),
        ("applications.0.deployments.0.autoscaling_config", {"min_replica": 1}, "did you mean 'min_replicas'?"),
        ("applications.0.runtime_env", {"working_dir": "."}, "is a local folder, which Serve cannot upload"),
        ("applications", [], "applications: a list with at least one application is required"),
        ("http_options.port", "many", "http_options.port: Input should be a valid integer"),
    ],
)
def test_keys_that_serve_drops_are_named(path: str, value: Any, expected: str) -> None:
    problems = lint(changed(path, value))
    assert any(expected in problem for problem in problems), problems


def test_remote_working_dir_is_fine() -> None:
    assert lint(changed("applications.0.runtime_env", {"working_dir": "s3://bucket/repo.zip"})) == []


def test_override_of_an_unknown_deployment_lists_the_known() -> None:
    application = {"deployments": [{"name": "Routr"}]}
    problems = unknown_overrides(application, ["Router", "Target:smol"], "applications[0]")
    assert problems == [
        "applications[0].deployments[0].name: no deployment 'Routr'; this application has Router, Target:smol"
    ]


@pytest.mark.parametrize(
    ("text", "expected"), [("a: [", r":1:5: not valid YAML"), ("- 1", "is a mapping"), (None, "no such file")]
)
def test_unreadable_files(tmp_path: Path, text: str | None, expected: str) -> None:
    file = tmp_path / "x.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read(file)


def test_the_repositorys_configs_are_clean() -> None:
    for file in [REPOSITORY / "ray_config.yaml", *(REPOSITORY / "cluster").glob("serve_*.yaml")]:
        assert lint(read(file)) == [], file


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deployments.validate", "--no-cluster", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )


def test_the_command_prints_problems_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    bad = changed("applications.0.args", {"target": {"name": "x", "model": "none", "pol": "cpu"}, "pools": {"cpu": {}}})
    file.write_text(yaml.safe_dump(bad))
    result = run(str(file))
    assert result.returncode == 1
    assert "applications[0].args.target.pol: unknown key; did you mean 'pool'?" in result.stderr
    assert "Traceback" not in result.stderr


class TestTokenizers:
    VOCAB: ClassVar[dict[str, int]] = {"a": 0, "b": 1, "c": 2}

    def config(self, folder: Path, draft_vocab: dict[str, int], padded: int = 3) -> AppConfig:
        for name, vocab in (("target", self.VOCAB), ("draft", draft_vocab)):
            (folder / name).mkdir()
            tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
            (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "target" / "config.json").write_text(json.dumps({"vocab_size": padded}))
        (folder / "draft" / "model.onnx").touch()
        draft = {"name": "d", "model": "draft", "pool": "cpu"}
        args = {"target": {"name": "t", "model": "target", "pool": "cpu"}, "drafts": [draft], "pools": {"cpu": {}}}
        return load_args(args, folder)

    def test_padding_and_order_are_no_difference(self, tmp_path: Path) -> None:
        reordered = {"c": 2, "a": 0, "b": 1}
        assert tokenizer_problems(self.config(tmp_path, reordered, padded=64)) == []

    def test_same_size_but_other_tokens_is_refused_with_both_fingerprints(self, tmp_path: Path) -> None:
        (problem,) = tokenizer_problems(self.config(tmp_path, {"a": 0, "b": 2, "c": 1}))
        assert problem.startswith("args.drafts[0].model: d has another tokenizer than the target")
        assert len(set(re.findall(r"[0-9a-f]{64}", problem))) == 2

    def test_missing_tokenizer_is_a_problem_not_a_crash(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, self.VOCAB)
        (tmp_path / "draft" / "tokenizer.json").unlink()
        assert "tokenizer.json" in tokenizer_problems(config)[0]


class TestPreflight:
    NODES: ClassVar[list[Node]] = [
        Node({"CPU": 8, "GPU": 1}, {"ray.io/accelerator-type": "H100"}),
        Node({"CPU": 4, "NPU": 2}, {"kind": "npu"}),
    ]

    def test_all_there(self) -> None:
        wishes = [Wish("gpu", {}, ({"CPU": 4, "GPU": 1},)), Wish("npu", {"kind": "npu"}, ({"NPU": 1}, {"NPU": 1}))]
        assert placement_problems(check(wishes, self.NODES)) == []

    def test_missing_resource_is_named_with_the_pool(self) -> None:
        (problem,) = placement_problems(check([Wish("npu", {}, ({"NPU": 3},))], self.NODES))
        assert re.search(r"pool 'npu' wants NPU 3; the cluster has NPU 2 .*missing: NPU 3", problem)

    def test_missing_label_is_named(self) -> None:
        (problem,) = placement_problems(check([Wish("a", {"kind": "tpu"}, ({"CPU": 1},))], self.NODES))
        assert "missing: kind=tpu" in problem

    def test_pools_share_the_nodes(self) -> None:
        wishes = [Wish("a", {}, ({"CPU": 8},)), Wish("b", {}, ({"CPU": 8},))]
        first, second = check(wishes, self.NODES)
        assert not first.missing
        assert second.missing

    def test_a_bundle_does_not_span_nodes(self) -> None:
        (verdict,) = check([Wish("a", {}, ({"CPU": 12},))], self.NODES)
        assert verdict.missing

    @pytest.mark.parametrize(
        ("selector", "value", "expected"),
        [("a", "a", True), ("a", "b", False), ("!a", "b", True), ("!a", "a", False), ("in(a, b)", "b", True),
         ("in(a,b)", "c", False), ("!in(a,b)", "c", True), ("!a", None, True), ("a", None, False)],
    )  # fmt: skip
    def test_label_selectors(self, selector: str, value: str | None, expected: bool) -> None:
        assert matches({"k": selector}, {} if value is None else {"k": value}) is expected
