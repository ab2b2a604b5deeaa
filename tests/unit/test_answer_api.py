"""The answer chain in requests and responses: what is refused, scaffolds, traces in bodies and streams."""

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.answers import AnswerPlan, Sources, answer_plan
from deployments.api.errors import RequestError
from deployments.api.parameters import prepare
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.api.scaffold import CLOSE, Scaffold
from deployments.api.trace import segments
from deployments.config.answer import Answer
from deployments.evidence.validators.registry import Registry
from deployments.router.answer_chain import Decision
from deployments.router.answering import Answering, final_request, with_given
from tests.unit.answer_fakes import FakeCalls, FakeMetrics, WordPrompts, chain, plan

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "what is it"}]}
THERE = Sources(models=("int8", "int4"), evidence=("rules", "retrieval"))
VALIDATORS = Registry()
YES, NO = "it is so indeed", "never at all by anybody"


def planned(chain: dict[str, Any], **body: Any) -> AnswerPlan | None:
    request = ChainChatRequest.model_validate({**CHAT, **body, "chain": chain})
    return answer_plan(request, Answer(), THERE, trace=True, validators=VALIDATORS)


class TestPlan:
    def test_defaults_are_the_applications(self) -> None:
        got = planned({"mode": "answer"})
        assert got is not None
        assert (got.k, got.length, got.resolve, got.sources) == (3, 64, "choose", THERE)
        assert (got.thresholds.agree, got.thresholds.diverge) == (0.1, 0.15)
        assert planned({}) is None

    def test_what_is_asked_arrives(self) -> None:
        got = planned(
            {
                "mode": "answer",
                "k": 2,
                "length": 9,
                "thresholds": {"agree": 0.05},
                "resolve": "write",
                "sources": ["model:int4", "rules"],
                "escalate": ["model:int8"],
                "validators": ["json_syntax", {"name": "ranges", "numbers": [{"min": 1}]}],
                "scaffold": True,
                "trace": "events",
            }
        )
        assert got is not None
        assert got.sources == Sources(models=("int4",), evidence=("rules",))
        assert got.escalate == Sources(models=("int8",))
        assert got.validators == ({"name": "json_syntax"}, {"name": "ranges", "numbers": [{"min": 1}]})
        assert (got.k, got.length, got.thresholds.agree, got.resolve) == (2, 9, 0.05, "write")
        assert (got.scaffold, got.trace, got.events) == (True, True, True)

    @pytest.mark.parametrize(
        ("field", "body", "param"),
        [
            ({"k": 2}, {}, "chain.k"),
            ({"scaffold": True}, {}, "chain.scaffold"),
            ({"mode": "answer", "sources": ["suffix"]}, {}, "chain.sources"),
            ({"mode": "answer", "escalate": ["model:other"]}, {}, "chain.escalate"),
            ({"mode": "answer", "enabled": False}, {}, "chain.mode"),
            ({"mode": "answer", "thresholds": {"agree": 0.5}}, {}, "chain.thresholds"),
            ({"mode": "answer", "validators": [{"nam": "x"}]}, {}, "chain.validators.0"),
            ({"mode": "answer", "validators": ["json_syntax", "spelling"]}, {}, "chain.validators.1"),
            ({"mode": "answer", "validators": [{"name": "ranges", "low": 1}]}, {}, "chain.validators.0"),
            ({"mode": "answer", "validators": [{"name": "custom", "function": "os:system"}]}, {}, "chain.validators.0"),
            ({"mode": "answer"}, {"n": 2}, "n"),
            ({"mode": "answer"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"mode": "answer"}, {"add_generation_prompt": False}, "add_generation_prompt"),
            ({"mode": "answer", "scaffold": True}, {"response_format": {"type": "json_object"}}, "chain.scaffold"),
            ({"mode": "answer", "resolve": "abstain"}, {"response_format": {"type": "json_object"}}, "chain.resolve"),
        ],
    )
    def test_what_cannot_be_honoured_is_named(self, field: Any, body: dict[str, Any], param: str) -> None:
        with pytest.raises(RequestError) as error:
            planned(field, **body)
        assert (error.value.status, error.value.param) == (400, param)

    def test_drafts_are_judged_where_it_shows(self) -> None:
        for field, judged in (
            ({}, False),
            ({"trace": True}, True),
            ({"scaffold": True}, True),
            ({"policy": "nkl"}, True),
        ):
            got = planned({"mode": "answer", **field})
            assert got is not None
            assert got.judge is judged

    @pytest.mark.parametrize("field", [{"k": 9}, {"k": -1}, {"length": 0}, {"resolve": "vote"}, {"escalate": []}])
    def test_values_out_of_range_are_refused(self, field: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(field))):
            planned({"mode": "answer", **field})

    def test_completions_have_no_answer_mode(self) -> None:
        request = ChainCompletionRequest.model_validate({"model": "m", "prompt": "x", "chain": {"mode": "answer"}})
        with pytest.raises(RequestError, match="chat/completions"):
            answer_plan(request, Answer(), THERE, trace=True, validators=VALIDATORS)

    def test_validators_need_somewhere_to_run(self) -> None:
        request = ChainChatRequest.model_validate({**CHAT, "chain": {"mode": "answer", "validators": ["json_syntax"]}})
        with pytest.raises(RequestError, match=r"chain\.validators: none here"):
            answer_plan(request, Answer(), THERE, trace=True)

    def test_the_engine_hears_of_its_own_sources_only(self) -> None:
        for field, sources in (
            ({"sources": ["rules", "model"]}, ["model"]),
            ({"mode": "answer", "sources": ["rules"]}, None),
        ):
            request = ChainChatRequest.model_validate({**CHAT, "chain": field})
            prepare(
                request,
                enabled=True,
                trace=True,
                default_min_p=0.0,
                vocab_size=9,
                sources=["model"],
                evidence=["rules"],
            )
            assert json.loads(str((request.vllm_xargs or {})["chain"])).get("sources") == sources

    def test_drafts_come_before_those_the_request_brought(self) -> None:
        assert json.loads(with_given('{"id": "x", "given": [[3]]}', [[1], [2]])) == {
            "id": "x",
            "given": [[1], [2], [3]],
        }


