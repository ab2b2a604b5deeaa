"""The plan of pools over nodes: what it places, what it names as missing, and that its rules hold for any cluster."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.pools import Node, Rules, Wish, disjoint, fits, matches, plan, selectors
from cluster.preflight import check

GPU_NODE = Node({"CPU": 16, "GPU": 2}, {"pool": "gpu"}, "10.0.0.1")
CPU_NODE = Node({"CPU": 8}, {"pool": "cpu"}, "10.0.0.2")
NPU_NODE = Node({"CPU": 8, "NPU": 2}, {}, "10.0.0.3")


def wish(pool: str, *bundles: dict[str, float], **rules: Any) -> Wish:
    return Wish(pool, rules.pop("labels", {}), bundles, **rules)


def lack(*wishes: Wish, nodes: tuple[Node, ...] = (GPU_NODE, CPU_NODE, NPU_NODE)) -> str:
    (found,) = plan(wishes, nodes).lacks
    return f"{found.pool}: {found.what}"


class TestLacks:
    def test_nothing_is_missing(self) -> None:
        planned = plan(
            [wish("gpu", {"GPU": 1, "CPU": 4}, labels={"pool": "gpu"}), wish("npu", {"NPU": 1})], (GPU_NODE, NPU_NODE)
        )
        assert [(item.pool, item.node) for item in planned.placements] == [("gpu", 0), ("npu", 1)]
        assert not planned.lacks

    def test_a_misspelt_resource_is_named(self) -> None:
        text = lack(wish("npu", {"npu": 1}))
        assert text == "npu: npu 1 (1 of 1 replicas or ranks find no node; no node has 'npu', but some have 'NPU')"

    def test_a_missing_label_says_which_values_there_are(self) -> None:
        assert lack(wish("x", {"CPU": 1}, labels={"pool": "edge"})) == "x: pool=edge (nodes have pool=cpu, gpu)"

    def test_a_pool_without_anything_to_be_near(self) -> None:
        near = wish("beside", {"CPU": 1}, labels={"pool": "gpu"}, near="target")
        assert lack(near).startswith("beside: CPU 1 beside pool 'target' (1 of 1")

    def test_nodes_that_both_could_use_are_named(self) -> None:
        drafts = wish("draft", {"CPU": 1}, apart=frozenset({"target"}))
        text = lack(drafts, wish("target", {"GPU": 1}))
        assert text == "draft: nodes apart from pool 'target': node 10.0.0.1 fits both, tell them apart by a label"

    def test_more_nodes_than_the_other_pool_needs_are_a_note(self) -> None:
        target = wish("target", {"GPU": 2}, labels={"pool": "gpu"})
        beside = wish("beside", {"CPU": 1}, labels={"pool": "gpu"}, near="target")
        (note,) = plan([target, beside], [GPU_NODE, GPU_NODE]).notes
        assert note.what.startswith("1 of 2 nodes it can use hold nothing of pool 'target'")
        assert not plan([target, beside], [GPU_NODE, CPU_NODE]).notes
        (_, row) = check([target, beside], [GPU_NODE, GPU_NODE])
        assert not row.missing
        assert row.note == note.what

    def test_cpu_work_leaves_accelerators_alone(self) -> None:
        planned = plan([wish("cpu", {"CPU": 4}), wish("gpu", {"GPU": 2, "CPU": 16})], (GPU_NODE, CPU_NODE))
        assert not planned.lacks

    def test_the_pool_with_one_choice_comes_first(self) -> None:
        anywhere, here = wish("any", {"CPU": 8}), wish("cpu", {"CPU": 8}, labels={"pool": "cpu"})
        assert not plan([anywhere, here], (CPU_NODE, Node({"CPU": 8}))).lacks


class TestSelectors:
    def test_near_takes_labels_over_and_apart_excludes_one(self) -> None:
        pools = {
            "gpu": Rules({"pool": "gpu", "zone": "a"}),
            "beside": Rules({}, near="gpu"),
            "cpu": Rules({"zone": "a"}, apart=frozenset({"gpu"})),
            "npu": Rules({"pool": "npu"}, apart=frozenset({"gpu"})),
        }
        found = selectors(pools)
        assert found["beside"] == {"pool": "gpu", "zone": "a"}
        assert found["cpu"] == {"zone": "a", "pool": "!gpu"}
        assert found["npu"] == {"pool": "npu"}  # differs already

    @pytest.mark.parametrize(
        ("pools", "message"),
        [
            ({"a": Rules(near="b")}, "a: no pool 'b'; pools: a"),
            ({"a": Rules(near="a")}, "a: near and apart name other pools"),
            ({"a": Rules(near="b"), "b": Rules(near="a")}, "goes in a circle: a -> b -> a"),
            ({"a": Rules(near="b"), "b": Rules()}, "a: near b, whose nodes have no label"),
            ({"a": Rules({"k": "1"}, near="b"), "b": Rules({"k": "2"})}, "a: near b needs k=2, its own labels say 1"),
            ({"a": Rules(near="b", apart=frozenset({"b"})), "b": Rules({"k": "2"})}, "both near b and apart from it"),
            ({"a": Rules({"k": "2"}, apart=frozenset({"b"})), "b": Rules({"k": "2"})}, "give one another label"),
        ],
    )
    def test_rules_that_cannot_hold(self, pools: dict[str, Rules], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            selectors(pools)


LABEL = st.sampled_from(["a", "b", "c"])
SELECTOR = st.one_of(
    LABEL,
    LABEL.map("!{}".format),
    st.lists(LABEL, min_size=1, unique=True).map(lambda values: f"in({','.join(values)})"),
    st.lists(LABEL, min_size=1, unique=True).map(lambda values: f"!in({', '.join(values)})"),
)
SELECTORS = st.dictionaries(st.sampled_from(["k", "l"]), SELECTOR)
LABELS = st.dictionaries(st.sampled_from(["k", "l"]), LABEL)
RESOURCES = st.fixed_dictionaries(
    {}, optional={"CPU": st.integers(1, 8), "GPU": st.integers(1, 2), "NPU": st.integers(1, 2)}
)
NODES = st.lists(st.builds(Node, RESOURCES, LABELS), max_size=5)
BUNDLES = st.lists(RESOURCES, min_size=1, max_size=4).map(tuple)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Wish], list[Node]]:
    names = ["p", "q", "r"]
    found = []
    for index, name in enumerate(names):
        near = draw(st.sampled_from([None, *names[:index]]))
        apart = draw(
            st.frozensets(st.sampled_from(names).filter(lambda other, own=name, by=near: other not in (own, by)))
        )
        found.append(Wish(name, draw(SELECTORS), draw(BUNDLES), near, apart))
    return found, draw(NODES)


@settings(deadline=None)
@given(SELECTORS, SELECTORS, LABELS)
def test_what_is_disjoint_matches_no_node_twice(
    one: dict[str, str], other: dict[str, str], labels: dict[str, str]
) -> None:
    assert not (disjoint(one, other) and matches(one, labels) and matches(other, labels))


@settings(deadline=None)
@given(clusters())
def test_a_plan_never_exceeds_a_node_and_keeps_every_rule(case: tuple[list[Wish], list[Node]]) -> None:
    wishes, nodes = case
    planned = plan(wishes, nodes)
    used: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    held: dict[str, set[int]] = defaultdict(set)
    count: dict[str, int] = defaultdict(int)
    for placement in planned.placements:
        for name, amount in placement.bundle.items():
            used[placement.node][name] += amount
        held[placement.pool].add(placement.node)
        count[placement.pool] += 1
    assert all(fits(amounts, nodes[index].resources) for index, amounts in used.items())
    missing = {item.pool for item in planned.lacks}
    for item in wishes:
        assert all(matches(item.labels, nodes[index].labels) for index in held[item.pool])
        assert item.near is None or held[item.pool] <= held[item.near]
        assert all(held[item.pool].isdisjoint(held[other]) for other in item.apart)
        assert count[item.pool] == len(item.bundles) or item.pool in missing


@settings(deadline=None)
@given(clusters())
def test_without_a_lack_ray_cannot_break_apart_either(case: tuple[list[Wish], list[Node]]) -> None:
    wishes, nodes = case
    missing = {item.pool for item in plan(wishes, nodes).lacks}
    by_pool = {item.pool: item for item in wishes}
    for item in wishes:
        for other in (by_pool[name] for name in item.apart if item.pool not in missing):
            for node in nodes:
                assert not all(
                    matches(each.labels, node.labels) and any(fits(bundle, node.resources) for bundle in each.bundles)
                    for each in (item, other)
                )
