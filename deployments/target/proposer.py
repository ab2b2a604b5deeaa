"""vLLM's view of the drafts: a ``custom_class`` proposer that asks :class:`DraftRounds` after every engine step."""

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from deployments.chain.acceptance.candidates import Lossy, Proposal
from deployments.chain.acceptance.family import family
from deployments.chain.controller import Controller, Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.chain.given import top_of
from deployments.chain.protocol import MAX_DRAFT_TOKENS, Sampling
from deployments.target.options import ChainOptions, options_of, seed_of
from deployments.target.rounds import DraftRounds
from deployments.target.sampler import RequestSampling
from deployments.target.sequence import Running
from deployments.target.settings import ChainSettings
from deployments.target.sources import make_sources

BAN = -100.0  # logit_bias that means "never" (OpenAI), though it leaves the logit finite

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class ChainProposer:
    """Constructed by vLLM with its config; the worker then attaches the model runner that owns the batch."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        tokens = vllm_config.speculative_config.num_speculative_tokens
        if not 1 <= tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_speculative_tokens must be 1..{MAX_DRAFT_TOKENS}, got {tokens}")
        self.num_tokens: int = tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.settings = settings = ChainSettings.of(vllm_config.additional_config)
        self.faults = FaultPolicy(**settings.faults)
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        controller = Controller(lends=settings.own_threads > 0) if settings.adaptive else Unconditional()
        sources = make_sources(settings.sources)
        self.rounds = DraftRounds(uuid.uuid4().hex, self.vocab_size, self.faults, controller, sources)
        self._options: dict[str, tuple[ChainOptions, int]] = {}
        self._proposals: dict[str, Proposal | None] = {}  # of requests with a lossy policy: what is being verified
        self._runner: GPUModelRunner | None = None

    def attach(self, runner: "GPUModelRunner") -> None:
        self._runner = runner

    @property
    def runner(self) -> "GPUModelRunner":
        assert self._runner is not None, "the worker attaches the runner before the first step"
        return self._runner

    def load_model(self, model: Any) -> None:
        """vLLM calls this on every drafter; drafts load their models in their own deployments."""

    # --- what the sampler asks ------------------------------------------------------------------------------------

    def request_sampling(self) -> list[RequestSampling]:
        """Seeds, positions and extra parameters of the batch, in its order."""
        batch = self.runner.input_batch
        result = []
        for index, request in enumerate(batch.req_ids):
            options, seed = self.options(request)
            position = int(batch.num_tokens_no_spec[index])
            result.append(
                RequestSampling(
                    seed=seed,
                    position=position,
                    min_p=options.min_p,
                    bias=options.bias() or None,
                    lossy=self._lossy(request, options, seed, position) if options.policy is not None else None,
                )
            )
        return result

    def _lossy(self, request: str, options: ChainOptions, seed: int, position: int) -> Lossy | None:
        state = self.runner.requests[request]
        proposal = self._proposals.get(request)
        if options.policy is None or not options.policy.lossy:
            return None
        by_meaning = options.policy.rule == "semantic"
        if not by_meaning and (proposal is None or proposal.base != position):
            return None
        banned = {token for token, bias in options.bias().items() if bias <= BAN}
        stops = frozenset(state.sampling_params.all_stop_token_ids | banned)
        generated = position - state.num_prompt_tokens
        if by_meaning:
            batch = self.runner.input_batch
            committed = batch.token_ids_cpu[batch.req_id_to_index[request], :position]
            return Lossy(options.policy, seed, generated, stops, committed=committed)
        return Lossy(options.policy, seed, generated, stops, proposal)

    def options(self, request: str) -> tuple[ChainOptions, int]:
        known = self._options.get(request)
        if known is None:
            params = self.runner.requests[request].sampling_params
            options = options_of(params)
            known = self._options[request] = (options, seed_of(request, params, options))
        return known

    # --- what vLLM asks -------------------------------------------------------------------------------------------

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],  # [B] committed tokens of each request
        token_ids_cpu: npt.NDArray[np.int32],  # [B, max_model_len]
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens for each request of the batch, ragged; an empty list is a plain step for that one."""
        group = get_tp_group()
        proposed: tuple[list[list[int]], dict[str, Proposal | None]] | None = None
        if group.rank_in_group == 0:
            drafts = self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            lossy = [
                request for request in self.runner.input_batch.req_ids if self.options(request)[0].policy is not None
            ]
            proposed = drafts, {request: self.rounds.proposal(request) for request in lossy}
        if group.world_size > 1:  # every rank must verify the same tokens, and judge them alike
            proposed = group.broadcast_object(proposed, src=0)
        assert proposed is not None
        self._proposals.update(proposed[1])
        return proposed[0]

    def _propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
    ) -> list[list[int]]:
        batch = self.runner.input_batch
        relaxed = self.runner.rejection_sampler.take_relaxed()
        most = self.settings.max_batch
        ask = 0 if most and len(sampled_token_ids) > most else self.settings.model_tokens or self.num_tokens
        running = []
        for index, new in enumerate(sampled_token_ids):
            if not new:  # prompt not read to its end yet
                continue
            request = batch.req_ids[index]
            options, seed = self.options(request)
            state = self.runner.requests[request]
            if not self.rounds.knows(request):
                self._begin(request, options, token_ids_cpu[index, : state.num_prompt_tokens].tolist())
            row = token_ids_cpu[index]
            length = int(num_tokens_no_spec[index])
            params = state.sampling_params
            running.append(
                Running(
                    request=request,
                    new=new,
                    length=length,
                    tokens=partial(_tokens, row),
                    want=self._want(state, options, length, new),
                    sampling=_sampling(params, seed, options),
                    ask=ask,
                    left=self._left(state, length),
                    relaxed=relaxed.get(index, ()),
                )
            )
        drafts = self.rounds.round(running)
        return [
            drafts.get(request, []) if new else []
            for request, new in zip(batch.req_ids, sampled_token_ids, strict=True)
        ]

    def _want(self, state: Any, options: ChainOptions, length: int, new: list[int]) -> int:
        """Draft tokens of use after ``length``: none for a request that just ended, never past a limit."""
        params = state.sampling_params
        if not options.enabled or params is None:
            return 0
        want = self.num_tokens if options.tokens is None else min(self.num_tokens, options.tokens)
        generated = length - state.num_prompt_tokens
        if params.max_tokens is not None:
            want = min(want, params.max_tokens - generated - 1)  # the step adds one token of the target's own
        want = min(want, self.max_model_len - length - 1)
        # min_tokens holds the stops back, so below it none can have ended the request
        if generated >= (params.min_tokens or 0) and not params.all_stop_token_ids.isdisjoint(new):
            return 0
        return max(0, want)

    def _left(self, state: Any, length: int) -> int:
        """Tokens a request may still generate."""
        params = state.sampling_params
        room = self.max_model_len - length
        if params is None or params.max_tokens is None:
            return room
        return int(min(room, params.max_tokens - (length - state.num_prompt_tokens)))

    def announce(self, new_requests: list[Any]) -> None:
        """Requests the engine is about to prefill (vLLM's ``NewRequestData``): drafts may start to read as well."""
        if get_tp_group().rank_in_group != 0:
            return
        prompts = []
        for new in new_requests:
            params = new.sampling_params
            options = options_of(params)
            seed = seed_of(new.req_id, params, options)
            self._options[new.req_id] = (options, seed)
            tokens = new.prompt_token_ids
            if params is None or tokens is None or self.rounds.knows(new.req_id):
                continue
            self._begin(new.req_id, options, tokens)
            drafting = options.enabled and (params.max_tokens is None or params.max_tokens > 2)
            most = self.settings.max_batch
            if drafting and (not most or len(self.runner.requests) < most):
                sampling = _sampling(params, seed, options)
                prompts.append((new.req_id, list(tokens), sampling, params.max_tokens or self.max_model_len))
        if prompts:
            self.rounds.announce(prompts)

    def _begin(self, request: str, options: ChainOptions, prompt: list[int]) -> None:
        sources, given = (options.sources, options.given) if options.enabled else ((), ())
        kind = family(options.policy)
        tops = [
            None if top is None else top_of(len(draft), top.ids, top.probs)
            for draft, top in zip(given, options.given_top, strict=False)
        ]
        self.rounds.begin(request, options.id, prompt, options.trace, options.tenant, sources, given, kind, tops)

    def finish(self, requests: set[str]) -> None:
        """vLLM freed these requests (finished or aborted)."""
        for request in requests:
            self._options.pop(request, None)
            self._proposals.pop(request, None)
        self.rounds.finish(requests)


def _sampling(params: "SamplingParams | None", seed: int, options: ChainOptions) -> Sampling:
    probs = options.policy is not None and options.policy.rule != "semantic"
    if params is None:
        return Sampling(0.0, seed, probs=probs)
    return Sampling(params.temperature, seed, max(params.top_k, 0), params.top_p, probs)


def _tokens(row: npt.NDArray[np.int32], start: int, stop: int) -> list[int]:
    """Plain ids of a part of one sequence's row."""
    ids: list[int] = row[start:stop].tolist()
    return ids
