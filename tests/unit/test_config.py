"""The configuration: what is wrong is named, with its place and the nearest right key."""

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.faults import FaultPolicy
from deployments.config import AppConfig, ConfigError, load_args
from deployments.config.load import engine_argument_names, resolve
from deployments.target.engine_args import chain_settings, engine_kwargs, placement, replica_bundles
from deployments.target.settings import ChainSettings


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"max_position_embeddings": 2048, "vocab_size": 100}')
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.onnx").touch()
    return tmp_path


def args(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "target": {"name": "smol", "model": "target", "pool": "cpu"},
        "drafts": [{"name": "int4", "model": "draft", "pool": "cpu"}],
        "pools": {"cpu": {"cpus": 1}},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        holder: Any = base
        for part in parents:
            holder = holder[int(part)] if part.isdigit() else holder.setdefault(part, {})
        holder[last] = value
    return base


def problems(models: Path, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_args(args(**changes), models)
    return error.value.problems


def test_good_config_resolves_paths_against_the_file(models: Path) -> None:
    config = load_args(args(), models)
    assert config.target.model == models / "target"
    assert config.drafts[0].model == models / "draft"
    assert config.draft_tokens == 24
    assert load_args(args(chain__sources=[]), models).draft_tokens == config.drafts[0].tokens


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"drafts__0__modle": "x"}, "args.drafts[0].modle: unknown key; did you mean 'model'?"),
        ({"chian": {}}, "args.chian: unknown key; did you mean 'chain'?"),
        ({"pools__cpu__gpu": 1}, "args.pools.cpu.gpu: unknown key; did you mean 'gpus'?"),
        ({"target__max_model_length": 9}, "args.target.max_model_length: unknown key; did you mean 'max_model_len'?"),
        ({"faults__draft_deadlin_s": 1}, "args.faults.draft_deadlin_s: unknown key; did you mean 'draft_deadline_s'?"),
        ({"target__pool": "gpuu"}, "args.target.pool: no pool 'gpuu'; pools: cpu"),
        ({"drafts__0__pool": "cpux"}, "args.drafts[0].pool: no pool 'cpux'; pools: cpu"),
        ({"drafts__0__tokens": 33}, "args.drafts[0].tokens: Input should be less than or equal to 32 (got 33)"),
        ({"faults__draft_deadline_s": 0}, "args.faults.draft_deadline_s: Input should be greater than 0 (got 0)"),
        ({"target__dtype": "int3"}, "args.target.dtype: Input should be"),
        ({"pools__cpu__resources": {"GPU": 1}}, "args.pools.cpu.resources: GPU is not a custom resource"),
        ({"target__engine_kwargs": {"dtype": "auto"}}, "dtype is not set here; use args.target.dtype"),
        (
            {"target__engine_kwargs": {"max_num_batched_token": 1}},
            "args.target.engine_kwargs.max_num_batched_token: not an argument of vLLM; did you mean 'max_num_batched_tokens'?",
        ),
        ({"target__model": "nowhere"}, "args.target.model: no checkpoint (config.json) in"),
        ({"drafts__0__model": "target"}, "args.drafts[0].model: no ONNX model (*.onnx) in"),
        ({"target__max_model_len": 4096}, "args.target.max_model_len: 4096 is more than the checkpoint's 2048"),
        ({"pools": {}}, "args.pools: at least one pool is needed"),
    ],
)
def test_each_mistake_is_named(models: Path, change: dict[str, Any], expected: str) -> None:
    found = problems(models, **change)
    assert any(expected in problem for problem in found), found


def test_a_missing_key_is_named(models: Path) -> None:
    broken = args()
    del broken["target"]["model"]
    with pytest.raises(ConfigError, match=r"args\.target\.model: required, but missing"):
        load_args(broken, models)


def test_all_mistakes_are_reported_at_once(models: Path) -> None:
    assert len(problems(models, chian={}, drafts__0__modle="x", target__dtyp="auto")) == 3


def test_two_drafts_of_one_name(models: Path) -> None:
    draft = {"name": "int4", "model": "draft", "pool": "cpu"}
    assert "two drafts are named 'int4'" in problems(models, drafts=[draft, draft])[0]


