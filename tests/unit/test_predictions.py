"""Drafts in a request body: on their way to the engine, and in the usage of the response."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionResponse
from transformers import AutoTokenizer
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from deployments.api.errors import RequestError
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.api.trace import with_trace
from deployments.chain.given import MAX_CHARACTERS, MAX_DRAFTS, MAX_TOKENS
from deployments.target.options import ChainOptions
from deployments.target.predictions import counts, tokenised, with_prediction_usage
from tests.models import model
from tests.unit.test_api import CHAT, invalid, options, refused

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}


class TestRequest:
    @pytest.mark.parametrize(
        "content", ["def f(): pass", [{"type": "text", "text": "def f()"}, {"type": "text", "text": ": pass"}]]
    )
    def test_a_prediction_is_a_draft(self, content: Any) -> None:
        body = {**CHAT, "prediction": {"type": "content", "content": content}}
        assert options(ChainChatRequest.model_validate(body)).texts == ["def f(): pass"]

    def test_drafts_of_the_chain_field_come_behind_it(self) -> None:
        body = {**CHAT, "prediction": {"type": "content", "content": "a"}, "chain": {"drafts": ["b", "", "c"]}}
        assert options(ChainChatRequest.model_validate(body)).texts == ["a", "b", "c"]
        completion = ChainCompletionRequest.model_validate({**COMPLETION, "chain": {"drafts": [" b"]}})
        assert options(completion).texts == [" b"]

    @pytest.mark.parametrize("body", [{}, {"prediction": None}, {"prediction": {"type": "content", "content": ""}}])
    def test_none(self, body: dict[str, Any]) -> None:
        assert options(ChainChatRequest.model_validate({**CHAT, **body})).texts == []

    @pytest.mark.parametrize(
        ("prediction", "param"),
        [
            ({"type": "content"}, "prediction.content"),
            ({"type": "contents", "content": "a"}, "prediction.type"),
            ({"type": "content", "content": 5}, "prediction.content"),
            ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content"),
            ("a", "prediction"),
        ],
    )
    def test_malformed(self, prediction: Any, param: str) -> None:
        assert invalid({**CHAT, "prediction": prediction})[1] == param

    @pytest.mark.parametrize("drafts", ["a", [1], ["a"] * (MAX_DRAFTS + 1)])
    def test_malformed_drafts(self, drafts: Any) -> None:
        _, param = invalid({**CHAT, "chain": {"drafts": drafts}})
        assert param is not None
        assert param.startswith("chain.drafts")

    def test_bounds_and_several_answers_are_refused_by_name(self) -> None:
        prediction = {"prediction": {"type": "content", "content": "a"}}
        assert refused({**prediction, "n": 2}).param == "prediction"
        assert refused({"chain": {"drafts": ["a"]}, "n": 2}).param == "chain.drafts"
        assert refused({"chain": {"drafts": ["a" * MAX_CHARACTERS, "b"]}}).param == "chain.drafts"
        assert refused({**prediction, "chain": {"drafts": ["a"] * MAX_DRAFTS}}).param == "prediction"

    def test_completions_are_told_where_it_belongs(self) -> None:
        request = ChainCompletionRequest.model_validate(
            {**COMPLETION, "prediction": {"type": "content", "content": "a"}}
        )
        with pytest.raises(RequestError, match=r"use chain\.drafts"):
            options(request)


def test_texts_become_tokens_of_a_continuation() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model("target"))
    text = "Sure:\n```python\nprint(1)\n```"
    given = tokenised(ChainOptions(given=[[1, 2]], texts=[text, "a " * 5000]), tokenizer)
    assert given.texts == []
    assert given.given[0] == [1, 2]
    assert tokenizer.decode(given.given[1]) == text
    assert len(given.given[2]) == MAX_TOKENS
    message = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.encode(prompt + text, add_special_tokens=False)
    assert whole[-len(given.given[1]) :] == given.given[1]  # as the answer itself is spelled


TRACE = {"given": 10, "followed": 7}


class TestUsage:
    def test_counts(self) -> None:
        assert counts(TRACE, 20) == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 3}
        assert counts(TRACE, 4) == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 6}
        assert counts(None, 4) == {}

    def collect(self, items: list[Any], trace: dict[str, Any] | None) -> list[Any]:
        async def stream() -> AsyncGenerator[Any, None]:
            for item in items:
                yield item

        async def take() -> dict[str, Any] | None:
            return trace

        async def run() -> list[Any]:
            return [item async for item in with_prediction_usage(stream(), take)]

        return asyncio.run(run())

    def response(self) -> ChatCompletionResponse:
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = UsageInfo(prompt_tokens=3, completion_tokens=9, total_tokens=12)
        return ChatCompletionResponse(model="m", choices=[choice], usage=usage)

    def test_of_a_whole_response(self) -> None:
        (got,) = self.collect([self.response()], TRACE)
        details = got.model_dump()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 7, "rejected_prediction_tokens": 3}
        (without,) = self.collect([self.response()], None)
        assert without.usage.completion_tokens_details is None

    def test_of_a_stream_only_in_the_chunk_that_ends_it(self) -> None:
        token = 'data: {"choices":[{"delta":{"content":"ä"}}],"usage":{"completion_tokens":1}}\n\n'
        usage = 'data: {"choices":[],"usage":{"completion_tokens":5,"completion_tokens_details":{"reasoning_tokens":2}}}\n\n'
        done = "data: [DONE]\n\n"
        got = self.collect([token, usage, done], TRACE)
        assert (got[0], got[2]) == (token, done)
        details = json.loads(got[1].removeprefix("data: "))["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 2, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 5}
        assert got[1].endswith("\n\n")
        assert self.collect([token, usage, done], None) == [token, usage, done]

    def test_a_trace_around_it_still_knows_the_usage_chunk(self) -> None:
        async def stream() -> AsyncGenerator[Any, None]:
            yield 'data: {"choices":[{"delta":{}}],"finish_reason":"stop"}\n\n'
            yield 'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'
            yield "data: [DONE]\n\n"

        async def take() -> dict[str, Any] | None:
            return {**TRACE, "rounds": [], "reasons": {}}

        async def run(keep: bool) -> list[str]:
            return [item async for item in with_trace(with_prediction_usage(stream(), take), take, None, keep)]

        assert "usage" not in "".join(asyncio.run(run(False)))
        kept = asyncio.run(run(True))
        assert "accepted_prediction_tokens" in kept[1]
        assert "chain" in json.loads(kept[1].removeprefix("data: "))
