"""What drafts say of their tokens on its way to the sampler, and what comes back into counters and traces."""

import numpy as np
import pytest

from deployments.chain.controller import Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Commit, Draft, Sampling
from deployments.channel.inprocess import InProcessChannel
from deployments.target.rounds import DraftRounds
from deployments.target.sequence import Running
from tests.fakes import FakeDrafter
from tests.unit.draft_fakes import engine, opening, step

FAULTS = FaultPolicy(draft_deadline_s=0.5)
IDS, PROBS = np.asarray([[7, 9]] * 3, "<i4"), np.asarray([[0.5, 0.25]] * 3, "<f2")


class Telling(FakeDrafter):
    """Three tokens a round, with what it is told to say of them."""

    def __init__(self, top_k: int, ids: bytes, probs: bytes) -> None:
        super().__init__(lambda tokens, want: [7, 7, 7])
        self.top = (top_k, ids, probs)

    def _draft(self, commit: Commit) -> Draft:
        draft = super()._draft(commit)
        k, ids, probs = self.top
        return Draft(draft.session, draft.epoch, draft.base, draft.tokens, top_k=k, top_ids=ids, top_probs=probs)


def running(tokens: list[int], new: int, relaxed: tuple[int, ...] = ()) -> Running:
    return Running(
        "r", tokens[-new:], len(tokens), lambda a, b: tokens[a:b], 3, Sampling(0.0, 1), relaxed=relaxed
    )  # fmt: skip


def started(drafter: FakeDrafter) -> tuple[DraftRounds, dict[str, list[int]]]:
    rounds = DraftRounds("t", 100, FAULTS, Unconditional())
    rounds.set_channels({"a": InProcessChannel(drafter)})
    rounds.begin("r", "me", [1, 2], True)
    return rounds, rounds.round([running([1, 2, 3], 1)])


def test_a_proposal_says_what_the_draft_said() -> None:
    rounds, drafts = started(Telling(2, IDS.tobytes(), PROBS.tobytes()))
    found = rounds.proposal("r")
    assert found is not None
    assert (found.base, found.tokens) == (3, drafts["r"])
    assert found.ids.tolist() == IDS.tolist()
    assert found.probs.tolist() == PROBS.tolist()
    assert rounds.proposal("another") is None


@pytest.mark.parametrize(
    ("top_k", "ids", "probs"),
    [
        (0, b"", b""),
        (2, b"", b""),
        (2, IDS.tobytes(), PROBS.tobytes()[:-1]),
        (3, IDS.tobytes(), PROBS.tobytes()),
        (-2, IDS.tobytes(), PROBS.tobytes()),
    ],
)
def test_what_it_says_wrongly_is_not_said(top_k: int, ids: bytes, probs: bytes) -> None:
    """The draft itself is as good as any other: only an exact match passes."""
    rounds, drafts = started(Telling(top_k, ids, probs))
    assert drafts["r"] == [7, 7, 7]
    assert rounds.proposal("r") is None


def test_relaxed_tokens_are_counted_and_shown() -> None:
    rounds, _ = started(Telling(2, IDS.tobytes(), PROBS.tobytes()))
    # two of three accepted, the second let pass; what passed behind the accepted prefix does not count
    rounds.round([running([1, 2, 3, 7, 7, 5], 3, relaxed=(1, 2))])
    stats = rounds.stats()
    assert (stats["accepted_tokens"], stats["relaxed_tokens"]) == (2, 1)
    trace = rounds.take_trace("me")
    assert trace is not None
    assert trace["relaxed"] == 1
    assert trace["rounds"][-1]["relaxed"] == [1]


def test_a_draft_sends_probabilities_where_they_are_of_use() -> None:
    for probs in (True, False):
        commit = opening("a", [1, 2], 4, sampling=Sampling(0.0, 0, probs=probs))
        draft = step(engine(top_k=3), [commit]).drafts[0]
        assert draft.has_top() == probs
        assert len(draft.top_probs) == (2 * 3 * len(draft.tokens) if probs else 0)
