"""Real drafts: a session that moves goes on with the very same numbers, and the slots of a busy draft stay side by side."""

import random

import numpy as np
import pytest

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Draft, Step
from deployments.draft.engine import DraftEngine
from deployments.draft.migration import MIGRATED, Migration
from hw.onnx.kv_identity import draft_manifest
from hw.onnx.session import OnnxModel
from tests.models import model as folder

pytestmark = pytest.mark.engine

NAME = "draft-int8"
PROMPT = [(7 * index * index + 11) % 40_000 for index in range(200)]


def load(slots: int) -> OnnxModel:
    return OnnxModel(folder(NAME), slots=slots, context=512)


def engine(model: OnnxModel, **more: object) -> DraftEngine:
    migration = Migration(model, draft_manifest(folder(NAME), "cpu"))
    faults = FaultPolicy(prefill_budget_s=60.0)
    arguments: dict[str, object] = {"top_k": 4, "paced": False, "prefill_wait_s": 60.0, "faults": faults, **more}
    return DraftEngine(model, migration=migration, **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def leaving() -> OnnxModel:
    return load(16)


@pytest.fixture(scope="module")
def staying() -> OnnxModel:
    return load(4)


def step(drafter: DraftEngine, *commits: Commit, closed: tuple[str, ...] = ()) -> list[Draft]:
    answer = drafter.step(Step(PROTOCOL_VERSION, "t", 1, 60.0, list(commits), list(closed)))
    drafter.check_integrity()
    return answer.drafts


def opening(name: str, tokens: list[int], want: int = 4) -> Commit:
    return Commit(name, 0, len(tokens), list(tokens), want)


def test_logits_after_a_move_are_the_same_bits(leaving: OnnxModel, staying: OnnxModel) -> None:
    source, destination = engine(leaving), engine(staying)
    step(source, opening("other", PROMPT[:20]), opening("a", PROMPT))
    step(destination, opening("b", PROMPT[5:15]), opening("c", PROMPT[9:15]))  # so that the session gets another slot
    destination.adopt(source.export_sessions())
    kept = len(PROMPT) - 1
    held = source._store.sessions["t", "a"].slot
    session, reason = destination._store.apply("t", opening("a", PROMPT, 0), 0.0)
    assert session is not None, reason
    assert session.slot != held
    assert destination._migration is not None
    assert destination._migration.take(session) == MIGRATED
    assert session.computed == kept

    here = leaving.read_kv(held, 0, kept)
    there = staying.read_kv(session.slot, 0, kept)
    assert here.dtype == np.float32
    assert np.array_equal(here.view(np.uint32), there.view(np.uint32))
    expected = leaving.decode([held], PROMPT[-1:], [kept])[0].copy()
    found = staying.decode([session.slot], PROMPT[-1:], [kept])[0]
    assert np.array_equal(expected.view(np.uint32), found.view(np.uint32))


def test_drafts_go_on_without_a_prefill(leaving: OnnxModel, staying: OnnxModel) -> None:
    source, destination = engine(leaving), engine(staying)
    first = step(source, opening("a", PROMPT))[0].tokens
    known = PROMPT + first[:2]
    expected = step(source, Commit("a", 0, len(known), first[:2], 4))[0].tokens
    destination.adopt(source.export_sessions())
    before = destination.stats()
    drafts = step(destination, opening("a", known))[0]
    after = destination.stats()
    assert drafts.tokens == expected
    assert after[MIGRATED] == 1
    assert after.get("prefills", 0) == before.get("prefills", 0)


def test_slots_stay_side_by_side_where_short_sessions_come_and_go(leaving: OnnxModel) -> None:
    rng = random.Random(5)
    drafter = engine(leaving, ahead=0)
    live: dict[str, list[int]] = {}
    resting: dict[str, int] = {}
    opened = 0
    drafts: dict[str, list[int]] = {}
    while opened < 300:
        commits, closed = [], []
        for name in list(live):
            if name in resting:
                resting[name] -= 1
                if not resting[name]:
                    del resting[name]
                continue
            chance = rng.random()
            if chance < 0.4:
                closed.append(name)
                del live[name]
            elif chance < 0.55:
                resting[name] = 3
                commits.append(Commit(name, 0, len(live[name]), [], 0))
            else:
                new = [*drafts.get(name, [])[: rng.randrange(3)], rng.randrange(40_000)]
                live[name] += new
                commits.append(Commit(name, 0, len(live[name]), new, 2))
        while opened < 300 and len(live) < 12:
            name, opened = str(opened), opened + 1
            live[name] = [rng.randrange(40_000) for _ in range(rng.randrange(2, 8))]
            commits.append(opening(name, live[name], 2))
        drafts = {draft.session: draft.tokens for draft in step(drafter, *commits, closed=tuple(closed))}
        drafter.idle(0.05)
    drafter.check_integrity()
    stats = drafter.stats()
    assert stats["rows"] > 1000
    assert stats["moves"] > 0
    assert stats["rows_fragmented"] <= 0.042 * stats["rows"]
    assert stats["integrity_violations"] == 0
