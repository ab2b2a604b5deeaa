"""What a configuration asks of the cluster, pool by pool."""

from cluster.pools import Wish
from cluster.preflight import Verdict
from deployments.config.autoscaling import Scaling
from deployments.config.models import AppConfig
from deployments.config.placement import pool_rules, pool_selectors
from deployments.target.engine_args import replica_bundles


def wishes(config: AppConfig) -> list[Wish]:
    """One wish for each pool that something is placed on; of what scales, the replicas it starts with."""
    bundles: dict[str, list[dict[str, float]]] = {}
    holds: dict[str, list[str]] = {}

    def add(pool: str, what: str, wanted: list[dict[str, float]], replicas: int, scaling: Scaling | None) -> None:
        if replicas:
            bundles.setdefault(pool, []).extend(wanted * replicas)
            most = f", at most {scaling.max_replicas}" if scaling is not None else ""
            holds.setdefault(pool, []).append(f"{what} x{replicas}{most}")

    add(config.target.pool, "target", replica_bundles(config), config.target.replicas, config.autoscaling.target)
    for draft in config.drafts:
        wanted = [config.pools[draft.pool].wants()]
        scaling = config.autoscaling.drafts.get(draft.name)
        add(draft.pool, f"draft {draft.name} ({draft.provider})", wanted, draft.replicas, scaling)
    if config.evidence is not None:
        add(
            config.evidence.pool,
            "evidence",
            [config.pools[config.evidence.pool].wants()],
            1,
            config.autoscaling.evidence,
        )
    rules, selectors = pool_rules(config), pool_selectors(config)
    return [
        Wish(name, selectors[name], tuple(wanted), rules[name].near, rules[name].apart, ", ".join(holds[name]))
        for name, wanted in bundles.items()
    ]


def placement_problems(verdicts: list[Verdict]) -> list[str]:
    """A sentence for each pool that the cluster cannot hold."""
    return [
        f"pool {verdict.pool!r} wants {verdict.wants}; the cluster has {verdict.has}; missing: {verdict.missing}"
        for verdict in verdicts
        if verdict.missing
    ]
