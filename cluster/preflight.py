"""Has the cluster what the pools ask for? A pure check over a snapshot of its nodes; Ray is asked only at the edge."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Node:
    """What one node offers in all, used or not."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wish:
    """What one pool must hold: bundles that each need one node."""

    pool: str
    labels: Mapping[str, str]
    bundles: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the table."""

    pool: str
    wants: str
    has: str
    missing: str  # empty: all there


def check(wishes: Sequence[Wish], nodes: Iterable[Node]) -> list[Verdict]:
    """Place every bundle on the first node with room, largest first; say what finds no place.

    Pools share nodes, so they are placed against the same room.
    """
    all_nodes = list(nodes)
    room = [dict(node.resources) for node in all_nodes]
    verdicts = []
    for wish in wishes:
        matching = [index for index, node in enumerate(all_nodes) if matches(wish.labels, node.labels)]
        unplaced: list[Mapping[str, float]] = []
        for bundle in sorted(wish.bundles, key=lambda item: -sum(item.values())):
            place = next((index for index in matching if fits(bundle, room[index])), None)
            if place is None:
                unplaced.append(bundle)
                continue
            for name, amount in bundle.items():
                room[place][name] -= amount
        names = {name for bundle in wish.bundles for name in bundle}
        has = {name: sum(all_nodes[index].resources.get(name, 0) for index in matching) for name in sorted(names)}
        wants = _total(wish.bundles)
        verdicts.append(
            Verdict(
                wish.pool, _spell(wants, wish.labels), _has(has, matching, wish), _missing(unplaced, wish, matching)
            )
        )
    return verdicts


def matches(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Ray's label selectors: ``value``, ``!value``, ``in(a, b)`` and ``!in(a, b)``."""
    for key, selector in wanted.items():
        negated = selector.startswith("!")
        text = selector[1:] if negated else selector
        values = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
        if (labels.get(key) in [value.strip() for value in values]) == negated:
            return False
    return True


def fits(bundle: Mapping[str, float], room: Mapping[str, float]) -> bool:
    """Is there room for the bundle?"""
    return all(room.get(name, 0.0) >= amount - 1e-9 for name, amount in bundle.items())


def _total(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _spell(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    parts = [f"{name} {amount:g}" for name, amount in sorted(resources.items())]
    return ", ".join(parts + [f"{key}={value}" for key, value in sorted(labels.items())]) or "nothing"


def _has(has: Mapping[str, float], matching: Sequence[int], wish: Wish) -> str:
    if wish.labels and not matching:
        return "no node with these labels"
    return _spell(has, {}) + f" on {len(matching)} node{'s' if len(matching) != 1 else ''}"


def _missing(unplaced: Sequence[Mapping[str, float]], wish: Wish, matching: Sequence[int]) -> str:
    if not unplaced:
        return ""
    if wish.labels and not matching:
        return ", ".join(f"{key}={value}" for key, value in sorted(wish.labels.items()))
    return f"{_spell(_total(unplaced), {})} ({len(unplaced)} of {len(wish.bundles)} replicas or ranks find no node)"


def snapshot() -> list[Node]:
    """The nodes of the cluster this process is connected to."""
    import ray

    return [
        Node({k: v for k, v in node["Resources"].items() if not k.startswith("node:")}, node.get("Labels", {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
