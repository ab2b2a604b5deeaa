"""Distances between drafts, and what several drafts amount to."""

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.answer.alignment import align, common
from deployments.chain.answer.candidate import Candidate
from deployments.chain.answer.consensus import Thresholds, decide, rank
from deployments.chain.answer.distance import distance, matrix

VOCAB = 50
WORDS = [" a", " the", " dog", " cat", " runs", " sits", " far", " home", " fast", " slowly"]


def draft(tokens: list[int], source: str = "s", **changes: Any) -> Candidate:
    """A draft of words; token 0 is `` a``."""
    text = "".join(WORDS[token % len(WORDS)] for token in tokens)
    ends = tuple(itertools.accumulate(len(WORDS[token % len(WORDS)]) for token in tokens))
    return Candidate(**{"source": source, "text": text, "tokens": tuple(tokens), "ends": ends, **changes})


def spelled(pieces: list[str], source: str = "s") -> Candidate:
    """A draft of these pieces, whose tokens are known by their spelling."""
    tokens = tuple(zlib.crc32(piece.encode()) for piece in pieces)
    return Candidate(
        source=source, text="".join(pieces), tokens=tokens, ends=tuple(itertools.accumulate(map(len, pieces)))
    )


@st.composite
def drafts(draw: st.DrawFn) -> Candidate:
    """Any draft, with or without probabilities, some of them no distribution."""
    tokens = draw(st.lists(st.integers(0, 9), max_size=12))
    source = draw(st.sampled_from(["rules", "model:a#0", "model:a#1", "model:a#10", "retrieval"]))
    if not tokens or draw(st.booleans()):
        return draft(tokens, source)
    k = draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    ids = np.stack([random.permutation(VOCAB)[:k] for _ in tokens]).astype(np.int32)
    probs = random.dirichlet(np.ones(k + 1), len(tokens))[:, :k].astype(np.float32)
    if draw(st.integers(0, 5)) == 0:
        probs[0, 0] = draw(st.sampled_from([np.nan, 2.0, -1.0]))
    return draft(tokens, source, top_ids=ids, top_probs=probs)


class TestDistance:
    @given(drafts(), drafts())
    def test_it_is_a_number_from_0_to_1_the_same_both_ways(self, a: Candidate, b: Candidate) -> None:
        value = distance(a, b, VOCAB)
        assert 0.0 <= value <= 1.0
        assert distance(b, a, VOCAB) == value

    @given(drafts())
    def test_a_draft_is_no_distance_from_itself(self, a: Candidate) -> None:
        assert distance(a, a, VOCAB) == pytest.approx(0.0, abs=1e-5)
        assert matrix([a], VOCAB).tolist() == [[0.0]]

    def test_of_drafts_without_probabilities_it_is_the_share_of_other_tokens(self) -> None:
        assert distance(draft([0, 2, 4, 7]), draft([0, 3, 4, 7]), VOCAB) == 0.25
        assert distance(draft([0, 2, 4]), draft([0, 2, 4, 7]), VOCAB) == 0.25
        assert distance(draft([0, 2]), draft([1, 3]), VOCAB) == 1.0

    def test_an_empty_draft_is_far_from_all_but_another_empty_one(self) -> None:
        assert distance(draft([]), draft([1, 2]), VOCAB) == 1.0
        assert distance(draft([]), draft([]), VOCAB) == 0.0

    def test_an_insertion_shifts_nothing(self) -> None:
        assert distance(draft([0, 2, 4, 7, 1, 3]), draft([0, 8, 2, 4, 7, 1, 3]), VOCAB) == pytest.approx(1 / 7)

    def test_samples_that_part_are_apart_though_their_distributions_are_one(self) -> None:
        ids, probs = np.array([[2, 3]], np.int32), np.array([[0.5, 0.5]], np.float32)
        yes, no = (draft([token], top_ids=ids, top_probs=probs) for token in (2, 3))
        assert distance(yes, no, VOCAB) == 1.0

    def test_the_same_token_with_other_confidence_is_a_little_apart(self) -> None:
        ids = np.array([[2, 3]], np.int32)
        sure = draft([2], top_ids=ids, top_probs=np.array([[0.95, 0.03]], np.float32))
        torn = draft([2], top_ids=ids, top_probs=np.array([[0.4, 0.35]], np.float32))
        both = [0.95 * np.log(0.95 / 0.4) + 0.03 * np.log(0.03 / 0.35) + 0.02 * np.log(0.02 / 0.25)]
        both += [0.4 * np.log(0.4 / 0.95) + 0.35 * np.log(0.35 / 0.03) + 0.25 * np.log(0.25 / 0.02)]
        assert distance(sure, torn, VOCAB) == pytest.approx(sum(both) / 2 / np.log(VOCAB), rel=1e-4)
        assert distance(draft([2]), torn, VOCAB) == 0.0

    def test_other_tokens_of_the_same_text_are_the_same(self) -> None:
        assert distance(spelled(["hel", "lo", " world"]), spelled(["hello", " wor", "ld"]), VOCAB) == 0.0
        assert distance(spelled(["hel", "lo", " you", "."]), spelled(["hello", " me", "."]), VOCAB) == 0.25
        assert distance(spelled(["an", " un", "der", "."]), spelled(["no", " und", "er", "."]), VOCAB) == 0.25

    def test_a_draft_nobody_tokenised_counts_by_its_text(self) -> None:
        bare = Candidate(source="s", text=" a dog")
        assert distance(bare, draft([0, 2]), VOCAB) == 0.0
        assert distance(bare, draft([0, 3]), VOCAB) == 1.0


