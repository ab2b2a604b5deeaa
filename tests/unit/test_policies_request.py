"""A policy on its way from the request and the configuration to the worker."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.api.errors import RequestError
from deployments.api.parameters import prepare
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.chain.acceptance.policy import NAMES, Policy
from deployments.config import ConfigError, load_args
from deployments.config.presets import SHIPPED, policies, with_shipped
from deployments.target.engine_args import chain_settings
from deployments.target.options import ChainOptions, options_of
from deployments.target.settings import ChainSettings
from hw.onnx.checkpoint import Manifest
from tests.unit.test_api import CHAT, DEFAULTS, invalid
from tests.unit.test_config import args, models

__all__ = ["models"]  # a fixture

PRESETS = policies(SHIPPED)


def sent(policy: Any, **changes: Any) -> ChainOptions:
    request = ChainChatRequest.model_validate({**CHAT, "chain": {"policy": policy}})
    prepare(request, **{**DEFAULTS, "presets": PRESETS, **changes})
    return options_of(request.to_sampling_params(10, {}))


def refused(policy: Any, **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        sent(policy, **changes)
    assert error.value.status == 400
    return error.value


class TestRequests:
    def test_lossless_sends_nothing(self) -> None:
        for asked in (None, "lossless", "legal", {"name": "lossless"}, {"name": "nkl", "delta": 0}):
            assert sent(asked).policy is None

    def test_a_preset_sends_its_policy(self) -> None:
        assert sent("chat").policy == PRESETS["chat"]
        assert sent("code").policy == PRESETS["code"]

    def test_a_name_alone_has_its_defaults(self) -> None:
        assert sent("nkl").policy == Policy(name="nkl")

    def test_parameters_arrive(self) -> None:
        got = sent({"name": "block", "delta": 0.2, "min_block_len": 4, "base": "probabilistic"}).policy
        assert got == Policy(name="block", delta=0.2, delta_max=0.4, min_block_len=4, base="probabilistic")

    def test_completions_have_it_too(self) -> None:
        request = ChainCompletionRequest.model_validate({"model": "m", "prompt": "x", "chain": {"policy": "nkl"}})
        prepare(request, **DEFAULTS)
        assert options_of(request.to_sampling_params(10, {})).policy == Policy(name="nkl")

    @pytest.mark.parametrize(
        ("policy", "param", "parts"),
        [
            ("nlk", "chain.policy", [*NAMES, *SHIPPED, "'nlk'"]),
            ({}, "chain.policy.name", list(NAMES)),
            ({"name": "chatty"}, "chain.policy.name", list(NAMES)),
            ({"name": "nkl", "delta": 1.5}, "chain.policy.delta", ["[0.0, 1.0]", "1.5"]),
            ({"name": "nkl", "delta": -0.1}, "chain.policy.delta", ["[0.0, 1.0]"]),
            ({"name": "block", "min_block_len": 0}, "chain.policy.min_block_len", ["[1, 32]", "0"]),
            ({"name": "block", "base": "x"}, "chain.policy.base", ["lossless, nkl, probabilistic"]),
            ({"name": "nkl", "dleta": 0.1}, "chain.policy.dleta", ["delta, alpha, delta_max"]),
            (
                "semantic",
                "chain.policy.name",
                ["sentence model", "args.chain.semantic", "lossless, nkl, block, probabilistic"],
            ),
        ],
    )
    def test_mistakes_are_named(self, policy: Any, param: str, parts: list[str]) -> None:
        error = refused(policy)
        assert error.param == param
        assert error.message.startswith("chain.policy")
        for part in parts:
            assert part in error.message

    def test_semantic_is_served_where_there_is_a_sentence_model(self) -> None:
        assert sent("semantic", semantic=True).policy == Policy(name="semantic")
        assert sent({"name": "semantic", "similarity": 0.9}, semantic=True).policy == Policy(
            name="semantic", similarity=0.9
        )
        assert refused("semantic", semantic=True, allow_lossy=False).param == "chain.policy"

    @pytest.mark.parametrize("policy", [5, [], True, 0.3])
    def test_other_types_are_not_policies(self, policy: Any) -> None:
        message, param = invalid({**CHAT, "chain": {"policy": policy}})
        assert param == "chain.policy"
        assert message

    def test_an_operator_can_forbid_what_is_lossy(self) -> None:
        for policy in ("nkl", "chat", {"name": "probabilistic"}):
            error = refused(policy, allow_lossy=False)
            assert error.param == "chain.policy"
            assert "there are: lossless, extraction, legal" in error.message
        assert sent("legal", allow_lossy=False).policy is None
        assert sent({"name": "nkl", "delta": 0}, allow_lossy=False).policy is None

    def test_a_policy_that_is_none_turns_the_chain_off_at_the_worker(self) -> None:
        params = SimpleNamespace(extra_args={"chain": '{"policy": {"name": "nkl", "delta": 7}}'})
        assert options_of(params) == ChainOptions(enabled=False)  # type: ignore[arg-type]


def sentences(folder: Path) -> None:
    """A folder that says it is a sentence model, where the configuration looks by default."""
    made = folder / "models/sentences"
    made.mkdir(parents=True)
    (made / "model.onnx").write_bytes(b"a graph")
    sizes = {"layers": 6, "kv_heads": 12, "head_dim": 32, "vocab_size": 8, "max_context": 512, "rope_theta": 1e4}
    Manifest("sentences", "k", "w", "t", "BertModel", created_by={}, **sizes).write(made)  # type: ignore[arg-type]


class TestConfig:
    def test_the_shipped_presets_are_policies(self) -> None:
        assert set(PRESETS) == {"chat", "code", "extraction", "legal", "creative"}
        assert not PRESETS["legal"].lossy
        assert not PRESETS["extraction"].lossy

    def test_they_are_there_by_default(self, models: Path) -> None:
        chain = load_args(args(), models).chain
        assert chain.presets == SHIPPED
        assert chain.allow_lossy

    def test_an_operators_stand_beside_and_above(self, models: Path) -> None:
        given = {"mail": {"name": "nkl", "delta": 0.1}, "chat": {"name": "lossless"}}
        assert load_args(args(chain__presets=given), models).chain.presets == {**SHIPPED, **given}

    @pytest.mark.parametrize(
        ("presets", "message"),
        [
            ({"mail": {"name": "nlk"}}, "args.chain.presets: mail.name: no policy 'nlk'; known: lossless, nkl"),
            (
                {"mail": {"name": "nkl", "delta": 2}},
                "args.chain.presets: mail.delta: must be a number in [0.0, 1.0], got 2",
            ),
            ({"mail": {}}, "args.chain.presets: mail.name: required; known: "),
            ({"nkl": {"name": "nkl"}}, "args.chain.presets: nkl: is the name of a policy; call the preset otherwise"),
            ({"mail": {"name": "semantic"}}, "args.chain.presets: mail.name: semantic needs a sentence model"),
        ],
    )
    def test_mistakes_are_named(self, models: Path, presets: Any, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            load_args(args(chain__presets=presets), models)
        assert error.value.problems[0].startswith(message)

    def test_a_preset_may_be_semantic_where_there_is_a_sentence_model(self, models: Path) -> None:
        sentences(models)
        given = {"mail": {"name": "semantic", "similarity": 0.9}}
        chain = load_args(args(chain__presets=given, chain__semantic={}), models).chain
        assert chain.presets["mail"] == given["mail"]

    def test_the_sentence_model_reaches_the_engine_and_the_router(self, models: Path) -> None:
        off = load_args(args(), models)
        assert off.chain.semantic is None
        assert chain_settings(off).semantic_model == ""
        sentences(models)
        on = load_args(args(chain__semantic={"budget_ms": 7}), models)
        settings = chain_settings(on)
        assert settings.semantic_model == str(models / "models/sentences")
        assert settings.semantic_budget_ms == 7
        assert ChainSettings.of(settings.as_config()) == settings

    @pytest.mark.parametrize(
        ("semantic", "message"),
        [
            ({"model": "gone"}, "args.chain.semantic.model: no sentence model in "),
            ({"model": "d"}, "args.chain.semantic.model: no sentence model in "),
            ({"budget": 5}, "args.chain.semantic.budget: unknown key; did you mean 'budget_ms'?"),
            ({"budget_ms": -1}, "args.chain.semantic.budget_ms: "),
        ],
    )
    def test_mistakes_of_the_section_are_named(self, models: Path, semantic: Any, message: str) -> None:
        (models / "d").mkdir()
        with pytest.raises(ConfigError) as error:
            load_args(args(chain__semantic=semantic), models)
        assert error.value.problems[0].startswith(message)

    def test_nothing_shipped_is_changed(self) -> None:
        before = {name: dict(spec) for name, spec in SHIPPED.items()}
        with_shipped({"chat": {"name": "lossless"}})
        assert before == SHIPPED
