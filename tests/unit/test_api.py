"""The request field, the parameters on their way to the engine, errors, and traces in responses."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError
from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException

from deployments.api import errors
from deployments.api.errors import RequestError
from deployments.api.parameters import prepare
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.api.trace import chain_object, pieces, with_trace
from deployments.router.tenants import tenant_of
from deployments.target.options import ChainOptions, options_of

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DEFAULTS: dict[str, Any] = {"enabled": True, "trace": True, "default_min_p": 0.0, "vocab_size": 1000}


def options(request: ChainChatRequest | ChainCompletionRequest, **changes: Any) -> ChainOptions:
    """Prepare the request and decode what the worker would get."""
    prepare(request, **{**DEFAULTS, **changes})
    params = request.to_sampling_params(10, {"min_p": 0.3})
    return options_of(params)


def refused(body: dict[str, Any], **changes: Any) -> errors.RequestError:
    with pytest.raises(errors.RequestError) as error:
        prepare(ChainChatRequest.model_validate({**CHAT, **body}), **{**DEFAULTS, **changes})
    return error.value


def invalid(
    body: Any, model: type[ChainChatRequest] | type[ChainCompletionRequest] = ChainChatRequest
) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    return errors.explain_request(error.value.errors())


class TestChainField:
    def test_defaults(self) -> None:
        got = options(ChainChatRequest.model_validate(CHAT))
        assert got.enabled
        assert not got.trace
        assert got.tokens is None
        assert got.seed is not None
        assert 0 <= got.seed < 1 << 63

    def test_requests_differ_in_id_and_seed(self) -> None:
        first, second = (options(ChainChatRequest.model_validate(CHAT)) for _ in range(2))
        assert first.id != second.id
        assert first.seed != second.seed

    def test_what_is_asked_arrives(self) -> None:
        body = {**CHAT, "chain": {"enabled": False, "trace": True, "tokens": 2}, "seed": 7}
        got = options(ChainChatRequest.model_validate(body))
        assert (got.enabled, got.trace, got.tokens, got.seed) == (False, True, 2, 7)

    def test_the_application_decides_defaults_and_may_forbid_traces(self) -> None:
        assert not options(ChainChatRequest.model_validate(CHAT), enabled=False).enabled
        body = {**CHAT, "chain": {"enabled": True, "trace": True}}
        got = options(ChainChatRequest.model_validate(body), enabled=False, trace=False)
        assert got.enabled
        assert not got.trace

    @pytest.mark.parametrize(
        ("chain", "message", "param"),
        [
            ({"trase": True}, "chain.trase: unknown key; did you mean 'trace'?", "chain.trase"),
            ({"on": True}, "chain.on: unknown key; known: ", "chain.on"),
            ({"trace": "yes"}, "chain.trace: Input should be a valid boolean", "chain.trace"),
            ({"trace": 1}, "chain.trace: Input should be a valid boolean", "chain.trace"),
            ({"tokens": 0}, "chain.tokens: Input should be greater than or equal to 1", "chain.tokens"),
            ({"tokens": 33}, "chain.tokens: Input should be less than or equal to 32", "chain.tokens"),
            ({"tokens": "3"}, "chain.tokens: Input should be a valid integer", "chain.tokens"),
            ([], "chain: Input should be a valid dictionary", "chain"),
        ],
    )
    def test_mistakes_are_named(self, chain: Any, message: str, param: str) -> None:
        got, where = invalid({**CHAT, "chain": chain})
        assert got.startswith(message)
        assert where == param

    def test_it_works_for_completions(self) -> None:
        request = ChainCompletionRequest.model_validate({"model": "m", "prompt": "x", "chain": {"tokens": 1}})
        assert options(request).tokens == 1


class TestSources:
    def test_they_travel_in_the_options(self) -> None:
        request = ChainChatRequest.model_validate({**CHAT, "chain": {"sources": ["model"]}})
        assert options(request, sources=["model", "suffix"]).sources == ["model"]
        assert options(ChainChatRequest.model_validate(CHAT), sources=["model"]).sources is None

    def test_one_that_is_not_there_is_refused(self) -> None:
        request = ChainChatRequest.model_validate({**CHAT, "chain": {"sources": ["modle"]}})
        with pytest.raises(RequestError, match=r"no source 'modle' here; there are: model, suffix") as error:
            options(request, sources=["model", "suffix"])
        assert error.value.param == "chain.sources"


class TestTenants:
    def test_a_credential_names_one_and_stays_secret(self) -> None:
        first, second = tenant_of("Bearer secret-a", False), tenant_of("Bearer secret-b", False)
        assert first != second
        assert first == tenant_of("Bearer secret-a", True)
        assert "secret" not in first

    def test_without_one_nothing_is_shared_unless_allowed(self) -> None:
        assert tenant_of(None, False) == tenant_of("", False) == ""
        assert tenant_of(None, True) == tenant_of("", True) != ""

    def test_it_travels_in_the_options(self) -> None:
        assert options(ChainChatRequest.model_validate(CHAT), tenant="t").tenant == "t"


class TestSeeds:
    @pytest.mark.parametrize(
        ("seed", "expected"), [(0, 0), (5, 5), (-5, (1 << 63) - 5), ((1 << 63) - 1, (1 << 63) - 1)]
    )
    def test_given_seeds_are_kept_in_range(self, seed: int, expected: int) -> None:
        assert options(ChainChatRequest.model_validate({**CHAT, "seed": seed})).seed == expected

    def test_minus_one_is_no_seed(self) -> None:
        request = ChainChatRequest.model_validate({**CHAT, "seed": -1})
        options(request)
        assert request.seed is None


class TestMovedParameters:
    def test_min_p_and_logit_bias_travel_in_the_options(self) -> None:
        request = ChainChatRequest.model_validate({**CHAT, "min_p": 0.1, "logit_bias": {"7": -100, "8": 2.5}})
        got = options(request)
        assert got.min_p == 0.1
        assert got.bias() == {7: -100.0, 8: 2.5}

    def test_vllm_no_longer_sees_them(self) -> None:
        request = ChainChatRequest.model_validate({**CHAT, "min_p": 0.1, "logit_bias": {"7": 1}})
        prepare(request, **DEFAULTS)
        params = request.to_sampling_params(10, {"min_p": 0.3})
        assert params.min_p == 0.0
        assert params.logit_bias is None

    def test_the_checkpoints_default_min_p_is_kept(self) -> None:
        assert options(ChainChatRequest.model_validate(CHAT), default_min_p=0.05).min_p == 0.05
        assert options(ChainChatRequest.model_validate({**CHAT, "min_p": 0.0}), default_min_p=0.05).min_p == 0.0

    def test_other_extra_arguments_stay(self) -> None:
        request = ChainChatRequest.model_validate({**CHAT, "vllm_xargs": {"mine": 1}})
        prepare(request, **DEFAULTS)
        assert request.vllm_xargs is not None
        assert request.vllm_xargs["mine"] == 1

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"min_p": -0.1}, "min_p"),
            ({"min_p": 1.1}, "min_p"),
            ({"min_p": float("nan")}, "min_p"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"-1": 1}}, "logit_bias"),
            ({"logit_bias": {"1000": 1}}, "logit_bias"),
            ({"logit_bias": {"1": 101}}, "logit_bias"),
            ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
            ({"use_beam_search": True}, "use_beam_search"),
            ({"thinking_token_budget": 4}, "thinking_token_budget"),
            ({"length_penalty": 0.5}, "length_penalty"),
            ({"guided_json": {"type": "object"}}, "guided_json"),
            ({"best_of": 2}, "best_of"),
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"logits_processors": ["x"]}, "logits_processors"),
            ({"priority": 1}, "priority"),
            ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
            ({"vllm_xargs": {"chain": "{}"}}, "vllm_xargs.chain"),
            ({"n": 2, "chain": {"trace": True}}, "chain.trace"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, body: dict[str, Any], param: str) -> None:
        error = refused(body)
        assert (error.status, error.param) == (400, param)
        assert param.split(".")[-1] in error.message or "chain" in error.message

    def test_priority_where_the_target_has_it(self) -> None:
        prepare(ChainChatRequest.model_validate({**CHAT, "priority": 1}), **DEFAULTS, priorities=True)


@pytest.mark.parametrize(
    "body",
    [
        5, [], None, "x", {}, {"messages": None}, {"messages": "x"}, {"messages": [5]}, {"messages": [None]},
        {"messages": [{}]}, {**CHAT, "messages": [{"role": "user", "content": 5}]},
        {**CHAT, "messages": [{"role": "user", "content": [{}]}]},
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {**CHAT, "messages": [{"role": "user", "content": "\ud800"}]},
        {**CHAT, "messages": [{"role": "assistant", "tool_calls": 5}]},
        {**CHAT, "structured_outputs": "x"}, {**CHAT, "structured_outputs": {"bogus": 1}},
        {**CHAT, "response_format": 5}, {**CHAT, "response_format": {"type": "json_schema"}},
        {**CHAT, "tools": []}, {**CHAT, "tools": "x", "tool_choice": {"function": {"name": "f"}}},
        {**CHAT, "tools": [5], "tool_choice": {"function": {"name": "f"}}}, {**CHAT, "tool_choice": "auto"},
        {**CHAT, "stream_options": {"include_usage": True}}, {**CHAT, "stream": True, "stream_options": [1]},
        {**CHAT, "top_logprobs": "x"}, {**CHAT, "logprobs": True, "top_logprobs": -3}, {**CHAT, "seed": 1 << 64},
        {**CHAT, "stop": 5}, {**CHAT, "vllm_xargs": 5}, {**CHAT, "thinking_token_budget": "x"},
    ],
)  # fmt: skip
def test_malformed_bodies_are_validation_errors(body: Any) -> None:
    message, param = invalid(body)
    assert message
    assert param is None or param.islower()


@pytest.mark.parametrize(
    "body", [{"prompt": 5}, {"prompt": None}, {"prompt": [-1]}, {"prompt": "x", "structured_outputs": 5}]
)
def test_malformed_completions(body: Any) -> None:
    assert invalid({"model": "m", **body}, ChainCompletionRequest)[0]


class TestErrorBodies:
    @pytest.fixture
    def client(self) -> TestClient:
        app = FastAPI()
        errors.install(app, retry_after_s=7)

        @app.post("/chat")
        async def chat(body: ChainChatRequest) -> None: ...

        @app.get("/unready")
        async def unready() -> None:
            raise errors.RequestError("No replica of m is ready yet.", status=503, retry_after_s=7)

        @app.get("/engine")
        async def engine() -> None:
            raise OpenAIHTTPException(400, "top_p must be in (0, 1]. (parameter=top_p, value=2)", "BadRequestError")

        return TestClient(app)

    def test_503_has_retry_after(self, client: TestClient) -> None:
        answer = client.get("/unready")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "7")
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"

    def test_engine_errors_name_the_parameter(self, client: TestClient) -> None:
        error = client.get("/engine").json()["error"]
        assert (error["param"], error["code"]) == ("top_p", 400)

    def test_unknown_routes(self, client: TestClient) -> None:
        assert client.get("/nope").json()["error"]["type"] == "NotFoundError"

    @pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model":}', b"[" * 100_000])
    def test_bodies_that_are_no_json_object(self, client: TestClient, raw: bytes) -> None:
        answer = client.post("/chat", content=raw, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def trace(rounds: list[tuple[list[int], int, list[int]]]) -> dict[str, Any]:
    items = [
        {
            "base": 0,
            "drafted": d,
            "accepted": a,
            "own": o,
            "source": "x" if d else "",
            "wait_ms": 1.0,
            "draft_ms": 0.5,
            "relaxed": [],
        }
        for d, a, o in rounds
    ]
    return {"rounds": items, "reasons": {}, "drafted": 0, "accepted": 0, "rounds_n": len(items)}


def letters(ids: list[int]) -> str:
    return "".join(chr(96 + token) for token in ids)


class TestTrace:
    def test_summary_counts_what_the_client_got(self) -> None:
        got = chain_object(trace([([], 0, [1]), ([2, 3, 9], 2, [4]), ([5, 6, 7], 3, [8])]), 6, letters)
        assert got["summary"]["tokens"] == 6
        assert got["summary"]["accepted"] == 4  # two of the last round's three lie behind the end
        assert [item["accepted_text"] + item["own_text"] for item in got["rounds"]] == ["a", "bcd", "ef"]
        assert got["rounds"][1]["rejected_text"] == "i"

    def test_a_character_split_over_tokens_appears_once_complete(self) -> None:
        raw = "aé".encode()

        def decode(ids: list[int]) -> str:
            return bytes(raw[token] for token in ids).decode(errors="replace")

        assert pieces([[0], [1], [2]], decode) == ["a", "", "é"]

    def test_no_trace_is_said(self) -> None:
        assert "missing" in chain_object(None, 3, letters)["summary"]

    async def test_stream(self) -> None:
        chunks = [
            {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 2}},
        ]
        for keep in (True, False):
            got = await _collect(with_trace(_stream(chunks), _take, letters, keep))
            assert got[-1] == "data: [DONE]\n\n"
            bodies = [json.loads(item.removeprefix("data: ")) for item in got[:-1]]
            assert len(bodies) == (3 if keep else 2)
            assert bodies[-1]["chain"]["summary"]["tokens"] == 2
            assert all("chain" not in body for body in bodies[:-1])

    async def test_tokens_are_not_held_back(self) -> None:
        chunks = [{"choices": [{"delta": {"content": letter}, "finish_reason": None}]} for letter in "abc"]
        seen = []
        async for item in with_trace(_stream(chunks, seen), _take, letters, False):
            assert item == seen[-1]

    async def test_a_stream_that_breaks_off_loses_nothing(self) -> None:
        async def broken() -> AsyncGenerator[str, None]:
            yield 'data: {"choices":[{"finish_reason":"stop"}]}\n\n'

        assert len(await _collect(with_trace(broken(), _take, letters, False))) == 1


async def _take() -> dict[str, Any]:
    return trace([([], 0, [1]), ([2, 3], 1, [4])])


async def _stream(chunks: list[dict[str, Any]], seen: list[str] | None = None) -> AsyncGenerator[str, None]:
    for chunk in chunks:
        item = f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
        if seen is not None:
            seen.append(item)
        yield item
    if seen is not None:
        seen.append("data: [DONE]\n\n")
    yield "data: [DONE]\n\n"


async def _collect(stream: AsyncGenerator[str, None]) -> list[str]:
    return [item async for item in stream]