class TestAlignment:
    @given(st.lists(st.integers(0, 3), max_size=14), st.lists(st.integers(0, 3), max_size=14))
    def test_a_longest_common_subsequence(self, a: list[int], b: list[int]) -> None:
        pairs = common(tuple(a), tuple(b))
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(i < m and j < n for (i, j), (m, n) in itertools.pairwise(pairs))
        assert len(pairs) == longest(a, b)

    @given(drafts(), drafts())
    def test_both_orders_name_the_same_pairs(self, a: Candidate, b: Candidate) -> None:
        assert align(a, b).pairs == [(i, j) for j, i in align(b, a).pairs]


def longest(a: list[int], b: list[int]) -> int:
    """Length of a longest common subsequence, by the textbook."""
    row = [0] * (len(b) + 1)
    for x in a:
        last = row[:]
        for j, y in enumerate(b):
            row[j + 1] = last[j] + 1 if x == y else max(last[j + 1], row[j])
    return row[-1]


BASE = [0, 2, 4, 7, 1, 3, 5, 6, 8, 9, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]


class TestOutcome:
    def test_two_that_agree_are_enough(self) -> None:
        others = [draft([9, 9, 9], "rules"), draft(BASE, "model:a#1"), draft(BASE, "model:a#0")]
        got = decide(others, Thresholds(), vocab_size=VOCAB)
        assert (got.outcome, got.chosen, got.agreeing) == ("consensus", 2, (2, 1))

    def test_who_most_agree_with_is_chosen_then_the_nearest(self) -> None:
        near, far = [*BASE[:-1], 5], [*BASE[:-2], 5, 5]
        got = decide([draft(BASE, "a"), draft(near, "b"), draft(far, "c")], Thresholds(agree=0.06), vocab_size=VOCAB)
        assert (got.outcome, got.chosen, got.agreeing) == ("consensus", 1, (1, 0, 2))

    def test_nobody_near_anybody_diverges(self) -> None:
        got = decide([draft([0, 2]), draft([1, 3]), draft([5, 6])], Thresholds(), vocab_size=VOCAB)
        assert (got.outcome, got.chosen) == ("divergence", None)

    def test_between_the_thresholds_it_leans(self) -> None:
        far = [*BASE[:-2], 5, 5]
        got = decide([draft(BASE), draft(far)], Thresholds(agree=0.05, diverge=0.15), vocab_size=VOCAB)
        assert (got.outcome, got.chosen) == ("leaning", None)

    def test_one_and_none(self) -> None:
        assert decide([], Thresholds(), vocab_size=VOCAB).outcome == "none"
        one = decide([draft([1])], Thresholds(), vocab_size=VOCAB)
        assert (one.outcome, one.chosen) == ("leaning", 0)

    def test_the_invalid_take_no_part_unless_all_are(self) -> None:
        three = [draft(BASE, "a"), draft(BASE, "b"), draft([1, 1], "c")]
        got = decide(three, Thresholds(), vocab_size=VOCAB, invalid={0})
        assert (got.outcome, got.agreeing) == ("divergence", (1, 2))
        assert decide(three, Thresholds(), vocab_size=VOCAB, invalid={0, 1}).chosen == 2
        assert decide(three, Thresholds(), vocab_size=VOCAB, invalid={0, 1, 2}).outcome == "consensus"

    def test_a_number_tells_long_drafts_apart_that_are_near(self) -> None:
        text = "The parcel that you ordered from our shop last week will be at your door in {} days"
        two = [spelled([f" {word}" for word in text.format(number).split()], number) for number in ("3", "5")]
        got = decide(two, Thresholds(), vocab_size=VOCAB)
        assert got.outcome == "leaning"
        assert [(i, j, why) for i, j, why in got.objections] == [(0, 1, "number")]
        assert decide(two, Thresholds(guard=False), vocab_size=VOCAB).outcome == "consensus"

    @given(st.lists(drafts(), max_size=4, unique_by=rank), st.randoms())
    def test_the_order_they_come_in_changes_nothing(self, found: list[Candidate], random: Any) -> None:
        turned = list(range(len(found)))
        random.shuffle(turned)
        first = decide(found, Thresholds(), vocab_size=VOCAB)
        second = decide([found[i] for i in turned], Thresholds(), vocab_size=VOCAB)
        assert second.outcome == first.outcome
        assert [turned[i] for i in second.agreeing] == list(first.agreeing)

    @given(st.lists(drafts(), min_size=2, max_size=4), st.lists(st.floats(0, 1), min_size=4, max_size=4))
    def test_wider_thresholds_find_more_agreement(self, found: list[Candidate], bounds: list[float]) -> None:
        a, b, c, d = sorted(bounds)
        outcomes = [
            decide(found, Thresholds(agree=x, diverge=y), vocab_size=VOCAB).outcome for x, y in ((a, c), (b, d))
        ]
        order = ("divergence", "leaning", "consensus")
        assert order.index(outcomes[1]) >= order.index(outcomes[0])

    @pytest.mark.parametrize(("agree", "diverge"), [(0.2, 0.1), (-0.1, 0.5), (0.1, 1.1), (float("nan"), 0.5)])
    def test_thresholds_in_the_wrong_order_are_refused(self, agree: float, diverge: float) -> None:
        with pytest.raises(ValueError, match="agree"):
            Thresholds(agree=agree, diverge=diverge)
