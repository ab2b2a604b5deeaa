"""Lossy policies in a real engine with the real draft: what they change, and whom they do not touch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm import SamplingParams

from deployments.chain.protocol import Commit, Draft
from deployments.channel.inprocess import InProcessChannel
from deployments.draft.build import build_engine
from deployments.draft.engine import DraftEngine
from tests.engine.conftest import Engine
from tests.engine.policies import LAX, ids, pushing, request, take_trace, tokens
from tests.engine.prompts import PROMPTS
from tests.fakes import FakeDrafter
from tests.models import model

pytestmark = pytest.mark.engine

TOP_K = 8
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 11},
    "top_k_top_p": {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 13},
    "min_p": {"temperature": 0.9, "seed": 12, "chain": {"min_p": 0.1}},
    "penalties": {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0.7, "seed": 14, "logprobs": 3},
    "bad_words": {"temperature": 0, "bad_words": [" the", " a", " is"]},
    "stop": {"temperature": 0.8, "seed": 15, "stop": ["."], "min_tokens": 4},
}
OF_EACH = PROMPTS[5:8]  # what each kind is asked


def matrix(policy: dict[str, Any] | None, **more: Any) -> tuple[list[str], list[SamplingParams]]:
    """Every kind of request for every prompt, as one batch."""
    asked = [(prompt, kind) for kind in KINDS.values() for prompt in OF_EACH]
    return [prompt for prompt, _ in asked], [request(policy, **more, **kind) for _, kind in asked]


@pytest.fixture(scope="module")
def drafter() -> DraftEngine:
    return build_engine(model("draft-int4"), context=1024, slots=32, top_k=TOP_K)


@pytest.fixture(autouse=True, scope="module")
def _patient(engine: Engine) -> Iterator[None]:
    """However busy the machine is, the draft is waited for: what is drafted decides what these tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rounds(), "_deadline", lambda sequences: 60.0)
        yield


@pytest.fixture
def real(drafter: DraftEngine) -> Callable[[], InProcessChannel]:
    """A fresh channel to the draft: the engine closes those it no longer uses."""
    return lambda: InProcessChannel(drafter)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Any]:
    """The matrix without drafts."""
    engine.drafts()
    return engine.generate(*matrix(None))


@pytest.mark.parametrize("policy", [{"name": "nkl", "delta": 0.0}, {**LAX, "mask": 0.0}], ids=["delta 0", "mask 0"])
def test_what_lets_nothing_pass_equals_plain(
    engine: Engine, plain: list[Any], real: Callable[[], InProcessChannel], policy: dict[str, Any]
) -> None:
    """Of the main parameters, under a policy that judges no mismatch, and under one that judges each and refuses it."""
    engine.drafts(a=real())
    got = engine.generate(*matrix(policy))
    stats = engine.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["relaxed_tokens"] == 0
    assert tokens(got) == tokens(plain)
    assert [o.outputs[0].finish_reason for o in got] == [o.outputs[0].finish_reason for o in plain]
    assert [o.outputs[0].text for o in got] == [o.outputs[0].text for o in plain]


RATED = ("greedy", "seeded", "top_k_top_p")
RATED_PROMPTS = PROMPTS[:5]


def rates(engine: Engine, channel: InProcessChannel, policy: dict[str, Any] | None) -> dict[str, tuple[float, int]]:
    """By kind of request: accepted of drafted tokens, and how many of them the target did not say."""
    engine.drafts(a=channel)
    asked = [(kind, index) for kind in RATED for index in range(len(RATED_PROMPTS))]
    params = [request(policy, 28, **{**KINDS[kind], "chain": {"id": f"{kind}{index}"}}) for kind, index in asked]
    engine.generate([RATED_PROMPTS[index] for _, index in asked], params)
    traces = {name: take_trace(engine, name) for name in (f"{kind}{index}" for kind, index in asked)}
    found = {}
    for kind in RATED:
        of_kind = [traces[f"{kind}{index}"] for index in range(len(RATED_PROMPTS))]
        drafted, accepted, relaxed = (sum(t[key] for t in of_kind) for key in ("drafted", "accepted", "relaxed"))
        found[kind] = accepted / drafted, relaxed
    return found


