"""Which node holds what: pools, their label selectors, and a plan over a snapshot of the cluster. Pure; Ray is not asked.

Ray places replicas itself, from resources and label selectors. So a rule that must hold is put into selectors
(:func:`selectors`), and :func:`plan` says beforehand whether the cluster can hold everything, and if not, what is missing.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

EPSILON = 1e-9  # Ray counts resources in ten-thousandths
ACCELERATORS = frozenset(
    {"GPU", "NPU", "HPU", "TPU", "neuron_cores", "RBLN", "FURIOSA", "MBLT", "TTNPU"}
)  # as Ray knows


@dataclass(frozen=True, slots=True)
class Node:
    """What one node offers in all, used or not."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """Where replicas of a pool may run."""

    labels: Mapping[str, str] = field(default_factory=dict)
    near: str | None = None  # a pool: on the same kind of node
    apart: frozenset[str] = frozenset()  # pools: never on a node that could hold these


@dataclass(frozen=True, slots=True)
class Wish:
    """What one pool must hold: bundles that each need one node."""

    pool: str
    labels: Mapping[str, str]  # the selector, co-location rules included
    bundles: tuple[Mapping[str, float], ...]
    near: str | None = None
    apart: frozenset[str] = frozenset()
    holds: str = ""  # what is placed on it, for people


@dataclass(frozen=True, slots=True)
class Placement:
    """One bundle on one node."""

    pool: str
    bundle: Mapping[str, float]
    node: int


@dataclass(frozen=True, slots=True)
class Lack:
    """What a pool is missing, or (a note) what its rules do not make sure of."""

    pool: str
    what: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All placements there is room for; everything has its place iff there are no lacks."""

    placements: tuple[Placement, ...]
    lacks: tuple[Lack, ...]
    notes: tuple[Lack, ...] = ()


# --- label selectors --------------------------------------------------------------------------------------------------


