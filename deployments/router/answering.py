"""Requests in answer mode, from the router's door to the last byte."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse, OpenAIHTTPException
from ray.llm._internal.serve.core.ingress.utils import _openai_json_wrapper, _peek_at_generator
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.api import errors
from deployments.api.answers import AnswerPlan
from deployments.api.errors import RequestError
from deployments.api.requests import ChainChatRequest
from deployments.api.trace import DONE
from deployments.chain.acceptance.policy import Policy
from deployments.chain.given import MAX_DRAFTS
from deployments.router.answer_chain import AnswerChain, Decision
from deployments.router.answer_response import DATA, AnswerText, abstention, abstention_stream, event

logger = logging.getLogger(__name__)

Target = AsyncGenerator[Any, None]
SSE = "text/event-stream"
COMPARING = ("nkl", "probabilistic")  # rules that look at a draft's probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How one router answers; ``ask`` and ``served`` are its ways to the target."""

    chain: AnswerChain
    ask: Callable[[ChainChatRequest], Target]
    served: Callable[
        [Awaitable[Any]], Awaitable[Any]
    ]  # waits for the target's first words, but not for one that is gone
    model: str
    abstention: str
    temperature: float  # of requests that name none
    learns: bool

    async def respond(self, body: ChainChatRequest, plan: AnswerPlan, tenant: str) -> Response:
        """The whole response, or the beginning of a stream.

        Raises:
            RequestError, OpenAIHTTPException: what the target says of the request, unless a traced stream has begun.
        """
        if body.stream and plan.trace:
            return StreamingResponse(self._live(body, plan, tenant), media_type=SSE)
        decision = await self._decide(body, plan, tenant, lambda name, details: None)
        if decision.how == "abstained":
            said = abstention(self.model, self.abstention, decision)
            if not body.stream:
                return JSONResponse(said)
            return StreamingResponse(_each(abstention_stream(said, usage=_wants_usage(body))), media_type=SSE)
        text = AnswerText(self.chain, decision, trace=plan.trace, scaffold=plan.scaffold)
        first, target = await self._begun(body, decision)
        if not body.stream:
            content = await text.whole(first.model_dump())
            self._learn(body, tenant, text)
            return JSONResponse(content)
        return StreamingResponse(self._streamed(body, tenant, text, target), media_type=SSE)

    async def _decide(
        self, body: ChainChatRequest, plan: AnswerPlan, tenant: str, tell: Callable[[str, dict[str, Any]], None]
    ) -> Decision:
        return await self.chain.decide(
            body.messages,
            plan,
            tenant=tenant,
            temperature=self._temperature(body),
            seed=body.seed,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            stop=body.stop_token_ids or (),
            template_kwargs=body.chat_template_kwargs,
            tell=tell,
        )

    def _temperature(self, body: ChainChatRequest) -> float:
        return self.temperature if body.temperature is None else float(body.temperature)

    async def _begun(self, body: ChainChatRequest, decision: Decision) -> tuple[Any, Target]:
        """The target's first words on the final request, and all of them."""
        final = final_request(body, decision, self._temperature(body))
        first, target = await self.served(_peek_at_generator(self.ask(final)))
        head = first[0] if isinstance(first, list) else first
        if isinstance(head, ErrorResponse):
            raise OpenAIHTTPException(message=head.error.message, status_code=head.error.code, type=head.error.type)
        return first, target

    async def _live(self, body: ChainChatRequest, plan: AnswerPlan, tenant: str) -> AsyncIterator[str]:
        """A stream that tells what happens from the first draft on. What goes wrong now is said in it, as vLLM does."""
        happened: asyncio.Queue[str | None] = asyncio.Queue()

        def tell(name: str, details: dict[str, Any]) -> None:
            happened.put_nowait(event(name, details, as_event=plan.events))

        deciding = asyncio.create_task(self._decide(body, plan, tenant, tell))
        deciding.add_done_callback(lambda _: happened.put_nowait(None))
        try:
            while (line := await happened.get()) is not None:
                yield line
            decision = await deciding
            if decision.how == "abstained":
                said = abstention(self.model, self.abstention, decision)
                for chunk in abstention_stream(said, usage=_wants_usage(body)):
                    yield chunk
                return
            text = AnswerText(self.chain, decision, trace=True, scaffold=plan.scaffold)
            _, target = await self._begun(body, decision)
            async for chunk in self._streamed(body, tenant, text, target):
                yield chunk
        except (RequestError, OpenAIHTTPException) as error:
            status = int(error.status if isinstance(error, RequestError) else error.status_code)
            yield f"{DATA}{json.dumps(errors.body(error.message, status))}\n\n{DONE}\n\n"
        except Exception:
            logger.exception("an answer ended in the middle of its stream")
            message = "The answer could not be finished; try again."
            yield f"{DATA}{json.dumps(errors.body(message, 503))}\n\n{DONE}\n\n"
        finally:
            deciding.cancel()

    async def _streamed(
        self, body: ChainChatRequest, tenant: str, text: AnswerText, target: Target
    ) -> AsyncIterator[str]:
        async with contextlib.aclosing(text.stream(_openai_json_wrapper(target))) as packets:  # type: ignore[type-var]
            async for packet in packets:
                yield packet
        self._learn(body, tenant, text)

    def _learn(self, body: ChainChatRequest, tenant: str, text: AnswerText) -> None:
        """Hand the answer to the evidence deployment; nobody waits for that."""
        if self.learns and tenant and text.answer.strip():
            task = asyncio.create_task(self.chain.learn(body.messages, tenant, text.answer))
            _learning.add(task)
            task.add_done_callback(_learning.discard)


_learning: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks weakly


def final_request(body: ChainChatRequest, decision: Decision, temperature: float) -> ChainChatRequest:
    """The request as the target gets it: with the drafts to be verified, and the resolver's words where it is to write.

    Of drafts that the request brought, only those decided upon: one tagged invalid is not to be verified after all.
    """
    update: dict[str, Any] = {}
    if decision.given:
        xargs = dict(body.vllm_xargs or {})
        xargs["chain"] = with_decided(str(xargs["chain"]), decision, temperature)
        update["vllm_xargs"] = xargs
    if decision.message is not None:
        update["messages"] = [*body.messages[:-1], {"role": "user", "content": decision.message}]
    request: ChainChatRequest = body.model_copy(update=update)
    return request


def with_given(options: str, drafts: list[list[int]]) -> str:
    """The chain's options (JSON) with drafts for the target to verify, before those it has."""
    decoded = json.loads(options)
    return json.dumps({**decoded, "given": [*drafts, *decoded.get("given", [])][:MAX_DRAFTS]})


def with_decided(options: str, decision: Decision, temperature: float) -> str:
    """The chain's options (JSON) with the drafts decided upon instead of the texts that the request brought.

    Where a policy compares distributions they go with what their writers thought, which they say at temperature 1: that is how
    such policies take a greedy request, too, and what cannot be had from a draft's likeliest tokens for another temperature.
    """
    decoded = json.loads(options)
    if decoded.pop("texts", None):
        decoded["predicted"] = True
    rule = msgspec.convert(decoded["policy"], Policy).rule if "policy" in decoded else ""
    if rule in COMPARING and temperature in (0.0, 1.0):
        decoded["given_top"] = decision.tops()
    return with_given(json.dumps(decoded), decision.tokens())


def _wants_usage(body: ChainChatRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


async def _each(chunks: list[str]) -> AsyncIterator[str]:
    for chunk in chunks:
        yield chunk
