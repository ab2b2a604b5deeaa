"""Against a source that pushes what the request forbids, under a policy that lets almost anything pass."""

from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import Engine
from tests.engine.policies import ANY, ids, pushing, request, tokens
from tests.engine.prompts import PROMPTS as ALL_PROMPTS

pytestmark = pytest.mark.engine

PROMPTS = ALL_PROMPTS[:6]
MAX_TOKENS = 20


def test_the_source_gets_its_way_where_nothing_forbids_it(engine: Engine) -> None:
    word = ids(engine, " the")[0]
    engine.drafts(a=pushing([word]))
    got = tokens(engine.generate(PROMPTS[:4], request(ANY, temperature=0)))
    assert all(answer.count(word) > MAX_TOKENS / 2 for answer in got)


def test_bad_words(engine: Engine) -> None:
    word = ids(engine, " the")[0]
    engine.drafts(a=pushing([word]))
    for temperature in (0.0, 0.9):
        got = engine.generate(PROMPTS[:4], request(ANY, temperature=temperature, seed=1, bad_words=[" the"]))
        assert all(word not in answer for answer in tokens(got))


def test_allowed_tokens(engine: Engine) -> None:
    allowed = ids(engine, " one two three four five six")
    engine.drafts(a=pushing([*allowed[:2], 5000]))
    got = engine.generate(PROMPTS[:4], request(ANY, temperature=0, allowed_token_ids=allowed))
    assert all(set(answer) <= set(allowed) for answer in tokens(got))


def test_banned_by_bias(engine: Engine) -> None:
    word = ids(engine, " the")[0]
    engine.drafts(a=pushing([word]))
    chain = {"logit_bias": {str(word): -100.0}}
    got = engine.generate(PROMPTS[:4], request(ANY, temperature=0, chain=chain))
    assert all(word not in answer for answer in tokens(got))


@pytest.mark.parametrize("kind", [{"top_k": 5}, {"top_p": 0.5}])
def test_top_k_and_top_p(engine: Engine, kind: dict[str, Any]) -> None:
    engine.drafts(a=pushing(ids(engine, " the of and")))
    got = engine.generate(PROMPTS[:4], request(ANY, temperature=1.0, seed=3, logprobs=5, **kind))
    assert engine.stats()["drafted_tokens"] > 0
    for output in got:
        for token, told in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            if "top_k" in kind:
                assert told[token].rank <= 5
            else:
                likelier = [p for p in told.values() if p.rank < told[token].rank]
                assert len(likelier) < told[token].rank or sum(np.exp(p.logprob) for p in likelier) <= 0.5 + 1e-4


def test_min_tokens_and_length(engine: Engine) -> None:
    """A source that pushes the end of the answer neither ends it early nor is the end passed over."""
    end = engine.llm.get_tokenizer().eos_token_id
    engine.drafts()
    plain = engine.generate(PROMPTS, request(None, 32, temperature=0))
    engine.drafts(a=pushing([end]))
    pushed = engine.generate(PROMPTS, request(ANY, 32, temperature=0))
    assert engine.stats()["drafted_tokens"] > 0
    assert tokens(pushed) == tokens(plain)
    longer = engine.generate(PROMPTS, request(ANY, 32, temperature=0.9, seed=2, min_tokens=24))
    assert all(len(answer) >= 24 for answer in tokens(longer))


def test_penalties(engine: Engine) -> None:
    """Each time a word is let pass its penalty grows, until the target's distribution is too far from one that says it."""
    word = ids(engine, " the")[0]
    most = []
    for penalty in (0.0, 2.0):
        engine.drafts(a=pushing([word]))
        got = engine.generate(PROMPTS[:4], request(ANY, 40, temperature=0, frequency_penalty=penalty))
        most.append([answer.count(word) for answer in tokens(got)])
    # NKL is at least 0.4 ln(0.4 / q) / ln V, and q falls by exp(-2) with each
    assert max(most[1]) <= 15 < 20 <= min(most[0])
