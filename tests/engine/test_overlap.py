"""Output equals plain decoding with everything on: the controller, suffix drafts, and a real draft that works ahead.

The draft runs in a thread of its own, so messages meet it in the middle of its work; the channel loses, delays and reorders
them as hypothesis pleases.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.chain.controller import Controller, Unconditional
from deployments.channel.inprocess import OverlappedChannel
from deployments.draft.engine import DraftEngine
from deployments.draft.kv_intake import make_intake
from deployments.kv import INLINE, SHARED_MEMORY
from deployments.target.sources import make_sources
from hw.onnx.session import OnnxModel
from tests.engine.conftest import Engine
from tests.engine.prompts import PROMPTS
from tests.engine.test_equality import reference, same
from tests.models import model

pytestmark = pytest.mark.engine

KINDS = ["greedy", "seeded", "hot_top_p", "penalties", "logprobs", "json_schema", "stop_string", "min_tokens"]


@pytest.fixture(scope="module")
def onnx() -> OnnxModel:
    return OnnxModel(model("draft-int4"), slots=48, context=1024)


@pytest.fixture(params=["adaptive", "unconditional"])
def everything(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine with suffix drafts; what it learns is forgotten afterwards."""
    rounds = engine.rounds()
    kept = rounds.controller, rounds._sources
    rounds.controller = Controller() if request.param == "adaptive" else Unconditional()
    rounds._sources = make_sources(["suffix"])
    yield engine
    engine.drafts()
    rounds.controller, rounds._sources = kept


def overlapped(onnx: OnnxModel, **channel: Any) -> OverlappedChannel:
    intake = make_intake(onnx, model("draft-int4"), "cpu")
    return OverlappedChannel(DraftEngine(onnx, top_k=0, kv=intake), **channel)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_plain(everything: Engine, onnx: OnnxModel, kind: str) -> None:
    engine = everything
    expected = reference(engine, kind)
    channel = overlapped(onnx)
    engine.drafts(a=channel)
    outputs = []
    for first in range(0, len(PROMPTS), 8):  # few at once: in a large batch the controller would draft nothing
        some = slice(first, first + 8, 2)  # the others are drafted for by the same model in test_equality
        outputs += engine.generate(PROMPTS[some], expected.params[some])
    same(expected.outputs[::2], outputs)
    stats = engine.stats()
    assert channel.failure is None
    assert stats["drafted_tokens"] > 0
    assert stats["accepted_tokens"] > 0
    engine.drafts()  # ends the draft's thread: its state is looked at from this one
    channel.drafter.check_integrity()


@given(
    faults=st.lists(st.sampled_from(["ok", "ok", "ok", "lose", "mute", "late", "hold"]), min_size=3, max_size=9),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.002, 0.02, 0.06]), min_size=2, max_size=5),
    kind=st.sampled_from(["greedy", "seeded", "penalties"]),
    link=st.sampled_from(["", SHARED_MEMORY, INLINE]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equal_to_plain_whatever_the_channel_does(
    engine: Engine, onnx: OnnxModel, faults: list[str], delays: list[float], kind: str, link: str
) -> None:
    expected = reference(engine, kind)
    channel = overlapped(
        onnx,
        fault=lambda number: faults[number % len(faults)],
        delay=lambda number: delays[number % len(delays)],
    )
    engine.drafts(a=channel)
    kv = engine.kv()
    channel.drafter.meet(kv.offer())
    kv.connect([{"name": "a", "kv": link}])  # without a link the draft reads prompts itself
    engine.rounds().send_kv(kv.export)
    some = slice(0, 6)
    try:
        same(expected.outputs[some], engine.generate(PROMPTS[some], expected.params[some]))
    finally:
        engine.rounds().send_kv(None)
    assert channel.failure is None
    engine.drafts()
    channel.drafter.check_integrity()
