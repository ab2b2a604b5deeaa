"""What the target's engine is started with: vLLM arguments, environment, and the Ray placement of its replica."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deployments.config.models import AppConfig
from deployments.target.settings import ChainSettings
from hw.onnx.checkpoint import conditioned_facts

GIB = 1 << 30
CPU_WORKER = "deployments.target.worker.CpuTargetWorker"
GPU_WORKER = "deployments.target.worker.GpuTargetWorker"
PROPOSER = "deployments.target.proposer.ChainProposer"


def on_cpu(config: AppConfig) -> bool:
    """A pool without GPUs serves the target on CPUs."""
    return not config.pools[config.target.pool].gpus


def engine_kwargs(config: AppConfig) -> dict[str, Any]:
    """vLLM arguments; what the user passes through comes first, what the chain needs comes last."""
    target = config.target
    kwargs: dict[str, Any] = dict(target.engine_kwargs)
    # per-request acceptance figures in `metrics.speculative_decoding` of the response and of the usage chunk
    kwargs.setdefault("per_request_spec_decode_metrics", "summary")
    kwargs.setdefault("enable_per_request_metrics", True)
    kwargs |= {
        "dtype": target.dtype,
        "max_num_seqs": target.max_num_seqs,
        "tensor_parallel_size": target.tensor_parallel_size,
        "enforce_eager": target.eager,
        "worker_cls": CPU_WORKER if on_cpu(config) else GPU_WORKER,
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": config.draft_tokens,
        },
        "additional_config": chain_settings(config).as_config(),
    }
    if target.max_model_len is not None:
        kwargs["max_model_len"] = target.max_model_len
    if target.kv_cache_gib is not None:
        kwargs["kv_cache_memory_bytes"] = int(target.kv_cache_gib * GIB)
    return kwargs


def chain_settings(config: AppConfig) -> ChainSettings:
    """What the worker is told about the chain."""
    lent = config.lent_cores
    semantic = config.chain.semantic
    return ChainSettings(
        faults=asdict(config.fault_policy),
        max_batch=config.chain.max_batch or 0,
        model_tokens=max((draft.tokens for draft in config.drafts if draft.replicas), default=0),
        sources=tuple(config.chain.sources),
        adaptive=config.chain.adaptive,
        kv_mib=config.kv.memory_mib if config.kv.enabled else 0,
        hidden=any(conditioned_facts(draft.model) is not None for draft in config.drafts if draft.replicas),
        kv_refresh=config.kv.refresh,
        semantic_model=str(semantic.model) if semantic is not None else "",
        semantic_budget_ms=semantic.budget_ms if semantic is not None else 0.0,
        own_threads=len(config.target.cores or ()) - lent if lent else 0,
    )


def environment(config: AppConfig) -> dict[str, str]:
    """Environment variables of the replica and its engine processes."""
    env: dict[str, str] = {}
    if not on_cpu(config):
        return env
    if config.target.cores:
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in config.target.cores)
    if preload := preloaded_libraries():
        env["LD_PRELOAD"] = ":".join(str(library) for library in preload)
    return env


def preloaded_libraries() -> list[Path]:
    """What vLLM wants loaded first on CPUs, where it is installed.

    Its kernels wait in OpenMP barriers, which Intel's runtime does several times faster than GNU's; tcmalloc is the lesser gain.
    """
    found = [Path(sys.prefix) / "lib" / "libiomp5.so"]
    for folder in ("/usr/lib", "/usr/lib64"):
        found += sorted(Path(folder).glob("*-linux-gnu/libtcmalloc_minimal.so.4"))
        found += sorted(Path(folder).glob("libtcmalloc_minimal.so.4"))
    return [library for library in found if library.exists()]


def runtime_env(config: AppConfig) -> dict[str, Any]:
    """The pool's runtime_env with the engine's environment; the pool's own variables win."""
    env = dict(config.pools[config.target.pool].runtime_env)
    env["env_vars"] = {**environment(config), **env.get("env_vars", {})}
    return env


def placement(config: AppConfig) -> dict[str, Any]:
    """``placement_group_config`` of the LLM deployment, on top of which comes the replica's own CPU request.

    On CPUs the engine's workers are child processes of the replica, so one bundle holds all of them.
    """
    pool = config.pools[config.target.pool]
    if on_cpu(config):
        return {"bundles": [{"CPU": 0, **pool.resources}]}
    return {"bundle_per_worker": {"GPU": pool.gpus, **pool.resources}}


def replica_bundles(config: AppConfig) -> list[dict[str, float]]:
    """What one target replica asks of the cluster, bundle by bundle (for preflight checks)."""
    pool = config.pools[config.target.pool]
    if on_cpu(config):
        return [pool.wants()]
    rest = {name: amount for name, amount in pool.wants().items() if name != "CPU"}
    return [pool.wants(), *(rest for _ in range(config.target.tensor_parallel_size - 1))]