class TestCores:
    @pytest.mark.parametrize(("target", "draft", "own"), [([0, 1], [1], 1), ([0, 1, 2], [2], 2), ([0], [1], 0)])
    def test_the_last_cores_of_the_target_may_be_lent(
        self, models: Path, target: list[int], draft: list[int], own: int
    ) -> None:
        config = load_args(args(target__cores=target, drafts__0__cores=draft), models)
        assert chain_settings(config).own_threads == own

    def test_a_draft_that_is_off_borrows_nothing(self, models: Path) -> None:
        config = load_args(args(target__cores=[0, 1], drafts__0__cores=[1], drafts__0__replicas=0), models)
        assert chain_settings(config).own_threads == 0

    @pytest.mark.parametrize(
        ("target", "draft", "message"),
        [([0, 1], [0], "core 0 is shared but not one of the last 1"), ([1], [1], "leave it at least one of its own")],
    )
    def test_others_may_not(self, models: Path, target: list[int], draft: list[int], message: str) -> None:
        assert message in problems(models, target__cores=target, drafts__0__cores=draft)[0]


class TestPlacement:
    GPU: ClassVar[dict[str, Any]] = {
        "target__pool": "gpu",
        "pools": {"gpu": {"gpus": 1, "cpus": 4}, "cpu": {"cpus": 1}},
    }

    def test_draft_that_could_land_on_target_hardware_is_refused(self, models: Path) -> None:
        assert "could land on the target's GPU nodes" in problems(models, **self.GPU)[0]

    @pytest.mark.parametrize("apart", [{"resources": {"NPU": 1}}, {"labels": {"kind": "npu"}}, {"beside_target": True}])
    def test_unless_kept_apart_or_allowed(self, models: Path, apart: dict[str, Any]) -> None:
        pools = {"gpu": {"gpus": 1}, "cpu": {"cpus": 1, **apart}}
        config = load_args(args(target__pool="gpu", pools=pools), models)
        assert config.target.pool == "gpu"

    def test_gpu_ranks_each_get_a_bundle_and_nothing_else_is_asked(self, models: Path) -> None:
        pools = {"gpu": {"gpus": 1, "cpus": 4, "resources": {"fast": 1}}, "cpu": {"beside_target": True}}
        config = load_args(args(target__pool="gpu", target__tensor_parallel_size=2, pools=pools), models)
        assert placement(config) == {"bundle_per_worker": {"GPU": 1.0, "fast": 1.0}}
        assert replica_bundles(config) == [{"CPU": 4.0, "GPU": 1.0, "fast": 1.0}, {"GPU": 1.0, "fast": 1.0}]

    def test_an_npu_pool_names_no_gpu(self, models: Path) -> None:
        pools = {"cpu": {"cpus": 1}, "npu": {"cpus": 0, "resources": {"NPU": 1}}}
        config = load_args(args(drafts__0__pool="npu", pools=pools), models)
        assert config.pools["npu"].wants() == {"NPU": 1.0}


def test_engine_arguments(models: Path) -> None:
    config = load_args(args(target__kv_cache_gib=0.5, target__engine_kwargs={"seed": 3}, chain__max_batch=8), models)
    kwargs = engine_kwargs(config)
    assert kwargs["kv_cache_memory_bytes"] == 1 << 29
    assert kwargs["seed"] == 3
    assert kwargs["worker_cls"].endswith("CpuTargetWorker")
    assert kwargs["speculative_config"]["num_speculative_tokens"] == 24
    assert kwargs["additional_config"]["chain_max_batch"] == 8
    settings = ChainSettings.of(kwargs["additional_config"])
    assert settings == chain_settings(config)
    assert FaultPolicy(**settings.faults) == FaultPolicy()
    with pytest.raises(ValueError, match="no setting chain_maxbatch"):
        ChainSettings.of({"chain_maxbatch": 1})
    assert set(kwargs) <= engine_argument_names()


def test_faults_section_is_the_fault_policy() -> None:
    section = AppConfig.model_fields["faults"].annotation
    assert section is not None
    assert set(section.model_fields) == {field.name for field in fields(FaultPolicy)}


def test_absolute_paths_stay(tmp_path: Path) -> None:
    assert resolve(tmp_path, Path("/elsewhere")) == tmp_path


@given(key=st.text(st.characters(categories=["Ll"]), min_size=1, max_size=12))
def test_no_unknown_key_passes(key: str) -> None:
    broken = args()
    broken["target"][key] = 1
    if key in ("name", "model", "pool", "replicas", "dtype", "eager", "cores"):
        return
    with pytest.raises(ConfigError, match=rf"args\.target\.{key}: unknown key"):
        load_args(broken)
