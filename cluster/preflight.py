"""Has the cluster what the pools ask for? The table of pools; Ray is asked only for the snapshot of its nodes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.pools import Node, Wish, matches, plan, spell


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the table."""

    pool: str
    holds: str  # deployments and how many replicas of each
    wants: str
    has: str
    missing: str  # empty: all there
    note: str = ""  # what is there, but not made sure of


def check(wishes: Sequence[Wish], nodes: Iterable[Node]) -> list[Verdict]:
    """One row for each wish, in order; see :func:`cluster.pools.plan`."""
    all_nodes = list(nodes)
    planned = plan(wishes, all_nodes)
    lacks = {lack.pool: lack.what for lack in planned.lacks}
    notes = {note.pool: note.what for note in planned.notes}
    return [
        Verdict(
            wish.pool,
            wish.holds,
            spell(_total(wish), wish.labels),
            _has(wish, all_nodes),
            lacks.get(wish.pool, ""),
            notes.get(wish.pool, ""),
        )
        for wish in wishes
    ]


def _total(wish: Wish) -> dict[str, float]:
    names = {name for bundle in wish.bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in wish.bundles) for name in names}


def _has(wish: Wish, nodes: Sequence[Node]) -> str:
    matching = [node for node in nodes if matches(wish.labels, node.labels)]
    if wish.labels and not matching:
        return "no node with these labels"
    has = {name: sum(node.resources.get(name, 0.0) for node in matching) for name in _total(wish)}
    return f"{spell(has)} on {len(matching)} node{'s' if len(matching) != 1 else ''}"


def snapshot() -> list[Node]:
    """The nodes of the cluster this process is connected to."""
    import ray

    return [
        Node(
            {k: v for k, v in node["Resources"].items() if not k.startswith("node:")},
            node.get("Labels", {}),
            str(node.get("NodeManagerAddress", "")),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
