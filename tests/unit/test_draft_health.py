"""Slots of a draft in use: sessions come, rest, branch and go, and the rows of its steps stay side by side."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.protocol import PROTOCOL_VERSION, UNKNOWN_SESSION, Commit, Step
from deployments.draft import runner as running
from deployments.draft.choose import Logits
from deployments.draft.engine import DraftEngine
from deployments.draft.health import count_rows, faulty, fragmentation, next_move, worth_copying
from deployments.draft.lines import Spare
from deployments.draft.sessions import SessionStore
from hw.onnx.costs import StepCosts
from hw.onnx.slots import runs
from tests.unit.draft_fakes import VOCAB, Clock, FakeModel, check_kv, engine, opening, step

COSTS = (0.0166, 0.0028, 0.0150, 0.0028)  # the INT8 draft on one core
COPY_S = 20e-6  # of one position there
ENDLESS = 2**31


class Rows(FakeModel):
    """Steps cost what they cost a model whose rows must be consecutive."""

    def __init__(self, slots: int, clock: Clock) -> None:
        super().__init__(slots=slots, context=256, clock=clock)
        self.costs = StepCosts(*COSTS)
        self.gap = self.costs.bridged_gap(slots)
        self.rows = self.asked = self.steps = self.splits = 0

    def decode(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> list[Logits]:
        ranges = runs(sorted(slots), self.gap)
        rows = sum(high - low for low, high in ranges)
        self.rows += rows
        self.asked += len(slots)
        self.splits += len(ranges) - 1
        self._spend((len(ranges) - 1) * COSTS[0] + (rows - len(slots)) * COSTS[1])
        return super().decode(slots, tokens, lengths)

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        super().move(source, target, length, start)
        self._spend((length - start) * COPY_S)


class Churn:
    """Short sessions of one target; some rest for a while, and the target leaves the main line now and then."""

    def __init__(self, concurrent: int, *, seed: int, ahead: int | None, sessions: int = 300) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.model = Rows(16, self.clock)
        self.drafter = engine(self.model, clock=self.clock, ahead=ahead)
        self._concurrent, self._to_come = concurrent, sessions
        self._tokens: dict[str, list[int]] = {}
        self._left: dict[str, int] = {}
        self._rest: Counter[str] = Counter()
        self._drafts: dict[str, list[int]] = {}

    def run(self, idle_s: float) -> dict[str, float]:
        """Until the last session ended; the engine's counters then. Books and KV are checked in each round."""
        while self._to_come or self._tokens:
            answer = step(self.drafter, self._commits(), self._ended())
            self._drafts = {draft.session: draft.tokens for draft in answer.drafts}
            until = self.clock.now + idle_s
            self.drafter.idle(idle_s)
            check_kv(self.drafter)
            self.clock.now = max(self.clock.now, until)
        return self.drafter.stats()

    def _ended(self) -> list[str]:
        ended = [name for name, left in self._left.items() if left <= 0 or len(self._tokens[name]) > 200]
        for name in ended:
            del self._tokens[name], self._left[name]
        return ended

    def _commits(self) -> list[Commit]:
        commits = []
        for name, tokens in self._tokens.items():
            if self._rest[name] > 0:
                self._rest[name] -= 1
            elif self.random.random() < 0.05:
                self._rest[name] = self.random.randrange(2, 20)
                commits.append(Commit(name, 0, len(tokens), [], 0))
            else:
                self._left[name] -= 1
                new = self._chosen(name)
                tokens += new
                commits.append(Commit(name, 0, len(tokens), new, 4))
        if self._to_come and len(self._tokens) < self._concurrent and self.random.random() < 0.5:
            name = f"s{self._to_come}"
            self._to_come -= 1
            self._tokens[name] = [self.random.randrange(VOCAB) for _ in range(self.random.randrange(5, 100))]
            self._left[name] = self.random.randrange(3, 30)
            commits.append(opening(name, self._tokens[name], 4))
        return commits

    def _chosen(self, name: str) -> list[int]:
        session = self.drafter._store.sessions.get(("t", name))
        guess = session.guess if session is not None else []
        new: list[int] = []
        for index, token in enumerate([*self._drafts.get(name, []), -1]):
            known = guess[index] if index < len(guess) else None
            if known is not None and self.random.random() < 0.75:
                new.append(known.token)
                if token < 0:
                    break
                continue
            runners = known.runners if known is not None and self.random.random() < 0.6 else ()
            new.append(runners[0] if runners else self.random.randrange(VOCAB))
            break
        return new


