"""What lossy requests accept is not what lossless ones are planned with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.acceptance.family import LOSSLESS, family
from deployments.chain.acceptance.policy import BASES, NAMES, Policy, policy_of
from deployments.chain.controller import Controller, Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Sampling
from deployments.channel.inprocess import InProcessChannel
from deployments.target.rounds import DraftRounds
from deployments.target.sequence import Running
from tests.fakes import FakeDrafter


@pytest.mark.parametrize(
    "given_policy",
    [
        None,
        {"name": "lossless"},
        {"name": "nkl", "delta": 0},
        {"name": "probabilistic", "delta": 0.0},
        {"name": "block", "base": "lossless", "delta": 0.5},
    ],
)
def test_what_changes_no_token_is_lossless(given_policy: dict[str, object] | None) -> None:
    assert family(None if given_policy is None else policy_of(given_policy)) == LOSSLESS


@given(st.data())
def test_there_are_few_whatever_is_asked_for(data: st.DataObject) -> None:
    """One tenant cannot push the others' records out by asking for ever new values."""
    unit = st.floats(0.0, 1.0)

    def any_policy() -> Policy:
        delta = data.draw(unit)
        return Policy(
            name=data.draw(st.sampled_from(NAMES)),
            base=data.draw(st.sampled_from(BASES)),
            delta=delta,
            delta_max=data.draw(st.floats(delta, 1.0)),
            alpha=data.draw(unit),
            mask=data.draw(unit),
            similarity=data.draw(unit),
            length_scale=data.draw(st.integers(0, 1 << 20)),
        )

    names = {family(any_policy()) for _ in range(20)}
    octaves, rules, tenths = (
        range(-10, 1),
        ("nkl:nkl", "probabilistic:probabilistic", "block:nkl", "block:probabilistic"),
        range(11),
    )
    known = {LOSSLESS} | {f"{rule}:{octave}" for rule in rules for octave in octaves}
    assert names <= known | {f"semantic:{tenth / 10}" for tenth in tenths}


def test_laxer_is_another_family() -> None:
    assert family(policy_of({"name": "nkl"})) == family(policy_of({"name": "nkl", "delta": 0.14, "mask": 0.8}))
    assert family(policy_of({"name": "nkl"})) != family(policy_of({"name": "nkl", "delta": 0.6}))
    assert family(policy_of({"name": "nkl"})) != family(policy_of({"name": "block"}))


def test_records_are_kept_apart() -> None:
    controller = Controller()
    lossy = controller.view("t", "model", "nkl:nkl:-3")
    for _ in range(200):
        controller.verified(lossy, [0.5] * 4, 4)
        controller.asked(lossy, 4)
    fresh, other = controller.view("t", "model"), controller.view("t", "model", "nkl:nkl:-3")
    assert fresh.gain == Controller().view("t", "model").gain < other.gain
    assert fresh.record is not other.record is lossy.record


def test_a_request_is_remembered_among_its_like() -> None:
    """Through the rounds: the same tenant and draft, one request lossy, one not."""
    controller = Unconditional()
    rounds = DraftRounds("t", 100, FaultPolicy(draft_deadline_s=0.5), controller)
    rounds.set_channels({"a": InProcessChannel(FakeDrafter(lambda tokens, want: [7] * want))})
    kinds = {"lossy": "nkl:nkl:0", "plain": LOSSLESS}
    for name, kind in kinds.items():
        rounds.begin(name, name, [1, 2], False, "tenant", family=kind)

    def running(name: str, tokens: list[int], new: int) -> Running:
        return Running(name, tokens[-new:], len(tokens), lambda a, b: tokens[a:b], 3, Sampling(0.0, 1))

    assert rounds.round([running(name, [1, 2, 3], 1) for name in kinds]) == {"lossy": [7] * 3, "plain": [7] * 3}
    rounds.round([running("lossy", [1, 2, 3, 7, 7, 7, 5], 4), running("plain", [1, 2, 3, 5], 1)])
    records = {key[2]: record for key, record in controller._records.items()}
    assert set(records) == set(kinds.values())
    assert {key[:2] for key in controller._records} == {("tenant", next(iter(controller._records))[1])}
    assert records[kinds["lossy"]].gain > records[LOSSLESS].gain
