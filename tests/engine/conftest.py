"""A real vLLM engine in this process: float32, so that equality with plain decoding is exact."""

import os
import time

# Before vLLM is imported anywhere.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.models import model

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

DRAFT_TOKENS = 4


def engine_arguments(**more: Any) -> dict[str, Any]:
    return {
        "model": str(model("target")),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "seed": 0,
        "worker_cls": "deployments.target.worker.CpuTargetWorker",
        "speculative_config": {
            "method": "custom_class",
            "model": "deployments.target.proposer.ChainProposer",
            "num_speculative_tokens": DRAFT_TOKENS,
        },
        "additional_config": {
            "chain_adaptive": False,  # tests decide what is verified, not measurements
            "chain_kv_mib": 64,
            "chain_hidden": True,  # kept only where a draft asks
        },
        **more,
    }


class Engine:
    """The engine under test and what tests do with it."""

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm

    def drafts(self, **channels: Any) -> None:
        """Install exactly these channels; counters start anew."""
        self.llm.collective_rpc("set_channels", args=(channels,))
        self.llm.collective_rpc("reset_draft_stats")

    def stats(self) -> dict[str, float]:
        return self.llm.collective_rpc("draft_stats")[0]

    def generate(self, prompts: list[str], params: "SamplingParams | list[SamplingParams]") -> list[Any]:
        return self.llm.generate(prompts, params, use_tqdm=False)

    def kv(self) -> Any:
        """The engine's :class:`deployments.target.kv_link.KvLink`, its offer made."""
        worker = self.llm.llm_engine.model_executor.driver_worker
        link = getattr(worker, "worker", worker)._kv
        while link.offer() is None:
            time.sleep(0.05)
        return link

    def takes_hidden(self, *drafts: str) -> Any:
        """Have these channels be of drafts that take hidden states; the engine's :class:`deployments.target.hidden_states.HiddenStates`."""
        hidden = self.kv()._hidden
        hidden.connect([{"name": draft, "kv": "hidden"} for draft in drafts])
        return hidden

    def rounds(self) -> Any:
        """The engine's :class:`deployments.target.rounds.DraftRounds`."""
        worker = self.llm.llm_engine.model_executor.driver_worker
        return getattr(worker, "worker", worker)._proposer.rounds

    def vocab(self) -> int:
        return self.llm.llm_engine.model_config.get_vocab_size()


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    from vllm import LLM

    from deployments.target import stop_strings

    llm = LLM(**engine_arguments())
    stop_strings.install(llm.llm_engine.output_processor)
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def patient(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, drafts are waited for: for tests of what is drafted, not of when."""
    monkeypatch.setattr(engine.rounds(), "_deadline", lambda sequences: 60.0)


@pytest.fixture(autouse=True)
def _no_drafts_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").drafts()
