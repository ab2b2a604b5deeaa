"""Acceptance that scripts/select_draft measures is what the running draft engine is counted to get."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Sampling
from deployments.channel.inprocess import InProcessChannel
from deployments.draft.engine import DraftEngine
from deployments.draft.kv_intake import DTYPES, make_intake
from deployments.kv import INLINE
from hw.onnx.session import OnnxModel
from scripts.select_lib.acceptance import Trail, replay
from scripts.select_lib.followers import ModelFollower
from scripts.select_lib.target_child import Capture
from tests.engine.conftest import DRAFT_TOKENS, Engine
from tests.models import model

pytestmark = pytest.mark.engine

PROMPTS = ["Why is the sky blue?", "Write a short letter to a friend.", "Name three rivers and say where they flow."]
LENGTH = 40
SEED = 7
WAIT_S = 50.0  # a step waits so long for a prompt: less than the minute for which drafts are waited for


@pytest.fixture(scope="module")
def onnx() -> OnnxModel:
    """INT4 disagrees often."""
    return OnnxModel(model("draft-int4"), slots=4, context=256)


def params(temperature: float, chain: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature, max_tokens=LENGTH, seed=SEED, extra_args={"chain": json.dumps(chain)}
    )


def rendered(engine: Engine) -> list[list[int]]:
    tokenizer = engine.llm.get_tokenizer()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


def captured(engine: Engine, prompt: list[int]) -> Any:
    """The target's KV of a prompt."""
    capture = Capture(engine.kv().export.manifest)
    engine.drafts(a=InProcessChannel(capture, "a"))
    linked(engine)
    engine.llm.generate([{"prompt_token_ids": prompt}], params(0.0, {"sources": ["model"]}), use_tqdm=False)
    assert capture.kv is not None
    stored = capture.kv[:, :, : len(prompt)]
    return stored.view(DTYPES["bfloat16"]) if stored.dtype == np.uint16 else stored


def linked(engine: Engine) -> None:
    engine.kv().connect([{"name": "a", "kv": INLINE}])
    engine.rounds().send_kv(engine.kv().export)


@pytest.mark.parametrize(("temperature", "kv"), [(0.0, False), (0.0, True), (1.0, False)])
def test_measured_and_counted_acceptance_agree(
    engine: Engine, patient: None, onnx: OnnxModel, temperature: float, kv: bool
) -> None:
    prompts = rendered(engine)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    try:
        outputs = engine.llm.generate(inputs, params(temperature, {"enabled": False}), use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        follower = ModelFollower(onnx, engine.vocab())
        trails: list[Trail] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            given = captured(engine, prompt) if kv else None
            trails.append(follower.follow(prompt, answer, LENGTH, Sampling(temperature, SEED), given, None))
        expected = replay(trails, DRAFT_TOKENS)

        intake = make_intake(onnx, model("draft-int4"), "cpu") if kv else None
        faults = replace(FaultPolicy(), prefill_budget_s=WAIT_S)
        drafter = DraftEngine(
            onnx, top_k=0, faults=faults, prefill_wait_s=WAIT_S, ahead=0, paced=False, kv=intake, clock=lambda: 0.0
        )
        engine.drafts(a=InProcessChannel(drafter, "a"))
        if kv:
            drafter.meet(engine.kv().offer())
            linked(engine)
        for one, answer in zip(inputs, answers, strict=True):  # one at a time, as measured
            (output,) = engine.llm.generate([one], params(temperature, {"sources": ["model"]}), use_tqdm=False)
            assert list(output.outputs[0].token_ids) == answer
        counted = engine.stats()
    finally:
        engine.rounds().send_kv(None)
    assert expected.acceptance is not None
    assert 0.2 < expected.acceptance < 1.0
    assert counted["drafted_tokens"] == pytest.approx(expected.drafted, rel=0.05)
    assert counted["accepted_tokens"] / counted["drafted_tokens"] == pytest.approx(expected.acceptance, abs=0.02)
    if kv:
        assert drafter.stats()["kv_taken"] >= len(prompts)
