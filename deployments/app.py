"""Composition root: from the Serve config's ``args`` to the application. ``import_path: deployments.app:build``."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment

from deployments.config import AppConfig, ConfigError, DraftSpec, load_args
from deployments.config.autoscaling import RequestScaling, Scaling
from deployments.config.conditioned import require_own_target
from deployments.config.placement import pool_selectors
from deployments.config.tokenizers import require_same_tokenizer
from deployments.draft.deployment import DraftDeployment
from deployments.evidence.build import evidence_problems
from deployments.evidence.deployment import EvidenceDeployment
from deployments.names import EVIDENCE, ROUTER, draft_name
from deployments.router.router import ingress_class
from deployments.target.autoscaled import AutoscaledTarget
from deployments.target.engine_args import engine_kwargs, on_cpu, placement, runtime_env
from deployments.target.local_model import LocalModel
from deployments.target.server import TargetServer
from hw.onnx.checkpoint import conditioned_facts


def build(args: Mapping[str, Any]) -> Application:
    """Build the application, or raise :class:`~deployments.config.ConfigError` naming everything that is wrong."""
    config = load_args(args)
    require_same_tokenizer(config)
    require_own_target(config)
    drafts = {draft.name: build_draft(config, draft) for draft in config.drafts if draft.replicas}
    return build_router(config, build_target(config, drafts), drafts, build_evidence(config))


def actor_options(config: AppConfig, pool_name: str) -> dict[str, Any]:
    """Ray actor options of a replica on a pool; only what the pool asks for is named."""
    pool = config.pools[pool_name]
    options: dict[str, Any] = {"num_cpus": pool.cpus}
    if pool.gpus:
        options["num_gpus"] = pool.gpus
    if pool.resources:
        options["resources"] = dict(pool.resources)
    if selector := pool_selectors(config)[pool_name]:
        options["label_selector"] = selector
    if pool.runtime_env:
        options["runtime_env"] = dict(pool.runtime_env)
    return options


def replica_count(replicas: int, scaling: Scaling | None) -> dict[str, Any]:
    """Serve's options for how many replicas a deployment has: a number, or the one it starts with and what changes it."""
    return {"num_replicas": replicas} if scaling is None else {"autoscaling_config": scaling.serve_config(replicas)}


def drain_s(config: AppConfig, scaling: RequestScaling | None) -> float:
    """How long an ending replica may go on answering. One that ends because the load fell must not cut answers short."""
    return config.fault_policy.drain_timeout_s if scaling is None else scaling.drain_s


def build_draft(config: AppConfig, draft: DraftSpec) -> Application:
    """One draft deployment."""
    faults = config.fault_policy
    deployment = serve.deployment(
        DraftDeployment,
        name=draft_name(draft.name),
        **replica_count(draft.replicas, config.autoscaling.drafts.get(draft.name)),
        # calls that write answers last; those beyond what may wait are refused there, and control calls come through
        max_ongoing_requests=4 * draft.answers_waiting,
        ray_actor_options=actor_options(config, draft.pool),
        health_check_period_s=faults.discovery_timeout_s,
        health_check_timeout_s=faults.rpc_timeout_s,
        graceful_shutdown_timeout_s=faults.drain_timeout_s,
        logging_config={"enable_access_log": False},  # discovery asks every replica once a second
    )
    return deployment.bind(draft.model_dump(mode="json"), asdict(faults), vocab_size(config))


def build_evidence(config: AppConfig) -> Application | None:
    """The deployment that drafts and checks answers without a model; None where none is configured.

    Raises :class:`~deployments.config.ConfigError` naming every path that is not there and every rule that is wrong.
    """
    spec, faults = config.evidence, config.fault_policy
    if spec is None:
        return None
    problems = evidence_problems(config)
    if problems:
        raise ConfigError(problems)
    deployment = serve.deployment(
        EvidenceDeployment,
        name=EVIDENCE,
        **replica_count(1, config.autoscaling.evidence),  # one where it has an index, whose only writer it is
        max_ongoing_requests=config.limits.router_max_ongoing_requests,
        ray_actor_options=actor_options(config, spec.pool),
        health_check_period_s=faults.discovery_timeout_s,
        health_check_timeout_s=faults.rpc_timeout_s,
        graceful_shutdown_timeout_s=drain_s(config, config.autoscaling.evidence),
        logging_config={"enable_access_log": False},  # the router's says which requests there were
    )
    return deployment.bind(spec.model_dump(mode="json"), asdict(faults), str(config.target.model))


def vocab_size(config: AppConfig) -> int:
    """Of the target's checkpoint, padding included."""
    checkpoint = json.loads((config.target.model / "config.json").read_text())
    return int(checkpoint.get("text_config", checkpoint)["vocab_size"])


