"""A real application over HTTP: the OpenAI API as clients use it, with drafts at work."""

import json
import time
from collections import Counter
from typing import Any

import pytest

from tests.cluster.conftest import App, wait_until
from tests.cluster.drafts import MODEL_ONLY

pytestmark = pytest.mark.cluster

PROMPT = "Write two sentences about a lighthouse."
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def drafted(app: App, **changes: Any) -> dict[str, Any]:
    """An answer with accepted draft tokens: on a busy machine a draft can miss every deadline of one request."""
    for _ in range(12):
        answer = app.chat(PROMPT, **changes)
        if answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]:
            return answer
        time.sleep(1)
    raise AssertionError(f"no draft token accepted in 12 requests: {app.stats()}")


class TestChat:
    def test_answer_has_usage_and_speculative_statistics_in_vllms_shape(self, app: App) -> None:
        answer = drafted(app, max_tokens=32)
        metrics = answer["metrics"]["speculative_decoding"]
        assert answer["usage"]["completion_tokens"] == 32
        assert metrics["num_draft_tokens"] >= metrics["num_accepted_draft_tokens"] > 0
        assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]

    def test_equal_with_and_without_drafts(self, app: App) -> None:
        assert app.text(PROMPT, max_tokens=48) == app.text(PROMPT, max_tokens=48, chain={"enabled": False})

    def test_disabled_drafts_nothing(self, app: App) -> None:
        before = app.stats()["counters"].get("drafted_tokens", 0)
        answer = app.chat(PROMPT, chain={"enabled": False})
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        assert app.stats()["counters"].get("drafted_tokens", 0) == before

    def test_trace_tells_the_rounds_of_the_answer(self, app: App) -> None:
        answer = drafted(app, max_tokens=32, chain={"trace": True, "sources": ["model"]})
        rounds, summary = answer["chain"]["rounds"], answer["chain"]["summary"]
        text = "".join(item["accepted_text"] + item["own_text"] for item in rounds)
        assert text == answer["choices"][0]["message"]["content"]
        assert summary["tokens"] == answer["usage"]["completion_tokens"]
        assert summary["accepted"] > 0
        assert summary["sources"][0].startswith("int8#")

    def test_sources_without_a_model_draft_what_repeats(self, app: App) -> None:
        words = "the quick brown fox jumps over the lazy dog and runs into the deep dark wood"
        chain = {"trace": True, "sources": ["suffix"]}
        answer = app.chat(f"Repeat this sentence three times, word for word: {words}", max_tokens=48, chain=chain)
        drafted_by = {item["source"] for item in answer["chain"]["rounds"] if item["drafted"]}
        assert drafted_by == {"suffix"}

    def test_a_source_that_is_not_there_is_refused(self, app: App) -> None:
        answer = app.post("/v1/chat/completions", app.body(PROMPT, chain={"sources": ["oracle"]}))
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert "no source 'oracle' here; there are: model, suffix" in error["message"]
        assert error["param"] == "chain.sources"

    def test_no_trace_unless_asked(self, app: App) -> None:
        assert "chain" not in app.chat()

    def test_cap_on_draft_tokens(self, app: App) -> None:
        answer = drafted(app, chain={"trace": True, "tokens": 1})
        assert max(len(item["drafted"]) for item in answer["chain"]["rounds"]) == 1

    def test_many_at_once_equal_alone(self, app: App) -> None:
        prompts = [f"Describe the number {number} in one sentence." for number in range(12)]
        together = app.chat_all(prompts)
        alone = app.chat_all(prompts, chain={"enabled": False})
        assert [a["choices"][0]["message"]["content"] for a in together] == [
            a["choices"][0]["message"]["content"] for a in alone
        ]


