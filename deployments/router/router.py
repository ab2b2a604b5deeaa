"""The ingress: ``ray.serve.llm``'s OpenAI API with the chain's request field, honest errors and a health answer."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from ray.llm._internal.serve.core.configs.openai_api_models import ModelCard
from ray.llm._internal.serve.core.ingress.ingress import DEFAULT_ENDPOINTS, OpenAiIngress, init, make_fastapi_ingress
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response

from deployments.api import errors
from deployments.api.answers import AnswerPlan, Sources, answer_plan
from deployments.api.parameters import ChainRequest, prepare
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.chain.faults import FaultPolicy
from deployments.config.answer import Answer
from deployments.config.presets import policies
from deployments.evidence.validators.registry import Registry
from deployments.router.answer_chain import AnswerChain
from deployments.router.answer_metrics import AnswerMetrics
from deployments.router.answering import Answering, with_given
from deployments.router.availability import replica_count
from deployments.router.calls import ServeCalls
from deployments.router.prompts import Prompts
from deployments.router.retry import Retries
from deployments.router.tenants import tenant_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A handle hears of its replicas a moment after the router starts; within this time "none" only means "not heard yet".
GRACE_S = 3.0
POLL_S = 0.05
WATCH_S = 0.5  # how often a waiting request looks whether there still is a target


class RouterSettings(BaseModel):
    """What the router needs to know of the application."""

    chain_enabled: bool = True
    trace_allowed: bool = True
    default_min_p: float = 0.0
    vocab_size: int
    priorities: bool = False
    retry_after_s: int = 5
    drain_timeout_s: float = 10.0
    sources: list[str] = []
    tenant_header: str = "authorization"
    share_anonymous: bool = False
    presets: dict[str, dict[str, Any]] = {}
    allow_lossy: bool = True
    semantic: bool = False  # whether the target has a sentence model
    answer: Answer = Answer()
    evidence: list[str] = []  # sources of the evidence deployment
    validators: dict[str, dict[str, Any]] = {}  # the configured ones
    learns: bool = False  # whether it remembers answers
    faults: dict[str, Any] = {}
    target_model: Path  # its tokenizer and chat template
    max_model_len: int
    default_temperature: float = 1.0


class Router(OpenAiIngress):
    """One router replica."""

    def __init__(
        self,
        llm_deployments: dict[str, DeploymentHandle],
        model_cards: dict[str, ModelCard],
        *,
        settings: dict[str, Any],
        drafts: Mapping[str, DeploymentHandle] | None = None,
        evidence: DeploymentHandle | None = None,
    ) -> None:
        """``drafts`` by name, and ``evidence``: who drafts whole answers."""
        super().__init__(llm_deployments, model_cards)
        self._settings = RouterSettings.model_validate(settings)
        self._presets = policies(self._settings.presets)
        self._started = time.monotonic()
        self._targets = llm_deployments
        self._drafts, self._evidence = dict(drafts or {}), evidence
        for handle in (*llm_deployments.values(), *self._drafts.values(), *([evidence] if evidence else [])):
            replica_count(handle)  # starts listening
        self._validators = Registry(self._settings.validators, check_only=True) if evidence else None
        self._sources = Sources(models=tuple(self._drafts), evidence=tuple(self._settings.evidence))
        self._answers = {name: self._answer_chain(handle) for name, handle in llm_deployments.items()}
        self._retries = Retries(FaultPolicy(**self._settings.faults), self._settings.retry_after_s)

    def _answer_chain(self, target: DeploymentHandle) -> AnswerChain | None:
        """None where the target's tokenizer cannot be used: requests for it are refused, all others are served."""
        settings = self._settings
        try:
            prompts = Prompts(settings.target_model)
        except Exception:
            logger.exception("no answer chain: the tokenizer in %s cannot be used here", settings.target_model)
            return None
        return AnswerChain(
            ServeCalls(target, self._drafts, self._evidence),
            prompts,
            settings.answer,
            FaultPolicy(**settings.faults),
            AnswerMetrics.of_replica(),
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
        )

    async def health(self) -> Response:
        """200 as long as the router lives; the body says whether a target can answer."""
        replicas = {name: replica_count(handle) for name, handle in self._targets.items()}
        ready = all(replicas.values())
        return JSONResponse({"status": "ok" if ready else "starting", "ready": ready, "target_replicas": replicas})

    async def chat(self, body: ChainChatRequest, request: Request) -> Response:
        """OpenAI chat completion; ``chain`` says what to ask of the drafts."""
        plan = answer_plan(
            body,
            self._settings.answer,
            self._sources,
            trace=self._settings.trace_allowed,
            validators=self._validators,
        )
        by_evidence = [name for name in self._settings.evidence if plan is None and name in _sources_of(body)]
        model, tenant = await self._prepare(body, request)
        if plan is not None:
            return await self._answer(body, request, plan, model, tenant)
        chain = self._answers[model]
        if by_evidence and chain is not None:
            drafts = await chain.given_by_evidence(body.messages, by_evidence, tenant)
            options = str((body.vllm_xargs or {})["chain"])
            body.vllm_xargs = {**(body.vllm_xargs or {}), "chain": with_given(options, drafts)}
        return await self._while_served(super().chat(body, request), model)

    async def _answer(
        self, body: ChainChatRequest, request: Request, plan: AnswerPlan, model: str, tenant: str
    ) -> Response:
        chain, settings = self._answers[model], self._settings
        if chain is None:
            raise errors.RequestError(
                'chain.mode: "answer" needs the target\'s tokenizer, which this router could not load.', "chain.mode"
            )
        answering = Answering(
            chain=chain,
            ask=lambda final: self._get_response(body=final, call_method="chat", raw_request=request),
            served=lambda answer: self._while_served(answer, model),
            model=model,
            abstention=settings.answer.abstention,
            temperature=settings.default_temperature,
            learns=settings.learns,
        )
        return await answering.respond(body, plan, tenant)

    async def completions(self, body: ChainCompletionRequest, request: Request) -> Response:
        """OpenAI completion; ``chain`` says what to ask of the drafts."""
        answer_plan(body, self._settings.answer, self._sources, trace=False)  # refuses what only chats have
        model, _ = await self._prepare(body, request)
        return await self._while_served(super().completions(body, request), model)

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        """As the base class; a request whose target replica is lost is asked again, or its stream says so."""
        ask = super()._get_response
        answer = self._retries.answer(
            lambda: ask(body=body, call_method=call_method, raw_request=raw_request), stream=bool(body.stream)
        )
        async with contextlib.aclosing(answer) as items:
            async for item in items:
                yield item

    async def _prepare(self, body: ChainRequest, request: Request) -> tuple[str, str]:
        """Check the request, and return its model and its tenant."""
        model = await self._get_model_id(body.model)
        settings = self._settings
        tenant = tenant_of(request.headers.get(settings.tenant_header), settings.share_anonymous)
        prepare(
            body,
            enabled=settings.chain_enabled,
            trace=settings.trace_allowed,
            default_min_p=settings.default_min_p,
            vocab_size=settings.vocab_size,
            priorities=settings.priorities,
            tenant=tenant,
            sources=settings.sources,
            evidence=settings.evidence if isinstance(body, ChainChatRequest) else (),
            presets=self._presets,
            allow_lossy=settings.allow_lossy,
            semantic=settings.semantic,
        )
        await self._require_target(model)
        return model, tenant

    async def _while_served(self, answer: Awaitable[T], model: str) -> T:
        """Wait for the answer (of a stream: its first chunk), but not for a target that is gone.

        A handle that lost its last replica keeps the request until another comes, which can take minutes. A replica that
        drains is no longer counted but still finishes what it has, hence the time that must pass without any.
        """
        handle = self._targets[model]
        task = asyncio.ensure_future(answer)
        without_since: float | None = None
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=WATCH_S)
                if done:
                    return task.result()
                if replica_count(handle):
                    without_since = None
                    continue
                without_since = without_since or time.monotonic()
                if time.monotonic() - without_since > self._settings.drain_timeout_s:
                    raise self._unavailable("The target went away before it answered; try again shortly.")
        finally:
            task.cancel()  # nothing to a finished one; else the client is gone, or the target

    def _unavailable(self, message: str) -> errors.RequestError:
        return errors.RequestError(message, status=503, retry_after_s=self._settings.retry_after_s)

    async def _require_target(self, model: str) -> None:
        """503 while no replica of the target is there: a handle would let the request wait without end."""
        handle = self._targets[model]
        while not replica_count(handle):
            if time.monotonic() - self._started > GRACE_S:
                raise self._unavailable(f"No replica of {model} is ready yet; try again shortly.")
            await asyncio.sleep(POLL_S)


def _sources_of(body: ChainRequest) -> list[str]:
    return (body.chain.sources or []) if body.chain is not None else []


Route = Callable[[FastAPI], Callable[..., Any]]
SERVED = ("models", "model_data", "completions", "chat")


def ingress_class(retry_after_s: int) -> type:
    """The router as a Serve ingress class with its routes."""
    app = init()
    errors.install(app, retry_after_s)
    routes: dict[str, Route] = {name: DEFAULT_ENDPOINTS[name] for name in SERVED}
    routes["health"] = lambda app: app.get("/health")
    cls: type = make_fastapi_ingress(Router, endpoint_map=routes, app=app)
    return cls
