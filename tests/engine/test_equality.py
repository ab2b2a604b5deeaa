"""The backbone: output with drafts equals output without, for every kind of sampling and every kind of drafter."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from deployments.channel.inprocess import InProcessChannel
from tests.engine.conftest import Engine
from tests.engine.prompts import PROMPTS
from tests.fakes import DyingDrafter, FakeDrafter, SlowDrafter, half_right, replay, wrong
from tests.models import model

pytestmark = pytest.mark.engine

MAX_TOKENS = 16
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 11},
    "hot_top_p": {"temperature": 1.2, "top_p": 0.9, "seed": 12},
    "top_k": {"temperature": 1.0, "top_k": 20, "seed": 13},
    "penalties": {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0.7, "seed": 14, "logprobs": 5},
    "json_schema": {"temperature": 0},
    "stop_string": {"temperature": 0},
    "stop_token": {"temperature": 0},
    "min_tokens": {"temperature": 0.9, "seed": 15, "min_tokens": 12},
    "bad_words": {"temperature": 0, "bad_words": [" the", " a", " is"]},
    "bias_min_p": {
        "temperature": 1.0,
        "seed": 16,
        "extra_args": {"chain": '{"min_p": 0.05, "logit_bias": {"253": -100, "260": 4}}'},
    },
}


@dataclass
class Reference:
    """Plain outputs of one kind, and the parameters that made them."""

    params: list[SamplingParams]
    outputs: list[Any]
    known: list[list[int]] = field(default_factory=list)  # prompt and output of each


def parameters(engine: Engine, kind: str) -> list[SamplingParams]:
    common = {**KINDS[kind], "max_tokens": MAX_TOKENS}
    if kind == "json_schema":
        # one object each: StructuredOutputsParams remembers which backend took it
        return [SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), **common) for _ in PROMPTS]
    if kind not in ("stop_string", "stop_token"):
        return [SamplingParams(**common) for _ in PROMPTS]
    free = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    result = []
    for output in free:
        text, ids = output.outputs[0].text, list(output.outputs[0].token_ids)
        if kind == "stop_token":  # somewhere inside a run of accepted tokens
            result.append(SamplingParams(stop_token_ids=[ids[len(ids) * 2 // 3]], **common))
        else:
            middle = len(text) // 2
            result.append(SamplingParams(stop=[text[middle : middle + 3] or "\n"], **common))
    return result


_references: dict[str, Reference] = {}


def reference(engine: Engine, kind: str) -> Reference:
    if kind not in _references:
        engine.drafts()
        params = parameters(engine, kind)
        outputs = engine.generate(PROMPTS, params)
        # what a drafter would have to know, beyond where stops cut it
        longer = [p.clone() for p in params]
        for p in longer:
            p.stop, p.stop_token_ids, p._all_stop_token_ids = [], [], set()
            p.update_from_generation_config({}, 2)
        known = engine.generate(PROMPTS, longer) if kind.startswith("stop") else outputs
        _references[kind] = Reference(
            params, outputs, [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in known]
        )
    return _references[kind]


def real_draft() -> InProcessChannel:
    from deployments.draft.build import build_engine

    return InProcessChannel(build_engine(model("draft-int4"), context=1024, slots=32))


DRAFTERS: dict[str, Callable[[Reference, int], InProcessChannel]] = {
    "real": lambda ref, vocab: real_draft(),
    "right": lambda ref, vocab: InProcessChannel(FakeDrafter(replay(ref.known))),
    "half_right": lambda ref, vocab: InProcessChannel(FakeDrafter(half_right(ref.known, vocab))),
    "wrong": lambda ref, vocab: InProcessChannel(FakeDrafter(wrong(ref.known, vocab))),
    "silent": lambda ref, vocab: InProcessChannel(FakeDrafter(replay(ref.known)), fault=lambda n: "mute"),
    "slow": lambda ref, vocab: InProcessChannel(SlowDrafter(replay(ref.known), 0.1)),
    "dying": lambda ref, vocab: InProcessChannel(DyingDrafter(replay(ref.known), lives=2)),
}


def same(expected: list[Any], got: list[Any]) -> None:
    for want, have in zip(expected, got, strict=True):
        a, b = want.outputs[0], have.outputs[0]
        assert list(b.token_ids) == list(a.token_ids)
        assert b.text == a.text
        assert b.finish_reason == a.finish_reason
        assert b.stop_reason == a.stop_reason
        assert (a.logprobs is None) == (b.logprobs is None)
        for left, right in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert set(left) == set(right)
            for token, value in left.items():
                assert right[token].logprob == pytest.approx(value.logprob, abs=1e-3)
                assert right[token].rank == value.rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_equal_to_plain(engine: Engine, kind: str, drafter: str) -> None:
    ref = reference(engine, kind)
    engine.drafts(a=DRAFTERS[drafter](ref, engine.vocab()))
    same(ref.outputs, engine.generate(PROMPTS, ref.params))
    stats = engine.stats()
    accepted, drafted = stats.get("accepted_tokens", 0), stats.get("drafted_tokens", 0)
    # the test proves nothing unless the drafter did what its name says
    if drafter == "right":
        assert accepted >= 0.8 * drafted > 0
    elif drafter in ("wrong",):
        assert drafted > 0
        assert accepted <= 0.05 * drafted
    elif drafter in ("half_right", "real"):
        assert 0 < accepted < drafted
    elif drafter == "silent":
        assert drafted == 0
        assert stats["miss:deadline_missed"] > 0
    elif drafter == "dying":
        assert drafted > 0
        assert stats["miss:not_sent"] > 0


def test_plain_greedy_equals_stock_vllm(engine: Engine) -> None:
    """Our sampler without drafts is vLLM's: compare with an engine that has none of our code."""
    import json
    import subprocess
    import sys

    code = (
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "arguments, prompts, tokens = json.loads(sys.stdin.read())\n"
        "out = LLM(**arguments).generate(prompts, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)\n"
        "print('RESULT' + json.dumps([list(o.outputs[0].token_ids) for o in out]))\n"
    )
    arguments = {
        "model": str(model("target")),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 32,
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([arguments, PROMPTS, MAX_TOKENS]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-2000:]
    stock = json.loads(lines[0].removeprefix("RESULT"))
    ours = [list(o.outputs[0].token_ids) for o in reference(engine, "greedy").outputs]
    assert ours == stock
