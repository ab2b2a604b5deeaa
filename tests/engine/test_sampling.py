"""Randomness with drafts: reproducible with a seed, fresh without, and of the right distribution."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats
from vllm import SamplingParams

from deployments.channel.inprocess import InProcessChannel
from tests.engine.conftest import Engine
from tests.fakes import FakeDrafter, always

pytestmark = pytest.mark.engine

PROMPT = "My favourite animal is the"
SAMPLES = 256


def draws(engine: Engine, params: SamplingParams, tokens: int) -> list[tuple[int, ...]]:
    outputs = engine.generate([PROMPT] * SAMPLES, params)
    return [tuple(o.outputs[0].token_ids[:tokens]) for o in outputs]


def homogeneous(left: list[tuple[int, ...]], right: list[tuple[int, ...]]) -> float:
    """p-value of both samples coming from one distribution; outcomes rarer than 10 in all are pooled."""
    a, b = Counter(left), Counter(right)
    common = [key for key in a | b if a[key] + b[key] >= 10]
    table = np.array([[c[key] for key in common] + [sum(c.values()) - sum(c[key] for key in common)] for c in (a, b)])
    table = table[:, table.sum(0) > 0]
    return 1.0 if table.shape[1] < 2 else float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize(
    "kind",
    [
        {"temperature": 1.0},
        {"temperature": 0.1, "top_p": 0.5},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.6, "presence_penalty": 0.5},
    ],
    ids=str,
)
def test_joint_distribution_of_three_tokens_equals_plain(engine: Engine, kind: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, **kind)
    plain = draws(engine, params, 3)
    likely = Counter(second for _, second, _ in plain).most_common(1)[0][0]
    engine.drafts(a=InProcessChannel(FakeDrafter(always(likely))))
    drafted = draws(engine, params, 3)
    stats_ = engine.stats()
    assert 0 < stats_["accepted_tokens"] <= stats_["drafted_tokens"]
    for tokens in (1, 2, 3):
        p = homogeneous([d[:tokens] for d in plain], [d[:tokens] for d in drafted])
        assert p > 1e-5, f"first {tokens} tokens differ: p={p:.2g}"


def test_a_seed_repeats_and_seeds_differ(engine: Engine) -> None:
    def run(seed: int) -> list[int]:
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=12, ignore_eos=True)
        return list(engine.generate([PROMPT], params)[0].outputs[0].token_ids)

    assert run(5) == run(5)
    assert len({tuple(run(seed)) for seed in range(10)}) > 5


def test_without_a_seed_runs_differ(engine: Engine) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    assert len({tuple(engine.generate([PROMPT], params)[0].outputs[0].token_ids) for _ in range(4)}) > 1


def test_n_samples_are_independent_and_each_equals_plain(engine: Engine) -> None:
    params = SamplingParams(temperature=1.2, n=4, seed=3, max_tokens=10, ignore_eos=True)
    plain = [list(o.token_ids) for o in engine.generate([PROMPT], params)[0].outputs]
    assert len({tuple(tokens) for tokens in plain}) > 1
    engine.drafts(a=InProcessChannel(FakeDrafter(always(plain[0][1]))))
    assert [list(o.token_ids) for o in engine.generate([PROMPT], params)[0].outputs] == plain


def test_near_the_end_of_the_context(engine: Engine) -> None:
    """Prompt plus draft tokens beyond max_model_len: no draft there, no crash, the others keep theirs."""
    limit = engine.llm.llm_engine.model_config.max_model_len
    long_prompt = {"prompt_token_ids": [300] * (limit - 6)}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [long_prompt, PROMPT]
    plain = engine.llm.generate(prompts, params, use_tqdm=False)
    engine.drafts(a=InProcessChannel(FakeDrafter(always(plain[1].outputs[0].token_ids[5]))))
    drafted = engine.llm.generate(prompts, params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in drafted] == [list(o.outputs[0].token_ids) for o in plain]
    assert len(drafted[0].outputs[0].token_ids) == 6


def test_chain_off_asks_for_nothing(engine: Engine) -> None:
    engine.drafts(a=InProcessChannel(FakeDrafter(always(5))))
    params = SamplingParams(temperature=0, max_tokens=8, extra_args={"chain": '{"enabled": false}'})
    engine.generate([PROMPT], params)
    assert engine.stats().get("drafted_tokens", 0) == 0


def test_trace_adds_up(engine: Engine) -> None:
    drafter = FakeDrafter(always(30))
    engine.drafts(a=InProcessChannel(drafter))
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, extra_args={"chain": '{"id": "me", "trace": true}'}
    )
    output = engine.generate([PROMPT], params)[0].outputs[0]
    trace = engine.llm.collective_rpc("take_trace", args=("me",))[0]
    told = [t for item in trace["rounds"] for t in item["drafted"][: item["accepted"]] + item["own"]]
    assert told[: len(output.token_ids)] == list(output.token_ids)
    assert trace["rounds_n"] == len(trace["rounds"])
    assert trace["accepted"] == sum(item["accepted"] for item in trace["rounds"])
    engine.generate([PROMPT], SamplingParams(max_tokens=2, extra_args={"chain": '{"enabled": false}'}))
    assert not drafter.sessions, "the session was not closed with the request"
