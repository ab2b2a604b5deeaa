"""Sources without weights: what they propose, what they keep, and that tenants never see one another's outputs."""

import logging
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.target.sources import SOURCES, Limits, Proposal, Source, make_sources, suffix
from deployments.target.sources.lookup import LookupSource
from deployments.target.sources.ngrams import SEPARATOR, NgramIndex
from deployments.target.sources.source import MIN_PATH, best, trust
from deployments.target.sources.suffix import OutputTree, SuffixSource

needs_arctic = pytest.mark.skipif(not suffix.available(), reason="arctic-inference is not installed")
each_source = pytest.mark.parametrize(
    "make", [pytest.param(SuffixSource, marks=needs_arctic, id="suffix"), pytest.param(LookupSource, id="lookup")]
)
Make = Callable[..., Source]
few_tokens = st.lists(st.integers(0, 2), max_size=30)
texts = st.lists(st.integers(0, 3), max_size=60)


def run(source: Source, request: str, tenant: str, prompt: list[int], output: list[int]) -> None:
    source.begin(request, tenant, prompt)
    source.extend(request, output)
    source.finish(request)


# --- proposals --------------------------------------------------------------------------------------------------------


@each_source
@given(
    period=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12, unique=True),
    length=st.integers(40, 90),
    prompt=st.integers(0, 90),
    most=st.integers(1, 16),
)
def test_periodic_text_is_continued(make: Make, period: list[int], length: int, prompt: int, most: int) -> None:
    text = [period[i % len(period)] for i in range(length + most)]
    source = make()
    source.begin("r", "", text[: min(prompt, length)])
    for token in text[min(prompt, length) : length]:
        source.extend("r", [token])
    found = source.propose("r", most)
    assert found is not None
    assert found.tokens == text[length : length + len(found.tokens)]
    assert found.source == source.name
    assert min(found.confidence) > 0.4
    if make is LookupSource:
        assert len(found.tokens) == most


@each_source
def test_own_prompt_and_outputs_of_the_tenant(make: Make) -> None:
    source = make()
    source.begin("copy", "", [5, 6, 7, 8, 9, 1, 2, 5, 6])
    copied = source.propose("copy", 2)
    assert copied is not None
    assert copied.tokens == [7, 8]
    assert copied.match == 2
    run(source, "before", "t", [1, 2], [3, 11, 12, 13, 14, 15])
    source.begin("after", "t", [3, 11, 12])
    shared = source.propose("after", 3)
    assert shared is not None
    assert shared.tokens == [13, 14, 15]
    assert source.propose("after", 0) is None
    source.begin("fresh", "t", [40, 41, 42])
    assert source.propose("fresh", 3) is None


@needs_arctic
def test_suffix_confidence_is_conditional() -> None:
    source = SuffixSource()
    for number, output in enumerate(([1, 2, 5], [1, 2, 5], [1, 2, 6], [1, 3, 7])):
        run(source, str(number), "t", [9], output)
    source.begin("r", "t", [8, 1])
    found = source.propose("r", 2)
    assert found is not None
    assert found.tokens == [2, 5]
    assert found.confidence == pytest.approx([3 / 4 * trust(1), 2 / 3 * trust(2)])


@needs_arctic
def test_suffix_end_of_the_request_is_no_counterexample() -> None:
    source = SuffixSource()
    source.begin("r", "", [7, 1, 2, 3, 4, 8, 1, 2, 3])
    found = source.propose("r", 1)
    assert found is not None
    assert found.confidence == [trust(3)]


def test_lookup_confidence_is_the_share_of_votes() -> None:
    index = NgramIndex()
    index.append([1, 2, 5, 5, SEPARATOR, 1, 2, 6, SEPARATOR, 1, 2, 5, 7, SEPARATOR])
    found = index.propose([9, 1, 2], 4, "lookup", own=False)
    assert found == Proposal([5, 7], [2 / 3 * trust(2), 1 / 2 * trust(3)], 2, "lookup")


