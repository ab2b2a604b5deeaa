"""The target's Serve deployment: ``ray.serve.llm``'s server, which also finds the drafts and adds traces to responses."""

import asyncio
import copy
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from vllm.entrypoints.generate.base.protocol import StreamOptions

from deployments.api.trace import TakeTrace, with_trace
from deployments.chain.faults import FaultPolicy
from deployments.target import stop_strings
from deployments.target.answer_checks import AnswerChecks
from deployments.target.discovery import Ask, DraftDiscovery
from deployments.target.leaving import leave_with_engine
from deployments.target.metrics import ChainMetrics, export
from deployments.target.options import ChainOptions
from deployments.target.predictions import tokenised, with_prediction_usage
from deployments.target.replicas import Answers, ask_every_replica

logger = logging.getLogger(__name__)


class TargetServer(LLMServer):
    """One target replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, llm_config: LLMConfig, *, drafts: Mapping[str, DeploymentHandle], faults: dict[str, Any]
    ) -> None:
        """``drafts`` are handles by draft name; nothing here waits for their replicas."""
        self._faults = FaultPolicy(**faults)
        self._drafts = dict(drafts)
        self._discovery: DraftDiscovery | None = None
        self._background: list[asyncio.Task[None]] = []
        self._tokenizer: Any = None
        self._decode: Callable[[list[int]], str] | None = None
        self._checks: AnswerChecks | None = None
        await super().__init__(llm_config)

    async def start(self) -> None:
        """Start the engine, then look for drafts and export metrics for as long as the replica lives."""
        await super().start()
        stop_strings.install(self.engine._engine_client.output_processor)
        tokenizer = self.engine._engine_client.get_tokenizer()
        self._tokenizer, self._decode = copy.deepcopy(tokenizer), tokenizer.decode  # the copy is for another thread
        self._checks = AnswerChecks(self.engine._engine_client, self.take_trace)
        asks = {name: self._ask(handle) for name, handle in self._drafts.items()}
        self._discovery = DraftDiscovery(asks, self.engine.collective_rpc, self._faults)
        metrics = export(self.engine.collective_rpc, ChainMetrics.of_replica, self._faults)
        client = self.engine._engine_client
        # not a graceful exit, which would wait for requests that cannot end
        leaving = leave_with_engine(lambda: bool(client.errored), lambda: os._exit(1), self._faults.engine_watch_s)
        self._background = [
            asyncio.create_task(self._discovery.run(), name="draft discovery"),
            asyncio.create_task(metrics, name="chain metrics"),
            asyncio.create_task(leaving, name="engine watch"),
        ]

    def _ask(self, handle: DeploymentHandle) -> Ask:
        async def ask(key: str, offer: dict[str, Any]) -> Answers:
            return await ask_every_replica(handle, "endpoint", key, offer, timeout_s=self._faults.discovery_timeout_s)

        return ask

    async def _run_request(
        self,
        request: Any,
        *,
        engine_method: str,
        batch_output_stream: bool = False,
        raw_request_info: Any = None,
    ) -> AsyncGenerator[Any, None]:
        """As the base class, with drafts that came as text tokenised, and with the trace added where a request asks for one."""
        stream = bool(getattr(request, "stream", False))
        options = chain_options(request)
        predicted = options is not None and bool(options.texts or options.predicted)
        if options is not None and options.texts:
            options = await asyncio.to_thread(tokenised, options, self._tokenizer)  # long drafts take many milliseconds
            request.vllm_xargs = {**request.vllm_xargs, "chain": msgspec.json.encode(options).decode()}
        keep_usage = True
        if options is not None and options.trace and stream:
            asked = request.stream_options
            keep_usage = bool(asked and asked.include_usage)
            request.stream_options = (asked or StreamOptions()).model_copy(update={"include_usage": True})
        source = await super()._run_request(request, engine_method=engine_method, raw_request_info=raw_request_info)
        take = self._trace_of(options.id) if options is not None else None
        if take is not None and predicted:
            source = with_prediction_usage(source, take)
        if take is not None and options is not None and options.trace:
            source = with_trace(source, take, self._decode, keep_usage)
        answer: AsyncGenerator[Any, None] = (
            self._batch_output_stream(source) if stream and batch_output_stream else source
        )
        return answer

    def _trace_of(self, chain_id: str) -> TakeTrace:
        """Asks the engine once: a trace is handed out once, and several parts of a response can need it."""
        taken: list[dict[str, Any] | None] = []

        async def take() -> dict[str, Any] | None:
            if not taken:
                taken.append(await self.take_trace(chain_id))
            return taken[0]

        return take

    async def take_trace(self, chain_id: str) -> dict[str, Any] | None:
        """Rounds and totals of one request; None rather than an error, for a trace must not fail an answer."""
        try:
            results = await self.engine.collective_rpc(
                "take_trace", timeout=self._faults.rpc_timeout_s, args=(chain_id,)
            )
        except Exception as error:
            logger.warning("trace %s not available: %r", chain_id, error)
            return None
        trace: dict[str, Any] | None = results[0] if results else None
        return trace

    async def verify(
        self,
        prompt: list[int],
        drafts: list[list[int]],
        policy: dict[str, Any] | None,
        sampling: dict[str, Any],
        deadline_s: float,
        tenant: str = "",
    ) -> list[dict[str, Any]]:
        """How much of each draft the target would say; see :meth:`AnswerChecks.verify`."""
        assert self._checks is not None
        return await self._checks.verify(prompt, drafts, policy, sampling, deadline_s, tenant)

    async def score(
        self, prompt: list[int], drafts: list[list[int]], top_k: int, deadline_s: float, tenant: str = ""
    ) -> list[dict[str, Any]]:
        """How likely the target finds each draft; see :meth:`AnswerChecks.score`.

        The base class has a method of this name for cross-encoders, which the router does not serve.
        """
        assert self._checks is not None
        return await self._checks.score(prompt, drafts, top_k, deadline_s, tenant)

    async def draft_stats(self) -> dict[str, Any]:
        """Counters of the chain in this replica, and the draft replicas it is connected to."""
        results = await self.engine.collective_rpc("draft_stats", timeout=self._faults.rpc_timeout_s)
        connected = self._discovery.connected if self._discovery is not None else []
        return {"connected": connected, "counters": results[0]}

    async def __del__(self) -> None:
        for task in self._background:
            task.cancel()
        await super().__del__()

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """As the base class, without the zero entries it adds to bundles: they would ask for hardware kinds by name."""
        options: dict[str, Any] = LLMServer.get_deployment_options.__func__(cls, llm_config)
        bundles = options.get("placement_group_bundles", [])
        options["placement_group_bundles"] = [
            {name: amount for name, amount in bundle.items() if amount > 0} for bundle in bundles
        ]
        return options


def chain_options(request: Any) -> ChainOptions | None:
    """The chain's options in a request body, as the router put them there."""
    if not isinstance(request, ChatCompletionRequest | CompletionRequest):
        return None
    raw = (request.vllm_xargs or {}).get("chain")
    return msgspec.json.decode(raw, type=ChainOptions) if isinstance(raw, str) else None