def matches(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Ray's label selectors: ``value``, ``!value``, ``in(a, b)`` and ``!in(a, b)``."""
    for key, selector in wanted.items():
        negated, values = _parse(selector)
        if (labels.get(key) in values) == negated:
            return False
    return True


def _parse(selector: str) -> tuple[bool, frozenset[str]]:
    negated = selector.startswith("!")
    text = selector[1:] if negated else selector
    values = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return negated, frozenset(value.strip() for value in values)


def disjoint(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Can no node match both selectors?"""
    for key in one.keys() & other.keys():
        (negated, values), (other_negated, other_values) = _parse(one[key]), _parse(other[key])
        if not negated and not other_negated and not values & other_values:
            return True
        if negated != other_negated and (other_values <= values if negated else values <= other_values):
            return True
    return False


def selectors(pools: Mapping[str, Rules]) -> dict[str, dict[str, str]]:
    """Each pool's label selector with its co-location rules written out, which is all that Ray gets to see of them.

    ``near`` takes over the other pool's selector. Another deployment cannot join a replica's placement group, and node
    ids chosen at deploy time would tie replicas to nodes that get replaced; labels outlive nodes. ``apart`` excludes one
    label of the other pool, unless no node can match both anyway.

    Raises:
        ValueError: a rule names no pool, goes in a circle, contradicts itself or a label, or has no label to go by.
    """
    for name, rules in pools.items():
        for other in (*filter(None, [rules.near]), *sorted(rules.apart)):
            if other not in pools:
                raise ValueError(f"{name}: no pool {other!r}; pools: {', '.join(sorted(pools))}")
            if other == name:
                raise ValueError(f"{name}: near and apart name other pools, not the pool itself")
        if rules.near in rules.apart:
            raise ValueError(f"{name}: both near {rules.near} and apart from it")
    found: dict[str, dict[str, str]] = {}
    for name in pools:
        _near(name, pools, found, ())
    return {name: _apart(name, rules.apart, found) for name, rules in pools.items()}


def _near(
    name: str, pools: Mapping[str, Rules], found: dict[str, dict[str, str]], above: tuple[str, ...]
) -> dict[str, str]:
    if name in above:
        raise ValueError(f"{name}: near goes in a circle: {' -> '.join((*above, name))}")
    if name not in found:
        rules = pools[name]
        selector = dict(rules.labels)
        if rules.near is not None:
            theirs = _near(rules.near, pools, found, (*above, name))
            if not theirs:
                raise ValueError(
                    f"{name}: near {rules.near}, whose nodes have no label to find them by; give it labels"
                )
            for key, value in theirs.items():
                if selector.setdefault(key, value) != value:
                    raise ValueError(
                        f"{name}: near {rules.near} needs {key}={value}, its own labels say {selector[key]}"
                    )
        found[name] = selector
    return found[name]


def _apart(name: str, others: Iterable[str], found: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    selector = dict(found[name])
    for other in sorted(others):
        if disjoint(selector, found[other]):
            continue
        plain = [(key, value) for key, value in sorted(found[other].items()) if value[0] != "!" and value[:3] != "in("]
        free = [(key, value) for key, value in plain if key not in selector]
        if free:
            key, value = free[0]
            selector[key] = f"!{value}"
        elif plain:  # one selector a key: there is no way to say both
            raise ValueError(f"{name}: apart from {other}, but both ask for the same labels; give one another label")
    return selector


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(wishes: Sequence[Wish], nodes: Sequence[Node]) -> Plan:
    """Place every bundle on a node with room, the pools with the fewest choices first; name what finds no place.

    Pools share nodes, so they are placed against the same room. ``near`` places only where the other pool already has
    something, ``apart`` only on nodes that the other pool could not use either: what Ray could do wrong is a lack, too.
    """
    room = [dict(node.resources) for node in nodes]
    candidates = {wish.pool: possible(wish, nodes) for wish in wishes}
    held: dict[str, list[int]] = {wish.pool: [] for wish in wishes}
    placements: list[Placement] = []
    lacks = {wish.pool: _exposed(wish, wishes, candidates, nodes) for wish in wishes}
    for wish in _in_order(wishes, candidates):
        unplaced: list[Mapping[str, float]] = []
        for bundle in sorted(wish.bundles, key=lambda item: (-_accelerators(item), -sum(item.values()))):
            place = _best(wish, bundle, wishes, held, room, nodes)
            if place is None:
                unplaced.append(bundle)
                continue
            held[wish.pool].append(place)
            placements.append(Placement(wish.pool, bundle, place))
            for name, amount in bundle.items():
                room[place][name] -= amount
        if unplaced:
            lacks[wish.pool].insert(0, _missing(unplaced, wish, nodes, held))
    return Plan(
        tuple(placements),
        tuple(Lack(wish.pool, "; ".join(lacks[wish.pool])) for wish in wishes if lacks[wish.pool]),
        tuple(note for wish in wishes if (note := _loose(wish, candidates, held)) is not None),
    )


def fits(bundle: Mapping[str, float], room: Mapping[str, float]) -> bool:
    """Is there room for the bundle?"""
    return all(room.get(name, 0.0) >= amount - EPSILON for name, amount in bundle.items())


def possible(wish: Wish, nodes: Sequence[Node]) -> frozenset[int]:
    """The nodes on which Ray could place a bundle of the wish if they were empty."""
    return frozenset(
        index
        for index, node in enumerate(nodes)
        if matches(wish.labels, node.labels) and any(fits(bundle, node.resources) for bundle in wish.bundles)
    )


def _in_order(wishes: Sequence[Wish], candidates: Mapping[str, frozenset[int]]) -> list[Wish]:
    """The pools that others want to be near before those, else the ones with the fewest choices first."""
    by_choice = sorted(wishes, key=lambda wish: (len(candidates[wish.pool]), -_accelerators(_total(wish.bundles))))
    ordered: list[Wish] = []
    while by_choice:
        done = {wish.pool for wish in ordered} | ({wish.near for wish in wishes if wish.near} - set(candidates))
        ready = next((wish for wish in by_choice if wish.near is None or wish.near in done), by_choice[0])
        by_choice.remove(ready)
        ordered.append(ready)
    return ordered


def _best(
    wish: Wish,
    bundle: Mapping[str, float],
    wishes: Sequence[Wish],
    held: Mapping[str, Sequence[int]],
    room: Sequence[Mapping[str, float]],
    nodes: Sequence[Node],
) -> int | None:
    """The node that loses least: no accelerators it does not need, then the fewest of its own kind, then the least room."""
    foes = wish.apart | {other.pool for other in wishes if wish.pool in other.apart}
    taken = {place for foe in foes for place in held.get(foe, ())}
    choices = [
        index
        for index, node in enumerate(nodes)
        if matches(wish.labels, node.labels)
        and fits(bundle, room[index])
        and index not in taken
        and (wish.near is None or index in held.get(wish.near, ()))
    ]

    def loss(index: int) -> tuple[float, int, float, int]:
        unasked = sum(amount for name, amount in room[index].items() if name in ACCELERATORS and name not in bundle)
        crowd = held[wish.pool].count(index) if wish.near is not None else 0
        return (unasked, crowd, sum(room[index].get(name, 0.0) for name in bundle), index)

    return min(choices, key=loss, default=None)


def _exposed(
    wish: Wish, wishes: Sequence[Wish], candidates: Mapping[str, frozenset[int]], nodes: Sequence[Node]
) -> list[str]:
    """Nodes that a pool and one it must be apart from could both use: nothing would keep Ray from doing so."""
    problems = []
    for other in wishes:
        both = sorted(candidates[wish.pool] & candidates[other.pool])
        if other.pool in wish.apart and both:
            name = nodes[both[0]].name or f"number {both[0]}"
            problems.append(f"nodes apart from pool {other.pool!r}: node {name} fits both, tell them apart by a label")
    return problems


def _loose(wish: Wish, candidates: Mapping[str, frozenset[int]], held: Mapping[str, Sequence[int]]) -> Lack | None:
    """``near`` is by kind of node: where more such nodes exist than hold the other pool, Ray may choose one without it."""
    if wish.near is None or wish.near not in held:
        return None
    spare = candidates[wish.pool] - set(held[wish.near])
    if not spare:
        return None
    return Lack(
        wish.pool,
        f"{len(spare)} of {len(candidates[wish.pool])} nodes it can use hold nothing of pool {wish.near!r}: a replica "
        "there is not near; label only as many nodes as that pool has replicas",
    )


def _missing(
    unplaced: Sequence[Mapping[str, float]], wish: Wish, nodes: Sequence[Node], held: Mapping[str, Sequence[int]]
) -> str:
    matching = [node for node in nodes if matches(wish.labels, node.labels)]
    if wish.labels and not matching:
        return ", ".join(_label_missing(key, value, nodes) for key, value in sorted(wish.labels.items()))
    count = f"({len(unplaced)} of {len(wish.bundles)} replicas or ranks find no node"
    if wish.near is not None and any(fits(bundle, node.resources) for node in matching for bundle in unplaced):
        return f"{spell(_total(unplaced))} beside pool {wish.near!r} {count})"
    offered = {name for node in matching for name, amount in node.resources.items() if amount > 0}
    unknown = sorted(name for name in _total(unplaced) if name not in offered)
    hints = [hint for name in unknown if (hint := _similar(name, offered))]
    return f"{spell(_total(unplaced))} {count}{''.join(f'; {hint}' for hint in hints)})"


def _label_missing(key: str, value: str, nodes: Sequence[Node]) -> str:
    there = sorted({node.labels[key] for node in nodes if key in node.labels})
    return f"{key}={value}" + (f" (nodes have {key}={', '.join(there)})" if there and value not in there else "")


def _similar(name: str, offered: Iterable[str]) -> str:
    by_lower = {other.lower(): other for other in offered}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"no node has {name!r}, but some have {by_lower[close[0]]!r}" if close else ""


def _accelerators(bundle: Mapping[str, float]) -> float:
    return sum(amount for name, amount in bundle.items() if name != "CPU")


def _total(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def spell(resources: Mapping[str, float], labels: Mapping[str, str] | None = None) -> str:
    """``CPU 2, NPU 1, kind=npu``."""
    parts = [f"{name} {amount:g}" for name, amount in sorted(resources.items())]
    return ", ".join(parts + [f"{key}={value}" for key, value in sorted((labels or {}).items())]) or "nothing"