def common_end(left: list[int], right: list[int]) -> int:
    """Tokens that two texts share at their ends."""
    length = 0
    while length < min(len(left), len(right)) and left[-length - 1] == right[-length - 1]:
        length += 1
    return length


@given(st.lists(texts, max_size=4), texts, st.integers(0, 80), st.integers(1, 8))
def test_ngrams_find_the_longest_match(parts: list[list[int]], context: list[int], drop: int, most: int) -> None:
    index = NgramIndex(keep=1000)
    stream = [token for part in parts for token in (*part, SEPARATOR)]
    index.append(stream)
    index.drop(drop)
    stream = stream[drop:]
    assert len(index) == len(stream)
    found = index.propose(context, most, "lookup", own=False)
    matches = [(common_end(stream[:end], context), end) for end, token in enumerate(stream) if token != SEPARATOR]
    match, end = max(matches, default=(0, 0))
    voters = [(length, at) for length, at in matches if length >= min(match, 4)]
    agreed = sum(length for length, at in voters if stream[at] == stream[end])
    total = sum(length for length, _ in voters)
    if match < 2 or agreed / total * trust(match) < MIN_PATH:
        assert found is None
    else:
        assert found is not None
        assert found.match == match
        assert found.tokens == stream[end : end + len(found.tokens)]
        assert SEPARATOR not in found.tokens
        assert found.confidence[0] == pytest.approx(agreed / total * trust(match))


@given(texts, st.integers(1, 5), st.integers(0, 80), st.integers(1, 8))
def test_ngrams_propose_only_what_followed(text: list[int], keep: int, drop: int, most: int) -> None:
    index = NgramIndex(keep)
    for token in text:
        index.append([token])
    index.drop(drop)
    text = text[drop:]
    assert index.tail(1000) == text
    found = index.propose(text[-64:], most, "lookup", own=True)
    if found is not None:
        assert found.match >= 2
        whole = text + found.tokens  # a proposal that reaches the end goes on into itself
        needle = text[-found.match :] + found.tokens
        assert any(whole[at : at + len(needle)] == needle for at in range(len(text) - found.match))


@given(texts, st.integers(0, 80), texts, texts)
def test_dropped_tokens_leave_nothing(old: list[int], extra: int, kept: list[int], context: list[int]) -> None:
    dropped, fresh = NgramIndex(keep=1000), NgramIndex(keep=1000)
    dropped.append(old + kept)
    dropped.drop(len(old))
    fresh.append(kept)
    assert dropped.propose(context, 4, "", own=False) == fresh.propose(context, 4, "", own=False)
    dropped.drop(len(kept) + extra)
    assert len(dropped) == 0
    assert dropped.grams == 0
    dropped.append(kept)
    assert dropped.propose(context, 4, "", own=False) == fresh.propose(context, 4, "", own=False)


def test_best_expects_the_most_accepted_tokens() -> None:
    long = Proposal([1, 2, 3], [0.5, 0.5, 0.5], 2, "a")
    sure = Proposal([1], [0.9], 1, "b")
    assert long.expected == pytest.approx(0.875)
    assert best(long, None, sure) is sure
    assert best(None) is None


# --- tenants ----------------------------------------------------------------------------------------------------------


@each_source
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=25)), max_size=12))
def test_tenants_never_share(make: Make, outputs: list[tuple[int, list[int]]]) -> None:
    """Tokens 0..2 are common to all; 3 stands for a token only this tenant has, or only this request for tenant ""."""
    source = make()
    for number, (tenant, output) in enumerate(outputs):
        secret = 1000 + number if tenant == 0 else 100 + tenant
        mine = {0, 1, 2, secret}
        name = "" if tenant == 0 else f"tenant {tenant}"
        source.begin(str(number), name, [0, 1, 2, 0, 1])
        for token in output:
            found = source.propose(str(number), 8)
            assert found is None or set(found.tokens) <= mine
            source.extend(str(number), [secret if token == 3 else token])
        source.finish(str(number))
    assert source.stats()["tenants"] == len({tenant for tenant, _ in outputs if tenant})


