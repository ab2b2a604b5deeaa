"""vLLM's worker with the chain installed: our proposer and samplers in place of vLLM's, and control calls from the server.

The control calls arrive through ``collective_rpc`` between engine steps. Only rank 0 talks to drafts.
"""

from typing import Any

import msgspec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker as VllmGpuWorker

from deployments.channel.connect import connect
from deployments.channel.endpoint import Endpoint, KeyPair
from deployments.target.acceptance import AcceptanceSampler
from deployments.target.hidden_states import HiddenStates
from deployments.target.kv_link import KvLink
from deployments.target.lent_cores import LentCores
from deployments.target.meaning import load_meaning
from deployments.target.proposer import ChainProposer
from deployments.target.sampler import KeyedSampler
from deployments.target.token_ranks import install as install_token_ranks

try:
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmCpuWorker
except ImportError:  # a GPU build of vLLM without the CPU worker's libraries
    VllmCpuWorker = None


class ChainWorker:
    """Mixed in before a vLLM worker class."""

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner  # type: ignore[attr-defined]
        proposer = getattr(runner, "drafter", None)
        if not isinstance(proposer, ChainProposer):
            raise ValueError(
                "this worker needs speculative_config={'method': 'custom_class', "
                f"'model': '{ChainProposer.__module__}.{ChainProposer.__qualname__}', 'num_speculative_tokens': T}}"
            )
        install_token_ranks()
        proposer.attach(runner)
        runner.sampler = KeyedSampler(runner.sampler, proposer.request_sampling)
        counters = proposer.rounds.stats_of_rounds.counters
        meaning = load_meaning(proposer.settings, runner.model_config.tokenizer, counters)
        runner.rejection_sampler = AcceptanceSampler(runner.sampler, meaning)
        # vLLM would stop drafting for the whole batch once one sequence nears the context's end; the proposer looks at each.
        runner.effective_drafter_max_model_len = 1 << 30
        self._proposer = proposer
        self._keys = KeyPair.new()
        self._cores = LentCores(proposer.settings.own_threads)
        hidden: HiddenStates | None = None
        # every tensor-parallel rank has the whole hidden state; of pipeline stages only the last, which talks to no draft
        if proposer.settings.hidden and self.rank == 0 and runner.parallel_config.pipeline_parallel_size == 1:  # type: ignore[attr-defined]
            hidden = HiddenStates(runner.model_config.get_hidden_size(), proposer.rounds.takes_hidden, proposer.faults)
            hidden.install(runner)
        proposer.rounds.send_hidden(hidden)
        self._kv = KvLink(runner, proposer.settings, proposer.faults, hidden)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        ended = set(scheduler_output.finished_req_ids)
        if ended:
            self._proposer.finish(ended)
        if scheduler_output.scheduled_new_reqs:
            self._proposer.announce(scheduler_output.scheduled_new_reqs)
        if scheduler_output.total_num_scheduled_tokens == 0:
            self._proposer.rounds.flush()
        else:
            self._proposer.rounds.step_begins(_only_decodes(scheduler_output))
            self._cores.use(all_of_them=not self._proposer.rounds.lends)
        return super().execute_model(scheduler_output)  # type: ignore[misc, no-any-return]

    def shutdown(self) -> None:
        proposer = getattr(self, "_proposer", None)
        if proposer is not None:
            proposer.rounds.close()
            self._kv.close()
        super().shutdown()  # type: ignore[misc]

    # --- control calls --------------------------------------------------------------------------------------------

    def client_key(self) -> str:
        """CURVE public key (z85) that a draft must authorise before it hears from this target."""
        return self._keys.public

    def kv_offer(self) -> dict[str, Any] | None:
        """What a draft must know to decide whether it takes this engine's KV or hidden states; see :meth:`KvLink.offer`."""
        return self._kv.offer()

    def connect_drafts(self, endpoints: list[dict[str, Any]]) -> list[str]:
        """Make ``endpoints`` the complete set of drafts; returns the names now connected.

        A draft whose name, address and key did not change keeps its socket and its sessions.
        """
        rounds = self._proposer.rounds
        if self.rank != 0:  # type: ignore[attr-defined]
            return []
        wanted = {e.name: e for e in (msgspec.convert(item, Endpoint) for item in endpoints)}
        current = rounds.channels
        channels: dict[str, Any] = {}
        for name, endpoint in wanted.items():
            known = current.get(name)
            if getattr(known, "endpoint", None) == endpoint:
                channels[name] = known
            else:
                channels[name] = connect(endpoint, self._keys, self._proposer.faults)
        rounds.set_channels(channels)
        self._kv.connect(endpoints)
        rounds.send_kv(self._kv.export)
        rounds.controller.lends = self._proposer.settings.own_threads > 0 and (not channels or rounds.drafts_beside)
        return sorted(channels)

    def take_trace(self, chain_id: str) -> dict[str, Any] | None:
        """Rounds and totals of one request by its ``chain.id``; None when unknown or already taken."""
        return self._proposer.rounds.take_trace(chain_id)

    def draft_stats(self) -> dict[str, float]:
        """Counters of drafting, verifying and dropping since start or the last reset."""
        return self._proposer.rounds.stats()

    def reset_draft_stats(self) -> None:
        self._proposer.rounds.reset_stats()

    def forget_outputs(self) -> None:
        """Drop the outputs of earlier requests that later ones could be drafted from (benchmarks, operators)."""
        self._proposer.rounds.forget_outputs()

    def set_channels(self, channels: dict[str, Any]) -> None:
        """In-process only: install channel objects directly (tests, experiments)."""
        self._proposer.rounds.set_channels(channels)


def _only_decodes(scheduled: Any) -> bool:
    """Every scheduled sequence computes one token and what was drafted for it: no prompt is being read."""
    drafted = scheduled.scheduled_spec_decode_tokens
    return not scheduled.scheduled_new_reqs and all(
        count == 1 + len(drafted.get(request, ())) for request, count in scheduled.num_scheduled_tokens.items()
    )


class GpuTargetWorker(ChainWorker, VllmGpuWorker):
    """For CUDA and ROCm."""


if VllmCpuWorker is not None:

    class CpuTargetWorker(ChainWorker, VllmCpuWorker):
        """For machines without a GPU."""
