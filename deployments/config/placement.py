"""Where replicas of each pool may run: the pools' own rules, and the one that keeps drafts off the target's hardware."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster.pools import Rules, disjoint, selectors

if TYPE_CHECKING:
    from deployments.config.models import AppConfig, Pool


def pool_rules(config: "AppConfig") -> dict[str, Rules]:
    """Each pool's rules. Pools of drafts are apart from a target's with GPUs, unless told to be beside or near it."""
    target = config.target.pool
    guarded = {
        draft.pool
        for draft in config.drafts
        if config.pools[target].gpus and not allowed(config.pools, draft.pool, target)
    }
    return {
        name: Rules(pool.labels, pool.near, frozenset({*pool.apart, *({target} if name in guarded else ())}))
        for name, pool in config.pools.items()
    }


def allowed(pools: Mapping[str, "Pool"], draft: str, target: str) -> bool:
    """May drafts of a pool run on the target's hardware?"""
    return draft == target or pools[draft].beside_target or pools[draft].near == target


def pool_selectors(config: "AppConfig") -> dict[str, dict[str, str]]:
    """The label selector of each pool's replicas; ValueError for rules that cannot hold."""
    return selectors(pool_rules(config))


def told_apart(config: "AppConfig", draft: str) -> bool:
    """Is there anything that can keep a pool of drafts off the target's nodes? That those nodes lack it, the plan checks."""
    ours, theirs = config.pools[draft], config.pools[config.target.pool]
    if set(ours.resources) - set(theirs.resources) or set(ours.labels) - set(theirs.labels):
        return True
    selector = pool_selectors(config)
    return disjoint(selector[draft], selector[config.target.pool])
