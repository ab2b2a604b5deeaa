"""Lossy policies in a real engine: what they may change, and what they may not."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from deployments.chain.protocol import Commit, Draft
from deployments.channel.inprocess import InProcessChannel
from deployments.draft.build import build_engine
from deployments.draft.engine import DraftEngine
from tests.engine.conftest import Engine
from tests.engine.prompts import PROMPTS as ALL_PROMPTS
from tests.fakes import FakeDrafter
from tests.models import model

pytestmark = pytest.mark.engine

PROMPTS = ALL_PROMPTS[:6]
MAX_TOKENS = 20
LAX = {"name": "nkl", "delta": 0.6, "delta_max": 1.0, "mask": 1.0}
TOP_K = 8

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 11},
    "top_k_top_p": {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 13},
    "penalties": {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0.7, "seed": 14, "logprobs": 3},
    "bad_words": {"temperature": 0, "bad_words": [" the", " a", " is"]},
}

Top = Callable[[int], dict[int, float]]  # what a fake claims of the position for which it drafts this token


class Claiming(FakeDrafter):
    """A fake that also says how likely it found each of its tokens, and others beside them."""

    def __init__(self, guess: Callable[[list[int], int], list[int]], claims: Top) -> None:
        super().__init__(guess, "claiming")
        self.claims = claims

    def _draft(self, commit: Commit) -> Draft:
        draft = super()._draft(commit)
        tops = [self.claims(token) for token in draft.tokens]
        ids = np.asarray([list(top) for top in tops], "<i4")
        probs = np.asarray([list(top.values()) for top in tops], "<f2")
        return Draft(
            draft.session,
            draft.epoch,
            draft.base,
            draft.tokens,
            draft.reason,
            top_k=ids.shape[1] if tops else 0,
            top_ids=ids.tobytes(),
            top_probs=probs.tobytes(),
        )


def params(policy: dict[str, Any] | None, count: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    chain = {"id": "", **({"policy": policy} if policy else {}), **more.pop("chain", {})}
    common = {"max_tokens": MAX_TOKENS, **more}
    return [SamplingParams(extra_args={"chain": json.dumps(chain)}, **common) for _ in range(count)]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def drafter() -> DraftEngine:
    return build_engine(model("draft-int4"), context=1024, slots=32, top_k=TOP_K)


@pytest.fixture
def real(drafter: DraftEngine) -> Callable[[], InProcessChannel]:
    """A fresh channel to the draft: the engine closes those it no longer uses."""
    return lambda: InProcessChannel(drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_what_lets_nothing_pass_equals_plain(engine: Engine, real: Callable[[], InProcessChannel], kind: str) -> None:
    """A policy of delta 0, and one that judges every mismatch and refuses it."""
    engine.drafts()
    plain = engine.generate(PROMPTS, params(None, **KINDS[kind]))
    for policy in ({"name": "nkl", "delta": 0.0}, {**LAX, "mask": 0.0}):
        engine.drafts(a=real())
        got = engine.generate(PROMPTS, params(policy, **KINDS[kind]))
        stats = engine.stats()
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
        assert stats["relaxed_tokens"] == 0
        assert tokens(got) == tokens(plain)


@pytest.mark.parametrize("kind", ["greedy", "seeded", "top_k_top_p"])
@pytest.mark.parametrize("name", ["nkl", "probabilistic", "block"])
def test_mismatches_pass_and_more_is_accepted(
    engine: Engine, real: Callable[[], InProcessChannel], kind: str, name: str
) -> None:
    def rate(policy: dict[str, Any] | None) -> tuple[float, float]:
        engine.drafts(a=real())
        engine.generate(PROMPTS, params(policy, **{**KINDS[kind], "max_tokens": 32}))
        stats = engine.stats()
        return stats["accepted_tokens"] / stats["drafted_tokens"], stats["relaxed_tokens"]

    lossless, none = rate(None)
    lossy, relaxed = rate({**LAX, "name": name})
    assert none == 0
    assert relaxed > 0
    assert lossy > lossless


def test_one_lossy_request_changes_no_other(engine: Engine, real: Callable[[], InProcessChannel]) -> None:
    engine.drafts()
    plain = engine.generate(PROMPTS, params(None, temperature=0))
    engine.drafts(a=real())
    mixed = [*params(LAX, 2, temperature=0), *params(None, len(PROMPTS) - 2, temperature=0)]
    got = engine.generate(PROMPTS, mixed)
    assert engine.stats()["relaxed_tokens"] > 0
    assert tokens(got)[2:] == tokens(plain)[2:]


def test_logprobs_of_a_token_let_pass_are_the_targets(engine: Engine, real: Callable[[], InProcessChannel]) -> None:
    engine.drafts(a=real())
    got = engine.generate(PROMPTS, params(LAX, temperature=0, logprobs=1))
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


def everything(token: int) -> dict[int, float]:
    """Claims that make almost any target look near enough for ``ANY``."""
    return {token: 0.4, (token + 1) % 1000: 0.3}


ANY = {"name": "nkl", "delta": 1.0, "delta_max": 1.0, "mask": 1.0}


def pushing(words: list[int]) -> InProcessChannel:
    """A source that proposes the same few tokens over and over."""
    return InProcessChannel(
        Claiming(lambda held, want: [words[(len(held) + i) % len(words)] for i in range(want)], everything)
    )


def ids(engine: Engine, text: str) -> list[int]:
    return list(engine.llm.get_tokenizer().encode(text, add_special_tokens=False))


class TestLimitsHold:
    """Against a source that pushes what the request forbids, under a policy that lets almost anything pass."""

    def test_the_source_gets_its_way_where_nothing_forbids_it(self, engine: Engine) -> None:
        word = ids(engine, " the")[0]
        engine.drafts(a=pushing([word]))
        got = tokens(engine.generate(PROMPTS[:4], params(ANY, 4, temperature=0)))
        assert all(answer.count(word) > MAX_TOKENS / 2 for answer in got)

    def test_bad_words(self, engine: Engine) -> None:
        word = ids(engine, " the")[0]
        engine.drafts(a=pushing([word]))
        for temperature in (0.0, 0.9):
            got = engine.generate(PROMPTS[:4], params(ANY, 4, temperature=temperature, seed=1, bad_words=[" the"]))
            assert all(word not in answer for answer in tokens(got))

    def test_allowed_tokens(self, engine: Engine) -> None:
        allowed = ids(engine, " one two three four five six")
        engine.drafts(a=pushing([*allowed[:2], 5000]))
        got = engine.generate(PROMPTS[:4], params(ANY, 4, temperature=0, allowed_token_ids=allowed))
        assert all(set(answer) <= set(allowed) for answer in tokens(got))

    def test_banned_by_bias(self, engine: Engine) -> None:
        word = ids(engine, " the")[0]
        engine.drafts(a=pushing([word]))
        chain = {"logit_bias": {str(word): -100.0}}
        got = engine.generate(PROMPTS[:4], params(ANY, 4, temperature=0, chain=chain))
        assert all(word not in answer for answer in tokens(got))

    @pytest.mark.parametrize("kind", [{"top_k": 5}, {"top_p": 0.5}])
    def test_top_k_and_top_p(self, engine: Engine, kind: dict[str, Any]) -> None:
        engine.drafts(a=pushing(ids(engine, " the of and")))
        got = engine.generate(PROMPTS[:4], params(ANY, 4, temperature=1.0, seed=3, logprobs=5, **kind))
        assert engine.stats()["drafted_tokens"] > 0
        for output in got:
            for token, told in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                if "top_k" in kind:
                    assert told[token].rank <= 5
                else:
                    likelier = [p for p in told.values() if p.rank < told[token].rank]
                    assert len(likelier) < told[token].rank or sum(np.exp(p.logprob) for p in likelier) <= 0.5 + 1e-4

    def test_min_tokens_and_length(self, engine: Engine) -> None:
        """A source that pushes the end of the answer neither ends it early nor is the end passed over."""
        end = engine.llm.get_tokenizer().eos_token_id
        engine.drafts()
        plain = engine.generate(PROMPTS, params(None, temperature=0, max_tokens=32))
        engine.drafts(a=pushing([end]))
        pushed = engine.generate(PROMPTS, params(ANY, temperature=0, max_tokens=32))
        assert engine.stats()["drafted_tokens"] > 0
        assert tokens(pushed) == tokens(plain)
        longer = engine.generate(PROMPTS, params(ANY, temperature=0.9, seed=2, max_tokens=32, min_tokens=24))
        assert all(len(answer) >= 24 for answer in tokens(longer))

    def test_penalties(self, engine: Engine) -> None:
        """Each time a word is let pass its penalty grows, until the target's distribution is too far from one that says it."""
        word = ids(engine, " the")[0]
        most = []
        for penalty in (0.0, 2.0):
            engine.drafts(a=pushing([word]))
            got = engine.generate(PROMPTS[:4], params(ANY, 4, temperature=0, frequency_penalty=penalty, max_tokens=40))
            most.append([answer.count(word) for answer in tokens(got)])
        # NKL is at least 0.4 ln(0.4 / q) / ln V, and q falls by exp(-2) with each
        assert max(most[1]) <= 15 < 20 <= min(most[0])


