"""The files that deploy: each by the strictest means there are, and the pools they name against the nodes they make."""

import copy
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cluster.pools import Node, plan
from deployments.config import AppConfig
from deployments.config.load import REPOSITORY
from deployments.config.serve_file import lint
from deployments.config.wishes import wishes
from deployments.target.kv_connector.settings import transfer_config
from deployments.validate import check_file

CLUSTER = REPOSITORY / "cluster"
CONFIGS = CLUSTER / "configs"
SHAPES = ("gpu_target_cpu_draft", "gpu_target_npu_draft", "two_draft_pools", "four_nodes")
FILES = [
    *CONFIGS.glob("*.yaml"),
    CLUSTER / "ray-cluster.yaml",
    CLUSTER / "kuberay/rayservice.yaml",
    REPOSITORY / "ray_config.yaml",
]
SCHEMA = yaml.safe_load((Path(__file__).parent / "rayservice_schema.yaml").read_text())

HEAD = Node({"CPU": 4}, {"pool": "head"}, "head")
GPU = Node({"CPU": 16, "GPU": 1}, {"pool": "gpu"}, "gpu")
CPU = Node({"CPU": 8}, {"pool": "cpu"}, "cpu")
NPU = Node({"CPU": 8, "NPU": 2}, {"pool": "npu"}, "npu")
NODES = {
    "gpu_target_cpu_draft": {"gpu": [GPU], "cpu": [CPU, CPU]},
    "gpu_target_npu_draft": {"gpu": [GPU], "npu": [NPU]},
    "two_draft_pools": {"gpu": [GPU], "far": [CPU]},
    "four_nodes": {"target": [Node({"CPU": 1}, {"pool": "target"})], "draft": [Node({"CPU": 1}, {"pool": "draft"})]},
}