@pytest.fixture(scope="module")
def lossless_rates(engine: Engine, drafter: DraftEngine) -> dict[str, tuple[float, int]]:
    return rates(engine, InProcessChannel(drafter), None)


@pytest.mark.parametrize("name", ["nkl", "probabilistic", "block"])
def test_mismatches_pass_and_more_is_accepted(
    engine: Engine,
    real: Callable[[], InProcessChannel],
    lossless_rates: dict[str, tuple[float, int]],
    name: str,
) -> None:
    lossy = rates(engine, real(), {**LAX, "name": name})
    for kind in RATED:
        assert lossless_rates[kind][1] == 0
        assert lossy[kind][1] > 0
        assert lossy[kind][0] > lossless_rates[kind][0]


def test_one_lossy_request_changes_no_other(
    engine: Engine, plain: list[Any], real: Callable[[], InProcessChannel]
) -> None:
    engine.drafts(a=real())
    prompts, params = matrix(None)
    lossy = [request(LAX, temperature=0) for _ in range(2)]
    got = engine.generate([*PROMPTS[:2], *prompts[:12]], [*lossy, *params[:12]])
    assert engine.stats()["relaxed_tokens"] > 0
    assert tokens(got)[2:] == tokens(plain)[:12]


def test_logprobs_of_a_token_let_pass_are_the_targets(engine: Engine, real: Callable[[], InProcessChannel]) -> None:
    engine.drafts(a=real())
    got = engine.generate(PROMPTS[:6], [request(LAX, temperature=0, logprobs=1)] * 6)
    assert engine.stats()["relaxed_tokens"] > 0
    engine.drafts()
    whole = [{"prompt_token_ids": list(o.prompt_token_ids) + list(o.outputs[0].token_ids)} for o in got]
    scored = engine.llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    others = 0
    for output, score in zip(got, scored, strict=True):
        start = len(output.prompt_token_ids)
        for index, token in enumerate(output.outputs[0].token_ids):
            told, true = output.outputs[0].logprobs[index][token], score.prompt_logprobs[start + index][token]
            assert told.logprob == pytest.approx(true.logprob, abs=2e-3)
            assert told.rank == true.rank
            others += told.rank > 1
    assert others > 0  # greedy tokens that are not the target's first choice: those let pass


def test_coins_do_not_depend_on_the_batch(engine: Engine) -> None:
    words = ids(engine, " the of and to in that")
    policy = {"name": "probabilistic", "delta": 0.8, "delta_max": 1.0, "mask": 1.0}
    asked = [request(policy, temperature=0.8, seed=i) for i in range(6)]
    engine.drafts(a=pushing(words))
    together = tokens(engine.generate(PROMPTS[:6], asked))
    stats = engine.stats()
    assert 0 < stats["relaxed_tokens"] < stats["drafted_tokens"]
    alone = [tokens(engine.generate([PROMPTS[i]], [asked[i]]))[0] for i in (0, 2, 5)]
    assert [together[i] for i in (0, 2, 5)] == alone


def test_the_trace_shows_them(engine: Engine, real: Callable[[], InProcessChannel]) -> None:
    engine.drafts(a=real())
    asked = request(LAX, 32, temperature=0, chain={"id": "me", "trace": True})
    output = engine.generate(PROMPTS[:1], asked)[0].outputs[0]
    trace = take_trace(engine, "me")
    told = [t for item in trace["rounds"] for t in item["drafted"][: item["accepted"]] + item["own"]]
    assert told[: len(output.token_ids)] == list(output.token_ids)
    assert trace["relaxed"] == sum(len(item["relaxed"]) for item in trace["rounds"]) > 0
    assert all(offset < item["accepted"] for item in trace["rounds"] for offset in item["relaxed"])


def test_a_draft_is_asked_for_probabilities_only_where_they_are_of_use(engine: Engine) -> None:
    asked: list[bool] = []

    class Noting(FakeDrafter):
        def _draft(self, commit: Commit) -> Draft:
            if commit.sampling is not None:
                asked.append(commit.sampling.probs)
            return super()._draft(commit)

    engine.drafts(a=InProcessChannel(Noting(lambda held, want: [5] * want)))
    for policy in (None, LAX):
        engine.generate(PROMPTS[:1], request(policy, 4, temperature=0))
    assert asked
    assert [asked[0], asked[-1]] == [False, True]