def llm_config(config: AppConfig) -> LLMConfig:
    """The target in ``ray.serve.llm``'s terms."""
    target = config.target
    options = actor_options(config, target.pool)
    # replicas run in a placement group: its bundles carry resources and labels, the actor itself only needs CPUs
    deployment: dict[str, Any] = {
        **replica_count(target.replicas, config.autoscaling.target),
        "max_ongoing_requests": config.limits.max_ongoing_requests,
        "max_queued_requests": config.limits.max_queued_requests,
        "ray_actor_options": {"num_cpus": options["num_cpus"]},
        "graceful_shutdown_timeout_s": drain_s(config, config.autoscaling.target),
    }
    if selector := pool_selectors(config)[target.pool]:
        deployment["placement_group_bundle_label_selector"] = [selector]
    return LLMConfig(
        model_loading_config={"model_id": target.name, "model_source": str(target.model)},
        accelerator_config={"kind": "cpu" if on_cpu(config) else "gpu"},
        placement_group_config=placement(config),
        engine_kwargs=engine_kwargs(config),
        runtime_env=runtime_env(config),
        deployment_config=deployment,
        callback_config={"callback_class": LocalModel},
        experimental_configs={"stream_batching_interval_ms": 0},  # each token leaves as soon as it exists
    )


def build_target(config: AppConfig, drafts: dict[str, Application]) -> dict[str, Any]:
    """The target deployment and its model card."""
    llm = llm_config(config)
    wakes = [name for name, section in config.autoscaling.drafts.items() if name in drafts and not section.min_replicas]
    scaling = AutoscaledTarget if wakes or config.autoscaling.target is not None else None
    application = build_llm_deployment(
        llm,
        name_prefix="Target:",
        deployment_cls=scaling or TargetServer,
        bind_kwargs={"drafts": drafts, "faults": asdict(config.fault_policy), **({"wakes": wakes} if scaling else {})},
    )
    return {"application": application, "card": to_model_metadata(llm.model_id, llm)}


def max_model_len(config: AppConfig) -> int:
    """Most tokens of prompt and answer together."""
    checkpoint = json.loads((config.target.model / "config.json").read_text())
    longest = checkpoint.get("text_config", checkpoint).get("max_position_embeddings")
    return int(config.target.max_model_len or longest or sys.maxsize)


def evidence_sources(config: AppConfig) -> list[str]:
    """By the names that requests use."""
    spec = config.evidence
    if spec is None:
        return []
    there = {"retrieval": spec.retrieval, "rules": spec.rules is not None, "templates": spec.templates}
    return [name for name, configured in there.items() if configured]


def build_router(
    config: AppConfig, target: dict[str, Any], drafts: dict[str, Application], evidence: Application | None
) -> Application:
    """The ingress; ``drafts`` and ``evidence`` are asked for whole answers, which only drafts that need no target can write."""
    writers = {draft.name for draft in config.drafts if conditioned_facts(draft.model) is None}
    generation = config.target.model / "generation_config.json"
    defaults = json.loads(generation.read_text()) if generation.is_file() else {}
    settings = {
        "chain_enabled": config.chain.enabled,
        "trace_allowed": config.chain.trace,
        "default_min_p": defaults.get("min_p") or 0.0,
        "vocab_size": vocab_size(config),
        "priorities": config.target.engine_kwargs.get("scheduling_policy") == "priority",
        "retry_after_s": config.limits.retry_after_s,
        "drain_timeout_s": config.fault_policy.drain_timeout_s,
        "sources": [*(["model"] if any(draft.replicas for draft in config.drafts) else []), *config.chain.sources],
        "tenant_header": config.chain.tenants.header,
        "share_anonymous": config.chain.tenants.share_anonymous,
        "presets": config.chain.presets,
        "allow_lossy": config.chain.allow_lossy,
        "semantic": config.chain.semantic is not None,
        "answer": config.answer.model_dump(mode="json"),
        "evidence": evidence_sources(config),
        "validators": config.evidence.validators.configured if config.evidence is not None else {},
        "learns": config.evidence is not None and (config.evidence.history or config.evidence.templates),
        "faults": asdict(config.fault_policy),
        "target_model": str(config.target.model),
        "max_model_len": max_model_len(config),
        "default_temperature": 1.0 if defaults.get("temperature") is None else defaults["temperature"],
    }
    deployment = serve.deployment(
        ingress_class(config.limits.retry_after_s),
        name=ROUTER,
        **replica_count(config.limits.router_replicas, config.autoscaling.router),
        max_ongoing_requests=config.limits.router_max_ongoing_requests,
        # where it does not scale, Serve's own
        **({"graceful_shutdown_timeout_s": scaling.drain_s} if (scaling := config.autoscaling.router) else {}),
        ray_actor_options={"num_cpus": 0},  # it waits far more than it computes
    )
    name = config.target.name
    return deployment.bind(
        llm_deployments={name: target["application"]},
        model_cards={name: target["card"]},
        settings=settings,
        drafts={name: application for name, application in drafts.items() if name in writers},
        evidence=evidence,
    )