class OnceLoader(yaml.SafeLoader):
    """YAML in which a key that comes twice is an error; elsewhere the last one wins without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{node.start_mark}: {twice} twice"
        return super().construct_mapping(node, deep)


def load(path: Path) -> Any:
    return yaml.load(path.read_text(), OnceLoader)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_yaml_lint(path: Path) -> None:
    text = path.read_text()
    load(path)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    for number, line in enumerate(text.splitlines(), 1):
        assert line == line.rstrip(), number
        assert "\t" not in line, number
        assert len(line) <= 200, number


def test_the_lint_sees_a_key_that_comes_twice(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: {b: 1, b: 2}\n")
    with pytest.raises(AssertionError, match="twice"):
        load(tmp_path / "x.yaml")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that look like prepared models."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []})
    for name in ("target", "draft-int8", "draft-int4"):
        (root / name).mkdir()
        (root / name / "tokenizer.json").write_text(tokenizer)
    (root / "target" / "config.json").write_text(json.dumps({"vocab_size": 1, "max_position_embeddings": 4096}))
    for name in ("draft-int8", "draft-int4"):
        (root / name / "model.onnx").touch()
    return root


def checked(name: str, models: Path) -> tuple[list[AppConfig], list[str]]:
    """As scripts/validate, with model folders that are there on any machine."""
    text = (CONFIGS / f"{name}.yaml").read_text().replace("model: models/", f"model: {models}/")
    return check_file(_written(models, text))


def _written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_our_validate_and_serves_schema(name: str, models: Path) -> None:
    configs, problems = checked(name, models)
    assert problems == []
    assert len(configs) == 1
    ServeDeploySchema.model_validate(load(CONFIGS / f"{name}.yaml"))


@pytest.mark.parametrize("name", SHAPES)
def test_pools_on_their_nodes(name: str, models: Path) -> None:
    (config,), _ = checked(name, models)
    nodes = NODES[name]
    planned = plan(wishes(config), [HEAD, *(node for pool in nodes.values() for node in pool)])
    assert (planned.lacks, planned.notes) == ((), ())
    for pool in nodes:
        rest = [HEAD, *(node for other, found in nodes.items() if other != pool for node in found)]
        assert pool in {lack.pool for lack in plan(wishes(config), rest).lacks}


def test_drafts_stay_off_gpu_nodes(models: Path) -> None:
    (config,), _ = checked("gpu_target_cpu_draft", models)
    (lack,) = plan(wishes(config), [GPU, Node({"CPU": 64, "GPU": 8}, {"pool": "gpu"})]).lacks
    assert lack.pool == "cpu"


class TestPrefillDecode:
    @pytest.fixture(scope="class")
    def args(self) -> dict[str, Any]:
        (application,) = load(CONFIGS / "prefill_decode.yaml")["applications"]
        return dict(application["args"])

    def test_serves_schemas(self, args: dict[str, Any]) -> None:
        from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs

        content = load(CONFIGS / "prefill_decode.yaml")
        assert lint(content) == []
        ServeDeploySchema.model_validate(content)
        PDServingArgs.model_validate(copy.deepcopy(args))

    @pytest.mark.parametrize(("leg", "role"), [("prefill_config", "kv_producer"), ("decode_config", "kv_consumer")])
    def test_the_connectors_own_settings(self, args: dict[str, Any], leg: str, role: Any) -> None:
        made = transfer_config(role, memory_mib=2048, hand_off_s=30.0)
        assert args[leg]["engine_kwargs"]["kv_transfer_config"] == made


class TestRayUp:
    def test_rays_own_checks(self) -> None:
        content = load(CLUSTER / "ray-cluster.yaml")
        validate_config(prepare_config(copy.deepcopy(content)))
        content["available_node_types"]["gpu"]["lables"] = {}
        with pytest.raises(jsonschema.ValidationError):
            validate_config(prepare_config(content))

    def test_its_nodes_hold_the_pools(self, models: Path) -> None:
        (config,), _ = checked("gpu_target_cpu_draft", models)
        types = load(CLUSTER / "ray-cluster.yaml")["available_node_types"]
        assert (
            sum(kind.get("max_workers", 0) for kind in types.values())
            <= load(CLUSTER / "ray-cluster.yaml")["max_workers"]
        )
        nodes = [Node(k["resources"], k["labels"]) for k in types.values() for _ in range(k.get("max_workers", 1))]
        assert plan(wishes(config), nodes).lacks == ()
        draft = config.autoscaling.drafts["int8"]
        assert types["cpu"]["max_workers"] == draft.max_replicas


class TestKubeRay:
    @pytest.fixture
    def content(self) -> dict[str, Any]:
        return dict(load(CLUSTER / "kuberay/rayservice.yaml"))

    def test_schema(self, content: dict[str, Any]) -> None:
        jsonschema.Draft202012Validator.check_schema(SCHEMA)
        jsonschema.validate(content, SCHEMA)

    @pytest.mark.parametrize(
        "path", ["spec", "spec.rayClusterConfig", "spec.rayClusterConfig.workerGroupSpecs.0.template.spec.containers.0"]
    )
    def test_a_misspelt_field_fails(self, content: dict[str, Any], path: str) -> None:
        holder: Any = copy.deepcopy(content)
        whole = holder
        for part in path.split("."):
            holder = holder[int(part)] if part.isdigit() else holder[part]
        holder["lables"] = {}
        with pytest.raises(jsonschema.ValidationError, match="lables"):
            jsonschema.validate(whole, SCHEMA)

    def test_the_application_is_that_of_the_config_file(self, content: dict[str, Any]) -> None:
        assert yaml.load(content["spec"]["serveConfigV2"], OnceLoader) == load(CONFIGS / "gpu_target_cpu_draft.yaml")

    def test_versions_are_those_of_the_lock_files(self, content: dict[str, Any]) -> None:
        pinned = re.search(r"^ray\[serve\]==(\S+)", (REPOSITORY / "requirements/common.in").read_text(), re.MULTILINE)
        assert pinned is not None
        assert content["spec"]["rayClusterConfig"]["rayVersion"] == pinned[1]

    def groups(self, content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for group in content["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
            yield group, group["template"]["spec"]["containers"][0]

    def test_what_ray_is_told_is_what_the_pod_gets(self, content: dict[str, Any]) -> None:
        for group, container in self.groups(content):
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            assert container["resources"]["limits"] == container["resources"]["requests"]
            limits = container["resources"]["limits"]
            assert group["resources"]["CPU"] == limits["cpu"]
            assert group["resources"].get("GPU") == limits.get("nvidia.com/gpu")
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in group["template"]["spec"]["volumes"]}

    def test_one_group_for_each_pool_and_room_for_its_replicas(self, content: dict[str, Any], models: Path) -> None:
        (config,), _ = checked("gpu_target_cpu_draft", models)
        nodes = [
            Node({name: float(amount) for name, amount in group["resources"].items()}, group["labels"])
            for group, _ in self.groups(content)
            for _ in range(group["replicas"])
        ]
        assert {group["groupName"] for group, _ in self.groups(content)} == set(config.pools)
        assert plan(wishes(config), nodes).lacks == ()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_dockerfiles(kind: str) -> None:
    text = (CLUSTER / "docker" / f"Dockerfile.{kind}").read_text()
    sources = [source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[1:-1]]
    assert sources
    assert all((REPOSITORY / source).exists() for source in sources)
    for script in re.findall(r"scripts/(?:setup|prepare_models)", text):
        assert (REPOSITORY / script).is_file()
    assert re.findall(r"CHAIN_MACHINE=(\w+)", text) == [kind] * 3
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert re.search(r"^FROM python:(\d+\.\d+)-", text, re.MULTILINE)[1] == project["requires-python"][2:6]  # type: ignore[index]
    ignored = (CLUSTER / "docker" / f"Dockerfile.{kind}.dockerignore").read_text().split()
    assert {".git", ".venv", "models"} <= set(ignored)