class TestStreaming:
    def test_same_text_as_without_streaming(self, app: App) -> None:
        chunks = app.stream(PROMPT)
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        assert text == app.text(PROMPT)

    def test_usage_chunk_carries_the_statistics(self, app: App) -> None:
        chunks = app.stream(PROMPT, stream_options={"include_usage": True})
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 24
        assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_tokens"] == app.config.draft_tokens

    def test_no_usage_chunk_unless_asked(self, app: App) -> None:
        for chain in ({}, {"trace": True}):
            chunks = app.stream(PROMPT, chain=chain)
            assert all(chunk["choices"] for chunk in chunks)

    @pytest.mark.parametrize("usage", [True, False])
    def test_trace_comes_with_the_last_chunk(self, app: App, usage: bool) -> None:
        options = {"stream_options": {"include_usage": True}} if usage else {}
        chunks = app.stream(PROMPT, chain={"trace": True}, **options)
        assert [index for index, chunk in enumerate(chunks) if "chain" in chunk] == [len(chunks) - 1]
        assert chunks[-1]["chain"]["summary"]["tokens"] == 24

    def test_the_openai_client_reads_it(self, app: App) -> None:
        openai = pytest.importorskip("openai")
        client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="none")
        stream = client.chat.completions.create(**app.body(PROMPT), stream=True, extra_body={"chain": {"trace": True}})
        chunks = list(stream)
        assert chunks[-1].model_extra["chain"]["summary"]["tokens"] == 24
        answer = client.chat.completions.create(**app.body(PROMPT), extra_body={"chain": {"trace": True}})
        assert answer.model_extra["chain"]["summary"]["tokens"] == 24
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.chat.completions.create(**app.body(PROMPT), top_p=7)


class TestSampling:
    def test_same_seed_same_answer_with_and_without_drafts(self, app: App) -> None:
        hot: dict[str, Any] = {"temperature": 1.0, "seed": 11}
        first = app.text(PROMPT, **hot)
        assert app.text(PROMPT, **hot) == first
        assert app.text(PROMPT, **hot, chain={"enabled": False}) == first

    def test_without_a_seed_answers_differ(self, app: App) -> None:
        answers = app.chat_all([PROMPT] * 6, temperature=1.0)
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) > 1

    def test_n_samples_are_independent(self, app: App) -> None:
        for seed in ({}, {"seed": 5}):
            choices = app.chat(PROMPT, temperature=1.0, n=4, **seed)["choices"]
            assert len({choice["message"]["content"] for choice in choices}) > 1

    def test_stop_string(self, app: App) -> None:
        whole = app.text(PROMPT)
        word = whole.split()[4]
        answer = app.chat(PROMPT, stop=[word], chain={"trace": True})
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == whole[: whole.index(word)]
        assert answer["chain"]["summary"]["tokens"] == answer["usage"]["completion_tokens"]

    def test_logit_bias(self, app: App) -> None:
        plain = app.chat(logprobs=True, return_token_ids=True)
        first = plain["choices"][0]["token_ids"][0]
        banned = app.chat(logit_bias={str(first): -100}, return_token_ids=True)
        assert first not in banned["choices"][0]["token_ids"]
        forced = app.chat(logit_bias={"42": 100}, max_tokens=6, return_token_ids=True)
        assert set(forced["choices"][0]["token_ids"]) == {42}

    def test_min_p_of_one_is_greedy(self, app: App) -> None:
        assert app.text(PROMPT, temperature=1.0, min_p=1.0) == app.text(PROMPT)

    def test_json_schema(self, app: App) -> None:
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        text = app.text("Invent a person.", response_format=wanted, max_tokens=120)
        assert set(json.loads(text)) == {"name", "age"}
        assert text == app.text("Invent a person.", response_format=wanted, max_tokens=120, chain={"enabled": False})

    def test_logprobs(self, app: App) -> None:
        chained = app.chat(PROMPT, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
        plain = app.chat(PROMPT, logprobs=True, top_logprobs=3, chain={"enabled": False})
        for got, want in zip(chained, plain["choices"][0]["logprobs"]["content"], strict=True):
            assert got["token"] == want["token"]
            assert got["logprob"] == pytest.approx(want["logprob"], abs=1e-3)


class TestConversation:
    def test_second_turn_with_tool_calls(self, app: App) -> None:
        messages = [
            {"role": "user", "content": "How is the weather in Paris?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees"},
        ]
        for extra in ({"tools": [WEATHER]}, {}):
            answer = app.post("/v1/chat/completions", {**app.body(), "messages": messages, **extra})
            assert answer.status_code == 200, answer.text

    def test_content_parts(self, app: App) -> None:
        parts = [{"type": "text", "text": "Name three fruits."}]
        answer = app.post("/v1/chat/completions", {**app.body(), "messages": [{"role": "user", "content": parts}]})
        assert answer.status_code == 200, answer.text

    def test_completions(self, app: App) -> None:
        body = {"model": app.model, "prompt": "The sky is", "max_tokens": 12, "temperature": 0}
        chained = app.post("/v1/completions", {**body, "chain": {"trace": True}}).json()
        plain = app.post("/v1/completions", {**body, "chain": {"enabled": False}}).json()
        assert chained["choices"][0]["text"] == plain["choices"][0]["text"]
        assert chained["chain"]["summary"]["tokens"] == 12


class TestApi:
    def test_health(self, app: App) -> None:
        answer = app.get("/health")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "ready": True, "target_replicas": {app.model: 1}}

    def test_models(self, app: App) -> None:
        assert [card["id"] for card in app.get("/v1/models").json()["data"]] == [app.model]
        assert app.get(f"/v1/models/{app.model}").json()["id"] == app.model

    def test_unknown_model(self, app: App) -> None:
        answer = app.post("/v1/chat/completions", app.body(model="other"))
        assert answer.status_code == 404
        assert "other" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        "change",
        [
            {"messages": []},
            {"messages": [{"role": "user", "content": [{}]}]},
            {"messages": [{"role": "user", "content": [{"type": "alien"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            {"messages": [{"role": "user", "content": "\ud800"}]},
            {"messages": [{"role": "user", "content": "word " * 4000}]},
            {"max_tokens": 0},
            {"max_tokens": 10**6},
            {"temperature": -1},
            {"top_p": 0},
            {"top_k": -7},
            {"n": 0},
            {"n": 10**9},
            {"stop": [""]},
            {"seed": 2**64},
            {"logprobs": True, "top_logprobs": 500},
            {"tool_choice": "auto"},
            {"tools": []},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "obj"}}}},
            {"response_format": {"type": "structural_tag", "format": 5}},
            {"structured_outputs": {"regex": "("}},
            {"structured_outputs": {"choice": []}},
            {"structured_outputs": "x"},
            {"bad_words": [""]},
            {"stop_token_ids": [10**9]},
            {"allowed_token_ids": []},
            {"chat_template": "{{"},
            {"chat_template_kwargs": {"tools": 5}},
            {"logit_bias": {"99999999": 1}},
            {"min_p": 3},
            {"chain": {"trase": True}},
        ],
    )
    def test_malformed_requests_are_400_with_an_openai_error(self, app: App, change: dict[str, Any]) -> None:
        content = json.dumps({**app.body(), **change})
        import httpx

        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{app.url}/v1/chat/completions", content=content, headers=headers, timeout=120)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == 400
        assert error["message"]

    def test_engine_survived_all_of_it(self, app: App) -> None:
        assert app.text() == app.text(chain={"enabled": False})


