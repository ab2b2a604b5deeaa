"""Drafts that come with a request in a real engine: the answer is plain decoding's, the steps are fewer."""

import base64
import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import DRAFT_TOKENS, Engine
from tests.engine.prompts import PROMPTS as ALL_PROMPTS

pytestmark = pytest.mark.engine

PROMPTS = ALL_PROMPTS[:4]
MAX_TOKENS = 24
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 21},
}


def other(tokens: list[int], vocab: int) -> list[int]:
    return [(token + 7) % vocab for token in tokens]


def edited(tokens: list[int], vocab: int) -> list[int]:
    """Some tokens in front that the answer has not, one in the middle replaced, one left out."""
    middle = len(tokens) // 2
    return [
        *other(tokens[:2], vocab),
        *tokens[:6],
        *other(tokens[6:7], vocab),
        *tokens[7:middle],
        *tokens[middle + 1 :],
    ]


DRAFTS: dict[str, Callable[[list[int], int], list[list[int]]]] = {
    "right": lambda answer, vocab: [answer],
    "wrong": lambda answer, vocab: [other(answer, vocab)],
    "half_right": lambda answer, vocab: [answer[:12] + other(answer[12:], vocab)],
    "edited": lambda answer, vocab: [edited(answer, vocab)],
    "several": lambda answer, vocab: [other(answer, vocab), answer[:6] + other(answer[6:], vocab), answer],
}


def run(engine: Engine, kind: str, given: list[list[list[int]]] | None) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Answers and traces."""
    engine.drafts()
    params, names = [], [uuid.uuid4().hex for _ in PROMPTS]
    for index, name in enumerate(names):
        extra = {"chain": json.dumps({"id": name, "given": given[index] if given else []})}
        params.append(SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, extra_args=extra, **KINDS[kind]))
    answers = [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, params)]
    return answers, [engine.llm.collective_rpc("take_trace", args=(name,))[0] for name in names]


_plain: dict[str, list[list[int]]] = {}


def plain(engine: Engine, kind: str) -> list[list[int]]:
    if kind not in _plain:
        _plain[kind], traces = run(engine, kind, None)
        assert all(trace["rounds_n"] == MAX_TOKENS for trace in traces)
    return _plain[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DRAFTS)
def test_equal_to_plain_in_fewer_steps(engine: Engine, kind: str, name: str) -> None:
    expected = plain(engine, kind)
    given = [DRAFTS[name](answer, engine.vocab()) for answer in expected]
    answers, traces = run(engine, kind, given)
    assert answers == expected
    end = engine.llm.get_tokenizer().eos_token_id
    for answer, trace in zip(answers, traces, strict=True):
        steps, accepted = trace["rounds_n"], trace["accepted"]
        assert accepted + steps >= MAX_TOKENS  # the target's own token of each, and what was accepted
        if name == "right":
            fewest = 1 + -(-(MAX_TOKENS - 1) // (DRAFT_TOKENS + 1))
            assert fewest <= steps <= fewest + answer.count(end)  # the step after an end, here ignored, is plain
            assert trace["sources"] == {"given": accepted}
            assert (trace["given"], trace["followed"]) == (MAX_TOKENS, MAX_TOKENS)
        elif name == "wrong":
            assert steps >= MAX_TOKENS - accepted
            assert trace["followed"] <= MAX_TOKENS // 2  # by chance, where the answer repeats itself
        else:
            assert steps <= 0.75 * MAX_TOKENS
            assert 0 < accepted < MAX_TOKENS


def test_bad_drafts_never_reach_the_engine(engine: Engine) -> None:
    expected = plain(engine, "greedy")
    bad = [[engine.vocab()], [-1], [], [5] * 4000]
    answers, traces = run(engine, "greedy", [bad] * len(PROMPTS))
    assert answers == expected
    assert all(trace["drafted"] == 0 and trace["given"] == 0 for trace in traces)


def test_disabled_uses_none(engine: Engine) -> None:
    answer = plain(engine, "greedy")[0]
    extra = {"chain": json.dumps({"id": "off", "enabled": False, "given": [answer]})}
    engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8, extra_args=extra))
    trace = engine.llm.collective_rpc("take_trace", args=("off",))[0]
    assert (trace["drafted"], trace["given"]) == (0, 0)


def test_a_policy_acts_on_what_the_writer_thought(engine: Engine) -> None:
    """One token of the draft is not the target's: with its probabilities it may pass, without them it cannot."""
    answer = plain(engine, "greedy")[0]
    draft = [
        *answer[:2],
        *other(answer[2:3], engine.vocab()),
        *answer[3:],
    ]  # in the first round, and no round's own token
    seconds = [
        token if token != own else (token + 1) % engine.vocab() for own, token in zip(answer, draft, strict=True)
    ]
    ids = np.asarray([answer, seconds], "<i4").T
    probs = np.asarray([[0.75, 0.125]] * len(draft), "<f2")
    top = {name: base64.b64encode(part.tobytes()).decode() for name, part in (("ids", ids), ("probs", probs))}
    lenient = {"name": "nkl", "delta": 1.0, "delta_max": 1.0, "mask": 1.0}
    engine.drafts()
    said = {}
    for name, tops in (("known", [top]), ("unknown", []), ("wrong", [{**top, "ids": top["ids"][8:]}])):
        extra = {"chain": json.dumps({"id": name, "policy": lenient, "given": [draft], "given_top": tops})}
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args=extra)
        said[name] = list(engine.generate(PROMPTS[:1], params)[0].outputs[0].token_ids)
    assert said["known"][:3] == draft[:3]
    assert engine.llm.collective_rpc("take_trace", args=("known",))[0]["relaxed"] >= 1
    assert said["unknown"] == said["wrong"] == answer[:12]