@pytest.mark.parametrize("ahead", [None, 0])
@pytest.mark.parametrize("concurrent", [6, 10, 14])
def test_churn_leaves_the_rows_of_a_step_side_by_side(
    concurrent: int, ahead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mended = Churn(concurrent, seed=concurrent, ahead=ahead, sessions=120)
    stats = mended.run(0.1)
    assert stats["rows"] == mended.model.rows
    assert stats["rows_wasted"] == mended.model.rows - mended.model.asked
    assert stats["calls_split"] == mended.model.splits
    assert stats["rows_fragmented"] <= 0.042 * stats["rows"]

    monkeypatch.setattr(running, "next_move", lambda store, most: None)
    left = Churn(concurrent, seed=concurrent, ahead=ahead, sessions=120)
    before = left.run(0.1)
    assert before["moves"] == 0
    assert before["rows_fragmented"] > 0.2 * before["rows"]
    assert stats["rows_wasted"] / stats["rows"] < 0.6 * before["rows_wasted"] / before["rows"]


def test_without_idle_time_a_draft_makes_the_moves_that_it_makes_up_for() -> None:
    churn = Churn(10, seed=1, ahead=None, sessions=120)
    stats = churn.run(0.0)
    assert stats["moves"] > 0
    assert stats["rows_fragmented"] <= 0.042 * stats["rows"]


def test_idle_time_goes_on_moving_until_nothing_helps() -> None:
    drafter = engine(FakeModel(slots=8), ahead=0)
    step(drafter, [opening(name, [3, ord(name) % VOCAB], 1) for name in "abcdef"])
    step(drafter, [Commit(name, 0, 2, [], 0) for name in "ace"], number=2)  # they rest, between the others
    assert drafter.stats()["slot_fragmentation"] == pytest.approx(2 / 5)
    while drafter.idle(1e9):
        pass
    drafter.check_integrity()
    check_kv(drafter)
    store = drafter._store
    assert {store.sessions["t", name].slot for name in "bdf"} == {0, 1, 2}
    assert drafter.stats()["slot_fragmentation"] == 0.0
    assert drafter.stats()["moves"] > 0


# --- the parts --------------------------------------------------------------------------------------------------------


def test_rows_are_counted_by_why_they_are_computed() -> None:
    counts: Counter[str] = Counter()
    count_rows([0, 2, 4, 9], {0, 2, 3, 4, 9}, 1, counts)  # 1 and 3 are bridged, 5 to 8 are too many
    assert counts == {"rows": 6, "rows_wasted": 2, "rows_fragmented": 1, "calls_split": 1}
    count_rows([5], set(), 1, counts)
    assert counts["rows"] == 7
    assert counts["rows_wasted"] == 2


def test_a_copy_is_worth_the_rows_it_saves() -> None:
    assert worth_copying(StepCosts(0.01, 0.002, 0.0, 0.0), 1e-4, 5) == 100
    assert worth_copying(StepCosts(0.01, 0.0, 0.0, 0.0), 1e-4, 5) == 0  # where rows cost nothing
    assert worth_copying(StepCosts(), 1e-4, 5) == ENDLESS


def a_store(layout: str, rest: str, spares: dict[str, int]) -> SessionStore:
    """One session a letter in the slot of its place, "." is free; those of ``rest`` want nothing. ``spares``: slot by owner."""
    store = SessionStore(len(layout), 64, VOCAB, 60.0)
    lent = {slot: owner for owner, slot in spares.items()}
    for slot, name in enumerate(layout):
        assert store.table.take() == slot
        if name.isalpha():
            store.table.give(slot)
            session, _ = store.apply("t", opening(name, [1] * (10 + slot), 0 if name in rest else 4), 0.0)
            assert session is not None
            assert session.slot == slot
            session.computed = 9
    for slot, owner in lent.items():
        store.sessions["t", owner].spares.append(Spare(slot, 7))
    for slot, name in enumerate(layout):
        if name == ".":
            store.table.give(slot)
    store.check()
    return store


@pytest.mark.parametrize(
    ("layout", "rest", "spares", "expected"),
    [
        ("ab..", "", {}, None),
        ("....", "", {}, None),
        ("a..b", "b", {}, None),  # what rests is in nobody's way
        ("a.b.", "", {}, ("b", 1, 0)),
        ("-ab.", "", {"b": 0}, ("b", 0, 7)),  # its own spare holds most of it
        ("-ab.", "", {"a": 0}, ("b", 0, 0)),
        ("rab..", "r", {}, ("r", 4, 0)),  # first out of the way, as far as it goes
        ("rab-", "r", {"a": 3}, ("r", 3, 0)),
        ("rabc", "r", {}, None),  # no room to turn
    ],
)
def test_moves(layout: str, rest: str, spares: dict[str, int], expected: tuple[str, int, int] | None) -> None:
    store = a_store(layout, rest, spares)
    move = next_move(store, ENDLESS)
    if expected is None:
        assert move is None
        return
    assert move is not None
    name, target, start = expected
    assert (move.line, move.target, move.start) == (store.sessions["t", name], target, start)
    assert next_move(store, 0) is None
    store.relocate(move.line, move.target)
    store.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("ar.-"), min_size=1, max_size=12), st.randoms())