def test_the_draft_starts_from_the_targets_kv(app: App) -> None:
    """Between the replicas of two Serve deployments, through shared memory; the prompt is read once, by the target."""
    drafted(app, chain=MODEL_ONLY)  # until then a circuit may be open
    draft = app.draft()
    before = draft.stats.remote().result(timeout_s=60)
    app.chat("Name three rivers of Europe and the seas they reach, one a line.", chain=MODEL_ONLY)
    after = draft.stats.remote().result(timeout_s=60)
    assert after["kv_taken"] > before.get("kv_taken", 0)
    assert after.get("prefill_tokens", 0) - before.get("prefill_tokens", 0) < 10
    grown = {name for name in after if name.startswith("kv_refused") and after[name] > before.get(name, 0)}
    assert not grown
    counters = app.stats()["counters"]
    assert counters["kv_exports"] > 0
    assert counters["kv_export_bytes"] > 0


def test_disconnected_clients_leave_nothing_behind(app: App) -> None:
    import httpx

    def sessions() -> Counter[str]:
        return Counter(app.stats()["counters"])

    body = app.body("Write a very long story.", stream=True, max_tokens=1500)
    for _ in range(8):
        with httpx.stream("POST", f"{app.url}/v1/chat/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
    app.text()
    wait_until(lambda: sessions()["sessions"] == 0, timeout_s=20)


def test_bundles_ask_for_what_the_pool_says_and_nothing_else(app: App) -> None:
    import ray

    tables = ray.util.placement_group_table().values()
    bundles = [bundle for table in tables if table["state"] == "CREATED" for bundle in table["bundles"].values()]
    assert bundles == [{"CPU": 1.0}]