JSON_PROMPT = "<|im_start|>user\nDescribe {} as compact JSON on one line.<|im_end|>\n<|im_start|>assistant\n"
THINGS = [
    f"{adjective} {noun}"
    for adjective in ("a red", "a small", "an old", "a new", "a loud")
    for noun in ("car", "town", "king", "pen", "dog", "inn")
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["person", "place", "thing"]},
        "known": {"type": "boolean"},
    },
    "required": ["name", "kind", "known"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("policy", [{"name": "nkl"}, ANY], ids=["default", "anything"])
def test_json_stays_json_when_a_source_proposes_fences(engine: Engine, policy: dict[str, Any]) -> None:
    fences = [token for token in ids(engine, '```json\n{"name": "```"}\n```') if token not in ids(engine, "\n")]
    engine.drafts(a=pushing(fences))
    count = len(THINGS)
    asked = [
        p
        for i in range(count)
        for p in params(
            policy,
            1,
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            max_tokens=96,
            structured_outputs=StructuredOutputsParams(json=SCHEMA),
        )
    ]
    got = engine.generate([JSON_PROMPT.format(thing) for thing in THINGS], asked)
    stats = engine.stats()
    assert stats["drafted_tokens"] > 0
    if policy == ANY:
        assert stats["relaxed_tokens"] > 0  # inside strings a fence is as good as any text
    whole = 0
    for output in got:
        answer = output.outputs[0]
        if answer.finish_reason == "length":  # a grammar lets white space go on without end, and small models use it
            assert answer.text[-20:].isspace(), answer.text
            continue
        value = json.loads(answer.text)
        whole += 1
        assert set(value) == set(SCHEMA["required"])
        assert value["kind"] in ("person", "place", "thing")
    assert whole > count / 2


def test_coins_do_not_depend_on_the_batch(engine: Engine) -> None:
    words = ids(engine, " the of and to in that")
    policy = {"name": "probabilistic", "delta": 0.8, "delta_max": 1.0, "mask": 1.0}
    asked = [p for i in range(6) for p in params(policy, 1, temperature=0.8, seed=i)]
    engine.drafts(a=pushing(words))
    together = tokens(engine.generate(PROMPTS[:6], asked))
    stats = engine.stats()
    assert 0 < stats["relaxed_tokens"] < stats["drafted_tokens"]
    alone = [tokens(engine.generate([prompt], [p]))[0] for prompt, p in zip(PROMPTS[:6], asked, strict=True)]
    assert together == alone


def test_the_trace_shows_them(engine: Engine, real: Callable[[], InProcessChannel]) -> None:
    engine.drafts(a=real())
    asked = params(LAX, 1, temperature=0, max_tokens=48, chain={"id": "me", "trace": True})
    output = engine.generate(PROMPTS[:1], asked)[0].outputs[0]
    trace = engine.llm.collective_rpc("take_trace", args=("me",))[0]
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
    engine.generate(PROMPTS[:1], params(None, 1, temperature=0, max_tokens=4))
    engine.generate(PROMPTS[:1], params(LAX, 1, temperature=0, max_tokens=4))
    assert asked
    assert [asked[0], asked[-1]] == [False, True]
