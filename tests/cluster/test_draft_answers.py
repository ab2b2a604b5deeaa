"""Whole answers of a draft deployment over its Serve handle: many callers, chats beside, callers that leave, a replica that dies."""

import time
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError

from tests.cluster.conftest import App, wait_until
from tests.cluster.drafts import draft_actor, wait_for_acceptance

pytestmark = pytest.mark.cluster

PROMPT = [504, 2365, 28, 732, 339, 260, 550, 282]


def request(**more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "k": 2,
        "length": 12,
        "temperature": 0.7,
        "seed": 5,
        "top_k": 3,
        "deadline_s": 120.0,
        **more,
    }


def written(app: App, **more: Any) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = app.draft().write_answers.remote(request(**more)).result(timeout_s=180)
    return answers


def gauge(app: App, name: str) -> float:
    stats: dict[str, float] = app.draft().stats.remote().result(timeout_s=60)
    return stats[name]


def test_many_callers_get_their_answers_while_chats_go_on(app: App) -> None:
    alone = written(app)
    assert [answer["index"] for answer in alone] == [0, 1]
    for answer in alone:
        assert (len(answer["tokens"]), answer["reason"], answer["finished"]) == (12, "", False)
        assert (len(answer["top_ids"]), len(answer["top_probs"])) == (12 * 3 * 4, 12 * 3 * 2)
    before = app.text(max_tokens=24)
    calls = [app.draft().write_answers.remote(request(seed=seed)) for seed in range(6)]
    assert app.text(max_tokens=24) == before
    for call in calls:
        assert [len(answer["tokens"]) for answer in call.result(timeout_s=180)] == [12, 12]


def test_answers_stream_as_they_end(app: App) -> None:
    stream = app.draft().options(stream=True).stream_answers.remote(request(k=3))
    assert sorted(answer["index"] for answer in stream) == [0, 1, 2]


def test_a_request_that_cannot_be_honoured_is_an_error(app: App) -> None:
    with pytest.raises(RayTaskError, match="prompt"):
        written(app, prompt=[])


def test_a_caller_that_leaves_frees_the_draft(app: App) -> None:
    call = app.draft().write_answers.remote(request(k=3, length=1500))
    wait_until(lambda: gauge(app, "answers_running") == 1)
    call.cancel()
    wait_until(lambda: gauge(app, "answers_running") == 0)
    assert gauge(app, "answer_slots") == 0


def test_a_replica_that_dies_is_an_error_before_the_deadline(app: App) -> None:
    import ray

    call = app.draft().write_answers.remote(request(k=3, length=1500))
    wait_until(lambda: gauge(app, "answers_running") == 1)
    started = time.monotonic()
    ray.kill(draft_actor(app), no_restart=False)
    with pytest.raises(RayError):
        call.result(timeout_s=120)
    assert time.monotonic() - started < request()["deadline_s"]
    app.wait_healthy()
    wait_for_acceptance(app)