@each_source
def test_clear_forgets_outputs_but_not_running_requests(make: Make) -> None:
    source = make()
    run(source, "before", "t", [], [1, 2, 3, 4, 5, 6])
    source.begin("r", "t", [7, 8, 9, 7, 8])
    source.clear()
    assert source.stats()["outputs"] == source.stats()["bytes"] == 0
    found = source.propose("r", 1)
    assert found is not None
    assert found.tokens == [9]
    source.extend("r", [1, 2, 3])
    assert source.propose("r", 1) is None


# --- bounds -----------------------------------------------------------------------------------------------------------


def knows(source: Source, tenant: str, output: list[int]) -> bool:
    """Whether a new request of the tenant is drafted from that output; an asked tenant counts as used."""
    source.begin("probe", tenant, output[:3])
    found = source.propose("probe", 1)
    source.begin("probe", "", [])
    return found is not None and found.tokens == output[3:4]


def text_of(number: int, length: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + length))


@each_source
def test_oldest_output_of_a_tenant_goes_first(make: Make) -> None:
    source = make(Limits(outputs=3))
    for number in range(5):
        run(source, str(number), "t", [], text_of(number, 20))
    assert [knows(source, "t", text_of(number, 20)) for number in range(5)] == [False, False, True, True, True]
    stats = source.stats()
    assert (stats["outputs"], stats["evictions"], stats["tenants"]) == (3, 2, 1)


@each_source
def test_tenant_used_least_recently_pays_for_the_budget(make: Make) -> None:
    trial = make()
    run(trial, "r", "t", [], text_of(1, 100))
    source = make(Limits(shared_bytes=int(3.5 * trial.stats()["bytes"])))
    for number, tenant in enumerate("abc"):
        run(source, tenant, tenant, [], text_of(number, 100))
    assert knows(source, "a", text_of(0, 100))  # b is now the one not used for longest
    run(source, "d", "d", [], text_of(3, 100))
    assert [knows(source, tenant, text_of(number, 100)) for number, tenant in enumerate("abcd")] == [
        True,
        False,
        True,
        True,
    ]


@each_source
@given(
    outputs=st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 50), max_size=60)), max_size=25),
    budget=st.integers(1, 40_000),
)
def test_bounds_hold_after_every_request(make: Make, outputs: list[tuple[str, list[int]]], budget: int) -> None:
    source = make(Limits(outputs=4, output_tokens=40, shared_bytes=budget))
    for number, (tenant, output) in enumerate(outputs):
        run(source, str(number), tenant, [1, 2, 3], output)
        stats = source.stats()
        assert stats["bytes"] <= budget
        assert stats["outputs"] <= 4 * stats["tenants"]
        assert stats["requests"] == stats["request_tokens"] == 0
    assert source.stats()["outputs"] + source.stats()["evictions"] == sum(bool(output) for _, output in outputs)


@each_source
def test_ten_thousand_requests_leave_sizes_where_they_were(make: Make) -> None:
    source = make(Limits(outputs=50))
    sizes = []
    for number in range(10_000):
        prompt = [number % 7, number % 11, 1, 2]
        run(source, str(number), f"tenant {number % 3}", prompt, [(number * k) % 101 for k in range(1, 13)])
        if number in (4_999, 9_999):
            sizes.append(source.stats())
    early, late = sizes
    assert early["outputs"] == late["outputs"] == 150
    assert late["bytes"] == pytest.approx(early["bytes"], rel=0.25)
    assert late["requests"] == late["request_tokens"] == 0


@needs_arctic
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=80), min_size=1, max_size=12))
def test_evicted_outputs_free_the_memory_of_the_tree(outputs: list[list[int]]) -> None:
    held = OutputTree(64)
    empty = held.tree.estimate_memory()
    for output in outputs:
        held.add(output)
    full = held.tree.estimate_memory()
    assert full > empty
    for output in outputs:  # the same window once more
        held.add(output)
        held.evict()
    assert held.tree.num_seqs() == len(outputs)
    assert held.tree.estimate_memory() <= 2 * full
    for _ in outputs:
        held.evict()
    assert held.tree.estimate_memory() == empty
    assert held.bytes == len(held) == 0