class TestScaffold:
    @given(st.text("ab <", max_size=12), st.text("ab <", max_size=12), st.lists(st.integers(1, 5), max_size=6))
    def test_without_its_tags_it_is_the_answer(self, draft: str, answer: str, cuts: list[int]) -> None:
        ends = sorted({min(sum(cuts[: i + 1]), len(draft)) for i in range(len(cuts))} | {len(draft)})
        scaffold = Scaffold("s", draft, ends)
        parts = [answer[i : i + 2] for i in range(0, len(answer), 2)]
        sent = "".join(map(scaffold.add, parts)) + scaffold.close()
        assert sent.replace('<draft source="s">', "").replace(CLOSE, "") == answer
        shared = max((end for end in ends if answer.startswith(draft[:end])), default=0)
        if shared:
            assert sent.startswith(f'<draft source="s">{draft[:shared]}{CLOSE}')
        else:
            assert sent == answer

    def test_nothing_is_held_back_but_parts_of_a_token(self) -> None:
        scaffold = Scaffold("model:a#0", "It is so.", [2, 5, 8, 9])
        assert [scaffold.add(part) for part in ("It", " i", "s now", " then")] == [
            '<draft source="model:a#0">It',
            "",
            f" is{CLOSE} now",
            " then",
        ]
        assert scaffold.close() == ""


def test_segments_say_who_each_part_is_from() -> None:
    rounds = [
        {"source": "", "accepted": 0, "own": [1], "accepted_text": "", "own_text": "A"},
        {"source": "given", "accepted": 2, "own": [], "accepted_text": " b c", "own_text": ""},
        {"source": "given", "accepted": 1, "own": [4], "accepted_text": " d", "own_text": " e"},
    ]
    assert segments(rounds) == [
        {"from": "target", "tokens": 1, "text": "A"},
        {"from": "given", "tokens": 3, "text": " b c d"},
        {"from": "target", "tokens": 1, "text": " e"},
    ]


class Served:
    """An Answering over fakes; the target says the same to every request."""

    def __init__(self, *chunks: Any, **parts: Any) -> None:
        self.prompts, self.metrics = WordPrompts(), FakeMetrics()
        self.calls = FakeCalls(self.prompts, **parts)
        self.final: list[ChainChatRequest] = []
        self.chunks = chunks
        self.answering = Answering(
            chain=chain(self.calls, self.prompts, self.metrics),  # type: ignore[arg-type]
            ask=self._ask,
            served=self._served,
            model="m",
            abstention="No answer.",
            temperature=1.0,
            learns=True,
        )

    async def _ask(self, body: ChainChatRequest) -> Any:
        self.final.append(body)
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def _served(self, answer: Any) -> Any:
        return await answer

    async def respond(self, wishes: AnswerPlan | None = None, **body: Any) -> Any:
        request = ChainChatRequest.model_validate({**CHAT, **body})
        request.vllm_xargs = {"chain": '{"id": "x"}'}
        return await self.answering.respond(request, wishes or plan(), "t")

    async def stream(self, wishes: AnswerPlan | None = None, **body: Any) -> str:
        answer = await self.respond(wishes, stream=True, **body)
        return "".join([part async for part in answer.body_iterator])


def said(*texts: str, trace: bool = True) -> list[str]:
    """A stream of the target, two chunks in its first packet as a batching server may have them."""
    head = {"id": "i", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    bodies: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts
    ]
    bodies.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if trace:
        bodies[-1]["chain"] = {"rounds": [], "summary": {"tokens": len(texts)}}
    packets = [f"data: {json.dumps(body)}\n\n" for body in bodies]
    return [packets[0] + packets[1], *packets[2:], "data: [DONE]\n\n"]


