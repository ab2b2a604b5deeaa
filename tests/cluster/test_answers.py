"""The answer chain over HTTP: real drafts of a real model and a rule, compared, verified, streamed."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import ORDERS, RULE_ANSWER, TAME, WICKED, App

pytestmark = pytest.mark.cluster

ASK = "Which season comes after winter? Answer in one short sentence."
RULE_ASK = "What does parcel insurance cost?"
ANSWER = {"mode": "answer", "trace": True, "sources": ["model", "rules"]}


def told(body: dict[str, Any]) -> dict[str, Any]:
    """What the trace says of the drafts."""
    result: dict[str, Any] = body["chain"]["answer"]
    return result


class TestDecisions:
    def test_the_answer_is_the_targets_own(self, app: App) -> None:
        plain = app.text(ASK, max_tokens=32, chain={"enabled": False})
        body = app.chat(ASK, max_tokens=32, chain={**ANSWER, "k": 3, "length": 32})
        assert body["choices"][0]["message"]["content"] == plain
        answer = told(body)
        assert answer["reasons"] == {"rules": "no_match"}
        assert [draft["source"] for draft in answer["drafts"]] == [f"model:int8#{index}" for index in range(3)]
        assert len(answer["distances"]) == 3
        assert answer["outcome"] in ("consensus", "leaning", "divergence")
        assert answer["given"]

    def test_what_the_draft_is_right_about_is_taken_from_it(self, app: App) -> None:
        body = app.chat(ASK, max_tokens=32, chain={**ANSWER, "k": 1, "length": 32})
        answer = told(body)
        assert answer["decision"] == "only"
        assert answer["segments"][0]["from"] in ("given", "target")
        assert sum(part["tokens"] for part in answer["segments"]) == body["usage"]["completion_tokens"]
        assert "".join(part["text"] for part in answer["segments"]) == body["choices"][0]["message"]["content"]
        assert any(part["from"] == "given" for part in answer["segments"])

    def test_a_rule_and_a_model_that_differ_are_scored(self, app: App) -> None:
        body = app.chat(RULE_ASK, chain={**ANSWER, "k": 1, "thresholds": {"agree": 0.0, "diverge": 0.0}})
        answer = told(body)
        assert {draft["source"] for draft in answer["drafts"]} == {"model:int8#0", "rules"}
        assert (answer["outcome"], answer["decision"]) == ("divergence", "likeliest")
        standing = {draft["source"]: draft["standing"] for draft in answer["drafts"]}
        assert answer["drafts"][answer["chosen"]]["standing"] == max(standing.values())

    def test_what_one_draft_says_moves_no_others_standing(self, app: App) -> None:
        """The same question and the same samples of the model, beside a rule's draft that is harmless or gives orders."""
        ask = {**ANSWER, "k": 2, "thresholds": {"agree": 0.0, "diverge": 0.0}}

        def drafts(tenant: str) -> dict[str, dict[str, Any]]:
            body = app.body(RULE_ASK, seed=5, temperature=0.9, chain=ask)
            headers = {"Authorization": tenant}
            answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, headers=headers, timeout=300).json()
            assert told(answer)["decision"] == "likeliest"
            return {draft["source"]: draft for draft in told(answer)["drafts"]}

        tame, wicked = drafts(TAME), drafts(WICKED)
        assert wicked["rules"]["text"].strip() == ORDERS
        assert wicked["rules"]["standing"] != tame["rules"]["standing"]
        for source in ("model:int8#0", "model:int8#1"):
            assert wicked[source]["text"] == tame[source]["text"]
            assert wicked[source]["standing"] == pytest.approx(tame[source]["standing"], abs=1e-3)

    def test_an_abstention_says_so(self, app: App) -> None:
        ask = {**ANSWER, "k": 1, "resolve": "abstain", "thresholds": {"agree": 0.0, "diverge": 0.0}}
        body = app.chat(RULE_ASK, chain=ask)
        assert told(body)["decision"] == "abstained"
        assert "none is given" in body["choices"][0]["message"]["content"]

    def test_the_target_writes_with_all_drafts_before_it(self, app: App) -> None:
        ask = {**ANSWER, "k": 1, "resolve": "write", "thresholds": {"agree": 0.0, "diverge": 0.0}}
        body = app.chat(RULE_ASK, chain=ask)
        assert told(body)["decision"] == "written"
        plain = app.chat(RULE_ASK, chain={"enabled": False})
        assert body["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 50

    def test_a_scaffold_marks_what_came_from_the_draft(self, app: App) -> None:
        ask = {"mode": "answer", "k": 1, "scaffold": True}
        text, plain = app.text(ASK, chain=ask), app.text(ASK)
        assert text.startswith('<draft source="model:int8#0">')
        assert text.replace('<draft source="model:int8#0">', "").replace("</draft>", "") == plain


class TestStreaming:
    def test_events_come_before_the_answer_and_the_openai_client_reads_it(self, app: App) -> None:
        asked = {**ANSWER, "k": 2}
        lines = []
        with httpx.stream(
            "POST", f"{app.url}/v1/chat/completions", json=app.body(ASK, stream=True, chain=asked), timeout=300
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        kinds = [json.loads(line[8:])["event"] for line in lines if line.startswith(": chain ")]
        assert kinds[0] == "draft"
        assert kinds[-1] == "decision"
        assert lines.index(next(line for line in lines if line.startswith("data: "))) == len(kinds)
        client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="none")
        chunks = list(client.chat.completions.create(**app.body(ASK), stream=True, extra_body={"chain": asked}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == app.text(ASK)
        assert chunks[-1].model_extra["chain"]["answer"]["drafts"]

    def test_an_error_of_the_target_ends_a_stream_that_has_begun(self, app: App) -> None:
        client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="none")
        wrong = {"max_tokens": 10**6, "stream": True, "extra_body": {"chain": ANSWER}}
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(**{**app.body(ASK), **wrong}))


class TestTokenMode:
    def test_a_rule_feeds_the_token_chain(self, app: App) -> None:
        body = app.chat(f"Repeat this: {RULE_ANSWER}", chain={"trace": True, "sources": ["rules"]})
        assert {item["source"] for item in body["chain"]["rounds"] if item["drafted"]} == {"given"}

    def test_unknown_sources_name_those_there_are(self, app: App) -> None:
        answer = app.post("/v1/chat/completions", app.body(chain={"mode": "answer", "sources": ["oracle"]}))
        assert answer.status_code == 400
        assert "there are: model, model:int8, retrieval, rules" in answer.json()["error"]["message"]
