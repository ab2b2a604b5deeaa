"""What a configuration asks of the cluster, pool by pool."""

from cluster.preflight import Verdict, Wish
from deployments.config.models import AppConfig
from deployments.target.engine_args import replica_bundles


def wishes(config: AppConfig) -> list[Wish]:
    """One wish for each pool that something is placed on."""
    bundles: dict[str, list[dict[str, float]]] = {}
    bundles[config.target.pool] = replica_bundles(config) * config.target.replicas
    for draft in config.drafts:
        bundles.setdefault(draft.pool, []).extend([config.pools[draft.pool].wants()] * draft.replicas)
    if config.evidence is not None:
        bundles.setdefault(config.evidence.pool, []).append(config.pools[config.evidence.pool].wants())
    return [Wish(name, config.pools[name].labels, tuple(wanted)) for name, wanted in bundles.items() if wanted]


def placement_problems(verdicts: list[Verdict]) -> list[str]:
    """A sentence for each pool that the cluster cannot hold."""
    return [
        f"pool {verdict.pool!r} wants {verdict.wants}; the cluster has {verdict.has}; missing: {verdict.missing}"
        for verdict in verdicts
        if verdict.missing
    ]