def test_moves_end_and_leave_sessions_in_use_side_by_side(kinds: list[str], shuffled: random.Random) -> None:
    names = [chr(ord("a") + index) for index in range(len(kinds))]
    owners = [name for name, kind in zip(names, kinds, strict=True) if kind in "ar"]
    layout = "".join(name if kind in "ar" else kind if owners else "." for name, kind in zip(names, kinds, strict=True))
    rest = "".join(name for name, kind in zip(names, kinds, strict=True) if kind == "r")
    store = a_store(layout.replace("-", "."), rest, {})
    for slot, kind in enumerate(layout):
        if kind == "-":
            store.table.claim(slot)
            store.sessions["t", shuffled.choice(owners)].spares.append(Spare(slot, shuffled.randrange(9)))
    store.check()
    moves = 0
    while (move := next_move(store, ENDLESS)) is not None:
        assert move.line.slot != move.target
        store.relocate(move.line, move.target)
        store.check()
        moves += 1
        assert moves <= 2 * len(kinds)
    room = "." in layout or "-" in layout
    assert fragmentation(store.sessions.values()) == 0.0 or not room


# --- the books --------------------------------------------------------------------------------------------------------


def looked_after() -> tuple[DraftEngine, Clock]:
    clock = Clock()
    drafter = engine(FakeModel(slots=6), clock=clock, ahead=0, check_s=1.0)
    step(drafter, [opening(name, [5, ord(name) % VOCAB], 1, tenant=name) for name in "abc"])
    return drafter, clock


def test_the_books_are_checked_when_idle_and_not_more_often_than_asked() -> None:
    drafter, clock = looked_after()
    for expected in (0, 1, 2):
        for _ in range(5):
            drafter.idle(1.0)
            assert drafter.stats()["integrity_checks"] == expected
        clock.now += 1.0
    assert drafter.stats()["integrity_violations"] == 0


@pytest.mark.parametrize("damage", ["shared_slot", "computed", "key", "leaked_slot", "tenants"])
def test_wrong_books_cost_the_sessions_concerned_and_nothing_else(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, clock = looked_after()
    store = drafter._store
    a, b, c = (store.sessions["t", name] for name in "abc")
    concerned: set[str] = set()
    match damage:
        case "shared_slot":
            b.slot, concerned = a.slot, {"a", "b"}
        case "computed":
            b.computed, concerned = 99, {"b"}
        case "key":
            c.key, concerned = ("t", "z"), {"c"}
        case "leaked_slot":
            store.table.take()
        case "tenants":
            store._held["nobody"] = 3
    assert faulty(store) == {("t", name) for name in concerned}
    clock.now += 2.0
    drafter.idle(1.0)
    drafter.check_integrity()
    stats = drafter.stats()
    assert stats["integrity_violations"] == 1
    assert stats.get("dropped", 0) == len(concerned)
    assert {name for _, name in store.sessions} == set("abc") - concerned
    assert "books" in caplog.text
    commits = [Commit(name, 0, 3, [7], 1) for name in "abc"]
    drafts = drafter.step(Step(PROTOCOL_VERSION, "t", 9, 10.0, commits, [])).drafts
    for draft in drafts:
        lost = draft.session in concerned
        assert draft.reason == (UNKNOWN_SESSION if lost else "")
        assert bool(draft.tokens) != lost
    clock.now += 2.0
    drafter.idle(1.0)
    assert drafter.stats()["integrity_violations"] == 1
