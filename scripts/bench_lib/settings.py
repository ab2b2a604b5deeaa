"""How each engine is started: vLLM arguments, environment and cores. The whole comparison is defined here."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Mode = Literal["compiled", "eager"]
# The process beside an engine: the real one, the same without pre-drafting, one that guesses by hash, one that says " the".
DraftKind = Literal["none", "real", "sync", "wrong", "the"]

MAX_MODEL_LEN = 2048
MAX_BATCH = 32
KV_CACHE_BYTES = 512 << 20  # 32 sequences of 700 tokens of the default model; vLLM touches all of it at start

# vLLM's own modes. ngram: n-grams of 2 to 4 tokens find the continuation, 4 tokens are proposed. suffix: the values vLLM
# has by default (tree depth 24, factor 1.0, probability 0.1).
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix"}

CHAIN_TOKENS = 24  # most draft tokens a round whatever the source: guesses that cost nothing to make may be long
CHAIN_KV_MIB = 256  # shared memory for KV on its way to the draft
CHAIN_SOURCES = ["suffix"]  # sources inside the target; the draft process comes on top
_CHAIN_DRAFTS: dict[str, DraftKind] = {
    "chain": "real",
    "chain_sync": "sync",
    "chain_no_kv": "real",
    "wrong_draft": "wrong",
    "always_the": "the",
}

WORKER = "deployments.target.worker.CpuTargetWorker"
PROPOSER = "deployments.target.proposer.ChainProposer"


@dataclass(frozen=True)
class Cores:
    """Who runs where. ``all`` is what a plain engine and the chain's target get; the draft works on its one core of them.

    ``target`` is what the chain's target keeps while the draft works.
    """

    all: tuple[int, ...]
    target: tuple[int, ...]
    draft: int

    @classmethod
    def split(cls, usable: set[int]) -> "Cores":
        """The last core drafts, the others verify; one core does both."""
        ordered = tuple(sorted(usable))
        return cls(ordered, ordered[:-1] or ordered, ordered[-1])


@dataclass(frozen=True)
class ChainBounds:
    """How much the chain drafts."""

    tokens: int = CHAIN_TOKENS  # most draft tokens a round, from any source
    model_tokens: int = 2  # most of them that the draft model makes
    max_batch: int = 0  # drafts for at most so many sequences at once; 0: any number


@dataclass(frozen=True)
class EngineSettings:
    """One engine process: what ``vllm.LLM`` is given, and the draft beside it."""

    name: str
    cores: tuple[int, ...]
    arguments: dict[str, Any]
    draft: DraftKind = "none"
    draft_options: tuple[str, ...] = ()  # further arguments of the real draft's process

    @property
    def mode(self) -> Mode:
        return "eager" if self.arguments["enforce_eager"] else "compiled"


def engine_settings(name: str, target: Path, cores: Cores, mode: Mode, bounds: ChainBounds) -> EngineSettings:
    """Settings of the engine ``name``; ``mode`` is for vLLM's own on all cores, ``bounds`` for the chain.

    The chain's target has a thread on every core and gives the draft's core up while the draft works.
    """
    common: dict[str, Any] = {
        "model": str(target),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_BATCH,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enforce_eager": mode == "eager",
        "seed": 0,
    }
    speculative = {"per_request_spec_decode_metrics": "summary"}
    if name == "plain":
        return EngineSettings(name, cores.all, common)
    if name == "plain_target_core":
        return EngineSettings(name, cores.target, common | {"enforce_eager": True})
    if name in ("ngram", "suffix"):
        config = NGRAM if name == "ngram" else SUFFIX
        return EngineSettings(name, cores.all, common | speculative | {"speculative_config": config})
    if name in _CHAIN_DRAFTS:
        chain = {
            "enforce_eager": True,
            "worker_cls": WORKER,
            "additional_config": {
                "chain_max_batch": bounds.max_batch,
                "chain_own_threads": len(cores.target),
                "chain_sources": CHAIN_SOURCES,
                "chain_model_tokens": bounds.model_tokens,
                "chain_kv_mib": 0 if name == "chain_no_kv" else CHAIN_KV_MIB,
                "chain_hidden": True,  # sent to a draft that asks
            },
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": bounds.tokens,
            },
        }
        return EngineSettings(name, cores.all, common | speculative | chain, _CHAIN_DRAFTS[name])
    raise ValueError(f"no engine {name!r}")


def engine_environment(cores: tuple[int, ...], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What vLLM's own multi-process executor would set, for an engine inside one process."""
    listed = ",".join(map(str, cores))
    return {
        **common_environment(environ),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def draft_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A draft needs no OpenMP settings of the target's."""
    return {**common_environment(environ), "OMP_NUM_THREADS": "1"}


def common_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Offline, quiet, and with the libraries vLLM wants preloaded."""
    return {
        "LD_PRELOAD": environ.get("LD_PRELOAD") or preload(),
        "VLLM_LOGGING_LEVEL": environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def preload() -> str:
    """Intel's OpenMP from this environment and tcmalloc where the system has it."""
    found = [Path(sys.prefix) / "lib" / "libiomp5.so"]
    for folder in (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64")):
        found += sorted(folder.glob("libtcmalloc_minimal.so.4*"))[:1]
    return ":".join(str(path) for path in found if path.exists())