@needs_arctic
def test_estimate_of_a_tree_follows_its_memory() -> None:
    held = OutputTree(64)
    for number in range(300):
        held.add([(number * number * k) % 997 for k in range(1, 101)])
        if number >= 100:
            held.evict()
    assert held.bytes == pytest.approx(held.tree.estimate_memory(), rel=0.5)


def test_lookup_searches_only_the_last_tokens_of_a_request() -> None:
    source = LookupSource(Limits(request_tokens=100))
    source.begin("r", "", range(500))
    for token in range(500, 900):
        source.extend("r", [token])
        assert source.stats()["request_tokens"] == 100
    source.extend("r", [700, 701, 702])
    assert source.propose("r", 1) is None
    source.extend("r", [850, 851, 852])
    found = source.propose("r", 1)
    assert found is not None
    assert found.tokens == [853]


# --- whatever is asked ------------------------------------------------------------------------------------------------

names = st.sampled_from(["r1", "r2", "r3"])
ids = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1)), max_size=20)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), names, st.sampled_from(["", "a", "b"]), ids),
        st.tuples(st.just("extend"), names, ids),
        st.tuples(st.just("propose"), names, st.integers(-2, 20)),
        st.tuples(st.just("finish"), names),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)


@each_source
@given(calls, st.integers(1, 8))
def test_nothing_raises_and_proposals_are_well_formed(make: Make, calls: list[tuple], depth: int) -> None:  # type: ignore[type-arg]
    source = make(Limits(depth=depth, request_tokens=15, outputs=2, output_tokens=10, shared_bytes=6_000))
    running: set[str] = set()
    seen: set[int] = set()
    for name, *arguments in calls:
        found = getattr(source, name)(*arguments)
        if name == "begin":
            running.add(arguments[0])
            seen.update(arguments[2])
        elif name == "extend":
            seen.update(arguments[1])
        elif name == "finish":
            running.discard(arguments[0])
        elif name == "propose" and found is not None:
            assert arguments[0] in running
            assert 1 <= len(found.tokens) == len(found.confidence) <= arguments[1]
            assert all(0 < confidence <= 1 for confidence in found.confidence)
            assert math.prod(found.confidence) >= MIN_PATH
            assert 1 <= found.match <= depth
            assert seen.issuperset(found.tokens)
        assert source.stats()["requests"] == len(running)
        assert source.stats()["bytes"] <= 6_000


@each_source
@given(few_tokens, few_tokens, few_tokens)
def test_begin_again_restarts(make: Make, first: list[int], prompt: list[int], output: list[int]) -> None:
    again, fresh = make(), make()
    again.begin("r", "t", first)
    again.extend("r", first)
    for source in (again, fresh):
        source.begin("r", "t", prompt)
        source.extend("r", output)
        assert source.stats()["request_tokens"] == len(prompt) + len(output)
    assert again.propose("r", 8) == fresh.propose("r", 8)
    for source in (again, fresh):
        source.finish("r")
        source.begin("next", "t", output[:2])
    assert again.propose("next", 8) == fresh.propose("next", 8)


# --- making them ------------------------------------------------------------------------------------------------------


@needs_arctic
def test_sources_by_name() -> None:
    assert [source.name for source in make_sources(["lookup", "suffix", "lookup"])] == ["lookup", "suffix"]
    assert make_sources([]) == []


def test_unknown_name_tells_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown draft source 'ngram'; known are lookup, suffix"):
        make_sources(["suffix", "ngram"])
    assert set(SOURCES) == {"lookup", "suffix"}


def test_lookup_stands_in_for_a_missing_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(suffix, "SuffixTree", None)
    with caplog.at_level(logging.WARNING):
        made = make_sources(["suffix", "lookup"])
    assert [source.name for source in made] == ["lookup"]
    assert len(caplog.records) == 1
    with pytest.raises(ImportError):
        SuffixSource()


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Limits(depth=0)