class TestStream:
    async def test_what_happens_comes_as_comments_that_the_openai_client_skips(self) -> None:
        text = await Served(*said("it", " is"), write=[YES, NO]).stream()
        comments = [json.loads(line[8:]) for line in text.splitlines() if line.startswith(": chain ")]
        assert [comment["event"] for comment in comments] == ["draft", "draft", "decision"]
        assert text.index(": chain") < text.index("data: ")
        chunks = read_by_openai(text)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "it is"
        told = chunks[-1].model_extra["chain"]["answer"]  # type: ignore[index]
        assert (told["outcome"], told["decision"], told["chosen"]) == ("divergence", "likeliest", 0)
        assert told["distances_to_answer"] == [0.5, 1.0]
        assert text.endswith("data: [DONE]\n\n")

    async def test_named_events_would_break_it_and_are_sent_to_who_asks(self) -> None:
        text = await Served(*said("it"), write=[YES]).stream(plan(events=True, k=1))
        assert "event: chain\ndata: {" in text
        assert any(getattr(chunk, "choices", None) is None for chunk in read_by_openai(text))

    async def test_without_a_trace_nothing_is_said(self) -> None:
        target = said("it", " is", trace=False)
        assert await Served(*target, write=[YES, NO]).stream(plan(trace=False)) == "".join(target)

    async def test_a_scaffold_in_a_stream(self) -> None:
        served = Served(*said("it", " is", " not"), write=[YES, YES])
        chunks = read_by_openai(await served.stream(plan(trace=False, scaffold=True)))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == '<draft source="model:a#0">it is </draft>not'

    async def test_an_abstention_in_a_stream(self) -> None:
        for trace in (True, False):
            served = Served(write=[YES, NO])
            text = await served.stream(plan(resolve="abstain", trace=trace), stream_options={"include_usage": True})
            chunks = read_by_openai(text)
            assert chunks[0].choices[0].delta.content == "No answer."
            assert chunks[-1].usage is not None
            assert chunks[-1].model_extra["chain"]["answer"]["distances"] == [[0.0, 1.0], [1.0, 0.0]]  # type: ignore[index]
            assert not served.final

    @pytest.mark.parametrize(
        ("error", "code"), [(RequestError("gone", status=503), 503), (RuntimeError("secret path"), 503)]
    )
    async def test_an_error_after_the_beginning_is_said_in_the_stream(self, error: Exception, code: int) -> None:
        text = await Served(error, write=[YES, NO]).stream()
        assert f'"code": {code}' in text
        assert "secret" not in text
        assert text.endswith("data: [DONE]\n\n")
        with pytest.raises(openai.APIError):
            read_by_openai(text)

    async def test_an_answer_that_ended_is_remembered_one_that_was_cut_is_not(self) -> None:
        served = Served(*said("it", " is"), write=[YES])
        await served.stream(plan(scaffold=True))
        await asyncio.sleep(0)
        assert [(question["tenant"], answer) for question, answer in served.calls.learnt] == [("t", "it is")]
        served = Served(*[packet.replace('"stop"', '"length"') for packet in said("it", " is")], write=[YES])
        await served.stream()
        await asyncio.sleep(0)
        assert not served.calls.learnt


class TestWhole:
    async def test_the_final_request_carries_the_drafts(self) -> None:
        served = Served(Body("it is"), write=[YES, YES])
        answer = await served.respond()
        options = json.loads(str((served.final[0].vllm_xargs or {})["chain"]))
        assert options == {"id": "x", "given": [served.prompts.ids(YES)] * 2}
        body = json.loads(answer.body)
        assert body["chain"]["answer"]["outcome"] == "consensus"
        assert body["chain"]["answer"]["given"] == [0, 1]

    async def test_write_replaces_the_last_message_only(self) -> None:
        request = ChainChatRequest.model_validate(
            {**CHAT, "messages": [{"role": "system", "content": "s"}, *CHAT["messages"]]}
        )
        request.vllm_xargs = {"chain": "{}"}
        final = final_request(request, Decision(outcome="divergence", message="Choose."), 0.0)
        assert [message["content"] for message in final.messages] == ["s", "Choose."]  # type: ignore[union-attr, index]
        assert request.messages[-1]["content"] == "what is it"  # type: ignore[index]

    async def test_an_abstention(self) -> None:
        served = Served(write=[YES, NO])
        body = json.loads((await served.respond(plan(resolve="abstain", trace=False))).body)
        assert body["choices"][0]["message"]["content"] == "No answer."
        assert body["chain"]["answer"]["decision"] == "abstained"
        openai.types.chat.ChatCompletion.model_validate(body)

    async def test_whatever_fails_the_plain_request_is_answered(self) -> None:
        served = Served(Body("it is"), write=RuntimeError("no"))
        body = json.loads((await served.respond()).body)
        assert body["choices"][0]["message"]["content"] == "it is"
        assert body["chain"]["answer"]["reasons"] == {"model:a": "raised"}
        assert json.loads(str((served.final[0].vllm_xargs or {})["chain"])) == {"id": "x"}


class Body:
    """A response of the target, not streamed."""

    def __init__(self, text: str) -> None:
        self._text = text

    def model_dump(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._text}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def read_by_openai(text: str) -> list[Any]:
    """What the official client makes of a stream."""

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=text.encode())

    transport = openai.DefaultHttpxClient(transport=httpx2.MockTransport(answer))
    client = openai.OpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=transport)
    return list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True))
