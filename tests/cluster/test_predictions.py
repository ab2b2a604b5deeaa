"""Drafts that come with a request, over HTTP; and whole drafts checked by the target, through its handle."""

import math
from collections import Counter
from typing import Any

import pytest

from tests.cluster.conftest import App

pytestmark = pytest.mark.cluster

PROMPT = "Write two sentences about a lighthouse."
ONLY = {"sources": [], "trace": True}  # nobody else drafts


def details(usage: dict[str, Any]) -> tuple[int, int]:
    found = usage["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def test_predictions_are_verified_and_counted(app: App) -> None:
    expected = app.text(PROMPT, max_tokens=48, chain={"enabled": False})
    edited = expected.replace(" the ", " one ", 1)
    for prediction, least, most in ((expected, 40, 12), (edited, 10, 40), ("No, it is 5 o'clock.", 0, 48)):
        parts = [{"type": "text", "text": prediction[:9]}, {"type": "text", "text": prediction[9:]}]
        answer = app.chat(PROMPT, max_tokens=48, prediction={"type": "content", "content": parts}, chain=ONLY)
        assert answer["choices"][0]["message"]["content"] == expected
        accepted, rejected = details(answer["usage"])
        assert accepted >= least
        assert rejected >= 0
        assert answer["chain"]["summary"]["rounds"] <= most + 1
        assert set(answer["chain"]["summary"]["sources"]) <= {"given"}
    chunks = app.stream(
        PROMPT,
        max_tokens=48,
        prediction={"type": "content", "content": expected},
        stream_options={"include_usage": True},
    )
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == expected
    assert details(chunks[-1]["usage"])[0] >= 40
    several = app.chat(PROMPT, max_tokens=48, chain={**ONLY, "drafts": ["No.", expected]})
    assert several["choices"][0]["message"]["content"] == expected
    assert details(several["usage"])[0] >= 40
    refused = app.post("/v1/chat/completions", app.body(n=2, prediction={"type": "content", "content": "a"}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prediction")


def test_the_target_checks_whole_drafts(app: App) -> None:
    answer = app.chat(PROMPT, max_tokens=16, return_token_ids=True, chain={"enabled": False})
    prompt, says = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    wrong = [*says[:5], (says[5] + 7) % 1000, *says[6:]]
    target = app.target()
    found = target.verify.remote(prompt, [says, wrong, [10**7]], None, {"temperature": 0.0}, 60.0, "").result(
        timeout_s=90
    )
    assert [item["accepted"] for item in found] == [16, 5, 0]
    assert found[1]["own"] == says[5]
    assert [bool(item["reason"]) for item in found] == [False, False, True]
    scores = target.score.remote(prompt, [says, wrong], 4, 60.0, "").result(timeout_s=90)
    assert [len(item["logprobs"]) for item in scores] == [16, 16]
    assert math.fsum(scores[0]["logprobs"]) > math.fsum(scores[1]["logprobs"])
    assert math.fsum(scores[0]["logprobs"]) / 16 == pytest.approx(found[0]["logprob"], abs=2e-3)
    assert len(scores[0]["top_ids"]) == 16 * 4 * 4


JUDGED = ("semantic_compared", "semantic_guarded", "semantic_late", "semantic_failed")


def test_the_policy_semantic_judges_where_words_differ(app: App) -> None:
    expected = app.text(PROMPT, max_tokens=24, chain={"enabled": False})
    draft = f"{expected.split()[0]} small house stood near some water and waited."
    before = Counter(app.stats()["counters"])
    lenient = {"name": "semantic", "similarity": 0.0, "mask": 1.0}
    answer = app.chat(PROMPT, max_tokens=24, chain={**ONLY, "policy": lenient, "drafts": [draft]})
    counted = Counter(app.stats()["counters"])
    assert sum(counted[name] - before[name] for name in JUDGED) > 0
    assert counted["semantic_failed"] == before["semantic_failed"]
    passed = counted["semantic_passed"] - before["semantic_passed"]
    relaxed = answer["chain"]["summary"]["relaxed"]
    assert 0 < relaxed <= passed or passed == relaxed == 0
    if not relaxed:
        assert answer["choices"][0]["message"]["content"] == expected
