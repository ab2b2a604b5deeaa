"""A core is lent to drafts that work while the engine computes, not to those that wait for its hidden states."""

import pytest

from deployments.chain.controller import Controller
from deployments.channel.inprocess import InProcessChannel
from deployments.kv import HIDDEN
from tests.fakes import FakeDrafter, half_right
from tests.unit.test_hidden_states import VOCAB, engine, truth


@pytest.mark.parametrize("asks", [True, False])
def test_a_core_is_lent_to_a_draft_that_works_beside(asks: bool) -> None:
    played, _ = engine({"r1": 20})
    if not asks:
        played.hidden.connect([])
    played.step()
    played.step()
    assert played.rounds.stats()["drafted_tokens"] > 0
    assert played.rounds.lends is not asks
    assert played.rounds.drafts_beside is not asks


def test_one_draft_beside_is_enough() -> None:
    played, _ = engine({"r1": 20})
    played.rounds.set_channels(
        {name: InProcessChannel(FakeDrafter(half_right([truth(1)], VOCAB))) for name in ("a", "b")}
    )
    assert played.rounds.drafts_beside
    played.hidden.connect([{"name": name, "kv": HIDDEN} for name in ("a", "b")])
    assert not played.rounds.drafts_beside


def test_other_drafts_are_judged_anew() -> None:
    controller = Controller(lends=True)
    many = 8
    assert not controller.announces(many)  # a lent core was not measured to pay there
    controller.lends = True
    assert not controller.announces(many)
    controller.lends = False
    assert controller.announces(many)
