"""Drafts that came with a request: what is proposed of them, where they are found again, what counts as followed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.controller import Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.chain.given import MAX_DRAFTS, MAX_TOKENS, problem, top_of
from deployments.chain.protocol import Sampling
from deployments.target.rounds import DraftRounds
from deployments.target.sequence import Running
from deployments.target.sources import Proposal
from deployments.target.sources.given import PAIR, START, GivenSource
from deployments.target.sources.source import trust

VOCAB = 100
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def source_of(*drafts: list[int]) -> GivenSource:
    source = GivenSource(VOCAB)
    assert source.give("r", drafts)
    return source


def proposed(source: GivenSource, most: int = 16) -> list[int]:
    found = source.propose("r", most)
    return found.tokens if found is not None else []


def follows(draft: list[int], output: list[int], tokens: list[int]) -> bool:
    """Whether ``tokens`` are what comes next in the draft: after all of the output, or after its last two tokens."""
    if output == draft[: len(output)] and tokens == draft[len(output) : len(output) + len(tokens)]:
        return True
    needle = output[-PAIR:] + tokens
    return len(output) >= PAIR and any(draft[at : at + len(needle)] == needle for at in range(len(draft)))


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(1, 20), st.data())
def test_proposes_what_follows_in_a_draft_and_nothing_else(
    drafts: list[list[int]], output: list[int], most: int, data: st.DataObject
) -> None:
    source = source_of(*drafts)
    done = 0
    while done < len(output):
        found = source.propose("r", most)
        if found is not None:
            assert 1 <= len(found.tokens) == len(found.confidence) <= most
            assert any(follows(draft, output[:done], found.tokens) for draft in drafts)
            assert all(0 < chance < 1 for chance in found.confidence)
        step = data.draw(st.integers(1, 5))
        source.extend("r", output[done : done + step])
        done += step
    length, followed = source.outcome("r")
    assert 0 <= followed <= length
    assert length in {len(draft) for draft in drafts}


@given(st.lists(st.integers(0, 99), min_size=1, max_size=60), st.integers(1, 8))
def test_a_right_draft_is_proposed_to_its_end(draft: list[int], step: int) -> None:
    source = source_of(draft)
    for start in range(0, len(draft), step):
        found = source.propose("r", step)
        assert found == Proposal(
            draft[start : start + step],
            [trust(START + place) for place in range(start, min(start + step, len(draft)))],
            start,
            "given",
        )
        source.extend("r", draft[start : start + step])
    assert source.propose("r", step) is None
    assert source.outcome("r") == (len(draft), len(draft))


def test_found_again_after_an_edit_nearest_to_where_it_was_left() -> None:
    lines = [[10, 11, line, line, 12, 13] for line in range(5)]
    draft = [token for line in lines for token in line]
    source = source_of(draft)
    source.extend("r", draft[:14])  # into the third line
    source.extend("r", [99])  # one of its tokens is replaced
    assert proposed(source) == []
    source.extend("r", [12])
    assert proposed(source) == []
    source.extend("r", [13])  # ends every line
    assert proposed(source, 4) == [10, 11, 3, 3]
    source.extend("r", [10, 11, 3])
    found = source.propose("r", 1)
    assert found is not None
    assert (found.tokens, found.match) == ([3], 5)
    assert source.outcome("r") == (30, 14 + 5)


def test_insertion_and_deletion() -> None:
    draft = list(range(40))
    source = source_of(draft)
    source.extend("r", [0, 1, 2, 50, 51, 52, 3])
    assert proposed(source) == []
    source.extend("r", [4])
    assert proposed(source, 3) == [5, 6, 7]
    source.extend("r", [20, 21])
    assert proposed(source, 3) == [22, 23, 24]


def test_an_answer_that_starts_otherwise_comes_back_to_the_draft() -> None:
    source = source_of(list(range(20)))
    source.extend("r", [70, 71, 72, 0, 1])
    assert proposed(source, 2) == [2, 3]
    assert source.outcome("r") == (20, 2)


def test_of_several_drafts_those_that_agree_lead_and_those_that_do_not_are_left() -> None:
    source = source_of([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 9, 9])
    assert proposed(source) == [5, 6, 7, 8]  # two of three begin with 5
    source.extend("r", [1])
    assert proposed(source) == [2, 3, 4]
    source.extend("r", [5, 6])  # the first is left, the others found again; the first of equals
    assert proposed(source) == [7, 8]
    source.extend("r", [9])
    assert proposed(source) == [9]


def test_longest_match_wins() -> None:
    source = source_of([9, 3, 4, 5], [1, 2, 3, 4, 6])
    source.extend("r", [7, 1, 2, 3, 4])
    assert proposed(source, 1) == [6]


def test_nothing_of_a_request_is_left_when_it_ends() -> None:
    source = source_of([1, 2, 3])
    source.finish("r")
    assert source.propose("r", 4) is None
    assert source.outcome("r") == (0, 0)
    assert source.stats() == {"requests": 0, "request_tokens": 0}
    source.extend("r", [1])
    source.finish("r")


def test_a_request_that_begins_again_follows_its_drafts_from_their_start() -> None:
    source = source_of([1, 2, 3])
    source.extend("r", [1, 9])
    source.begin("r", "", [])
    assert proposed(source) == [1, 2, 3]
    assert source.outcome("r") == (3, 0)


@pytest.mark.parametrize("bad", [[VOCAB], [1, -1], [1] * (MAX_TOKENS + 1)])
def test_what_cannot_be_used_is_left_out(bad: list[int]) -> None:
    assert problem(bad, VOCAB)
    source = GivenSource(VOCAB)
    assert not source.give("r", [bad, []])
    assert source.stats()["requests"] == 0
    assert source.give("r", [bad, [7, 8]])
    assert proposed(source) == [7, 8]


def test_bounds() -> None:
    assert problem([0] * MAX_TOKENS, VOCAB) == ""
    source = GivenSource(VOCAB)
    source.give("r", [[1] * MAX_TOKENS] * (MAX_DRAFTS + 5))
    assert source.stats()["request_tokens"] == MAX_DRAFTS * MAX_TOKENS
    source.extend("r", [2, *[1] * 500])  # the worst there is for finding it again: it occurs everywhere
    assert proposed(source, 4) == [1] * 4


class TestThoughts:
    """What whoever wrote a draft thought of its tokens."""

    TOP = (np.arange(12, dtype=np.int32).reshape(6, 2), np.full((6, 2), 0.25, np.float32))

    def test_go_with_the_tokens_until_the_output_leaves_the_draft(self) -> None:
        source = GivenSource(VOCAB)
        source.give("r", [[1, 2, 3, 4, 5, 6]], [self.TOP])
        source.extend("r", [1])
        found = source.propose("r", 3)
        assert found is not None
        assert found.top is not None
        np.testing.assert_array_equal(found.top[0], self.TOP[0][1:4])
        source.extend("r", [9, 1, 2, 3])
        again = source.propose("r", 2)
        assert again is not None
        assert again.tokens == [4, 5]  # found again, after words its writer did not have
        assert again.top is None

    def test_another_beginning_is_not_the_draft_from_its_start(self) -> None:
        source = GivenSource(VOCAB)
        source.give("r", [[1, 2, 3, 4, 5, 6]], [self.TOP])
        source.extend("r", [7, 1, 2])
        found = source.propose("r", 2)
        assert found is not None
        assert (found.tokens, found.top) == ([3, 4], None)

    def test_reach_whoever_verifies(self) -> None:
        rounds = DraftRounds("t", VOCAB, FaultPolicy(), Unconditional())
        rounds.begin("r", "chain", [1, 2], True, "", [], [[1, 2, 3, 4, 5, 6]], tops=[self.TOP])
        item = Running("r", [1], 3, lambda a, b: [1, 2, 1][a:b], 3, Sampling(0.0, 1))
        assert rounds.round([item])["r"] == [2, 3, 4]
        proposal = rounds.proposal("r")
        assert proposal is not None
        assert (proposal.base, proposal.tokens) == (3, [2, 3, 4])
        np.testing.assert_array_equal(proposal.ids, self.TOP[0][1:4])
        np.testing.assert_array_equal(proposal.probs, self.TOP[1][1:4])

    @pytest.mark.parametrize(
        ("ids", "probs"), [(b"", b""), (b"1234", b"12"), (b"1" * 16, b"1" * 7), (b"1" * 15, b"1" * 8)]
    )
    def test_what_does_not_fit_is_no_thought(self, ids: bytes, probs: bytes) -> None:
        assert top_of(2, ids, probs) is None
        assert top_of(0, ids, probs) is None


class TestRounds:
    """Beside the other sources."""

    @staticmethod
    def run(given: list[list[int]], truth: list[int], sources: list[str] | None = None, want: int = 4) -> DraftRounds:
        rounds = DraftRounds("t", VOCAB, FaultPolicy(), Unconditional())
        rounds.begin("r", "chain", [1, 2], True, "", sources, given)
        held, draft = [1, 2], []
        while len(held) < 2 + len(truth):
            new = []
            for token in [*draft, -1]:
                new.append(truth[(len(held) - 2 + len(new)) % len(truth)])
                if token != new[-1]:
                    break
            held += new
            item = Running("r", new, len(held), lambda a, b, held=held: held[a:b], want, Sampling(0.0, 1))
            draft = rounds.round([item]).get("r", [])
        return rounds

    def test_a_right_draft_saves_rounds_and_the_trace_says_so(self) -> None:
        truth = list(range(20))
        trace = self.run([truth], truth).take_trace("chain")
        assert trace is not None
        assert trace["rounds_n"] == 1 + 4  # 1, then four rounds of five
        assert {item["source"] for item in trace["rounds"][1:]} == {"given"}
        assert (trace["given"], trace["followed"]) == (20, 20)

    def test_sources_do_not_shut_out_what_the_request_brought(self) -> None:
        truth = list(range(20))
        assert self.run([truth], truth, sources=[]).stats()["accepted:given"] > 0

    def test_without_drafts_nothing_is_kept_and_nothing_asked(self) -> None:
        rounds = self.run([], list(range(20)))
        assert rounds.stats().get("drafted_tokens", 0) == 0
        assert rounds.stats()["source:given:requests"] == 0
        trace = rounds.take_trace("chain")
        assert trace is not None
        assert (trace["given"], trace["followed"]) == (0, 0)

    def test_totals_outlive_the_request(self) -> None:
        rounds = self.run([[0, 1, 2, 50, 51]], list(range(20)))
        rounds.finish(["r"])
        trace = rounds.take_trace("chain")
        assert trace is not None
        assert (trace["given"], trace["followed"]) == (5, 3)
        assert rounds.stats()["source:given:requests"] == 0
