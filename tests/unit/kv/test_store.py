"""The store's books under a fake clock: leases, generations, shares, eviction, and what is left after failures."""

import contextlib
import threading
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hw.kv.lease import Lease
from hw.kv.memory import GRANULE, PrivateMemory
from hw.kv.space import Space, longest
from hw.kv.store import Store
from hw.kv.transports.base import BlockError, BlockKey, Expired, Full, IntegrityError, Limits, Missing, Stale, TooLarge


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


def key(number: int, salt: bytes = b"") -> BlockKey:
    return BlockKey(b"m" * 32, number.to_bytes(32, "little"), salt)


def content(number: int, nbytes: int = GRANULE) -> np.ndarray:
    return np.full(nbytes, number % 251 + 1, np.uint8)


def make(granules: int = 8, **limits: float) -> tuple[Store, Clock]:
    clock = Clock()
    bounds = Limits(**{"tenant_share": 1.0, "lease_s": 2.0, **limits})  # type: ignore[arg-type]
    return Store(PrivateMemory(granules * GRANULE), bounds, clock_ns=clock), clock


def test_what_is_staged_is_invisible_until_published() -> None:
    store, _ = make()
    staged = store.stage(5000)
    staged.array[:] = 7
    assert key(1) not in store
    with pytest.raises(Missing):
        store.read(key(1))
    first = store.publish(staged, key(1))
    with store.read(key(1)) as block:
        assert block.view.readonly
        assert block.array.tolist() == [7] * 5000
    assert store.put(key(2), content(2)) > first
    store.check_integrity()


def test_publishing_waits_for_writers_to_let_go() -> None:
    store, _ = make()
    staged = store.stage(10)
    for over in (
        lambda: staged.array[2:5],
        lambda: staged.array.view(np.uint16)[1:],
        lambda: np.frombuffer(staged.view, np.int8),
    ):
        held = over()
        with pytest.raises(ValueError, match="still alive"):
            store.publish(staged, key(1))
        held[:] = 3
        del held
    store.publish(staged, key(1))
    with pytest.raises(ValueError, match="already"):
        staged.array.fill(1)
    with pytest.raises(ValueError, match="already"):
        store.publish(staged, key(2))


def test_failed_verification_zeroes_and_publishes_nothing() -> None:
    memory = PrivateMemory(8 * GRANULE)
    store = Store(memory, Limits(tenant_share=1.0))

    def refuse(view: memoryview) -> None:
        assert view.readonly
        assert bytes(view[:4]) == b"\x05\x05\x05\x05"
        raise KeyError("bad digest")

    with pytest.raises(KeyError):
        store.put(key(1), np.full(5000, 5, np.uint8), refuse)
    assert not any(memory.data)
    assert store.stats()["free_bytes"] == 8 * GRANULE
    assert store.counts["refused_verify"] == 1
    store.check_integrity()


def test_failure_while_writing_gives_the_room_back_once_nobody_can_write() -> None:
    store, _ = make(granules=2)
    kept = []

    def fail() -> None:
        with store.stage(2 * GRANULE) as staged:
            kept.append(staged.array)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(Full):
        store.stage(1)  # somebody could still write there
    kept[0][:] = 9
    kept.clear()
    again = store.stage(2 * GRANULE)
    assert not again.array.any()
    store.discard(again)
    store.discard(again)
    assert store.stats()["free_bytes"] == 2 * GRANULE
    store.check_integrity()


def test_read_after_free_and_after_reassignment() -> None:
    store, clock = make(granules=2)
    store.put(key(1), content(1, 2 * GRANULE))
    lease = store.lease(key(1))
    held = store.view(lease)
    clock.advance(1.9)
    with pytest.raises(Full):
        store.put(key(2), content(2))  # leased: stays
    clock.advance(0.2)
    held.check()  # over, yet the bytes are still there
    with pytest.raises(Expired):
        store.view(lease)
    store.put(key(2), content(2, 2 * GRANULE))  # the dead reader's block makes room
    out = content(5, 2 * GRANULE)
    with pytest.raises(Stale):
        held.copy_into(out)
    assert not out.any()  # nothing of the other block came through
    with pytest.raises(Stale):
        store.view(lease)
    with pytest.raises(Stale), held:
        pass
    store.drop(key(2))
    with pytest.raises(Stale):
        held.check()
    assert store.counts["expired"] == 1
    assert store.counts["evictions"] == 1
    store.check_integrity()


def test_same_bytes_count_under_another_generation_is_stale() -> None:
    store, clock = make(granules=1)
    store.put(key(1), content(1))
    lease = store.lease(key(1))
    clock.advance(3)
    for _ in range(3):
        store.put(key(1), content(1))  # same key, place and size
    with pytest.raises(Stale):
        store.view(lease)


def test_replaced_and_dropped_blocks_stay_for_who_reads_them() -> None:
    store, _ = make()
    store.put(key(1), content(1))
    old = store.read(key(1))
    store.put(key(1), content(2))
    new = store.read(key(1))
    assert store.drop(key(1))
    assert not store.drop(key(1))
    old.check()
    assert old.array[0] == content(1)[0]
    assert new.array[0] == content(2)[0]
    store.check_integrity()
    old.release()
    new.release()
    new.release()
    assert store.stats()["free_bytes"] == 8 * GRANULE
    store.check_integrity()


def test_least_recently_used_goes_first_and_the_leased_never() -> None:
    store, _ = make(granules=4)
    for number in range(4):
        store.put(key(number), content(number))
    lease = store.lease(key(0))
    with store.read(key(1)):
        pass
    store.put(key(9), content(9, GRANULE))
    assert [number for number in (0, 1, 2, 3, 9) if key(number) in store] == [0, 1, 3, 9]
    store.release(lease.number)
    store.release(lease.number)
    store.check_integrity()


def test_a_renewed_lease_does_not_shield_the_expired_ones_behind_it() -> None:
    store, clock = make(granules=3)
    for number in range(3):
        store.put(key(number), content(number))
    first = store.lease(key(0))
    others = [store.lease(key(number)) for number in (1, 2)]
    for _ in range(4):
        clock.advance(1.5)
        store.renew(first.number)
    store.put(key(3), content(3, 2 * GRANULE))
    assert key(0) in store
    assert store.counts["expired"] == len(others)
    clock.advance(2.5)
    with pytest.raises(Expired):
        store.renew(first.number)


def test_a_refused_block_evicts_nobody() -> None:
    store, _ = make(granules=4)
    for number in range(4):
        store.put(key(number), content(number))
    lease = store.lease(key(2))
    with pytest.raises(Full) as refused:
        store.stage(3 * GRANULE)  # the leased one leaves two granules and one, never three
    assert refused.value.code == "refused_full"
    assert len(store) == 4
    with pytest.raises(TooLarge):
        store.stage(5 * GRANULE)
    with pytest.raises(ValueError):
        store.stage(0)
    store.release(lease.number)
    store.put(key(5), content(5, 4 * GRANULE))
    assert len(store) == 1


def test_a_tenant_fills_its_share_and_no_more() -> None:
    store, _ = make(granules=8, tenant_share=0.5)
    store.put(key(100, b"other"), content(100))
    for number in range(10):
        store.put(key(number, b"greedy"), content(number))
    assert sum(key(number, b"greedy") in store for number in range(10)) == 4
    assert key(100, b"other") in store
    leases = [store.lease(key(number, b"greedy")) for number in range(6, 10)]
    with pytest.raises(Full) as refused:
        store.put(key(11, b"greedy"), content(11))
    assert refused.value.code == "refused_share"
    store.put(key(101, b"other"), content(101))
    for lease in leases:
        store.release(lease.number)
    store.check_integrity()


def test_salts_are_separate_key_spaces() -> None:
    store, _ = make()
    store.put(key(1, b"a"), content(1))
    with pytest.raises(Missing):
        store.read(key(1, b"b"))
    with pytest.raises(Missing):
        store.read(key(1))
    staged = store.stage(10, b"a")
    with pytest.raises(ValueError, match="salt"):
        store.publish(staged, key(2, b"b"))
    store.publish(staged, key(2, b"a"))


def test_a_reference_to_another_block_is_refused() -> None:
    store, _ = make()
    store.put(key(1), content(1))
    ref = store.lease(key(1)).ref("zeromq", "here")
    assert store.view(ref).array[0] == content(1)[0]
    for forged in (
        {"prefix": b"x" * 32}, {"manifest": b"x" * 32}, {"offset": GRANULE}, {"offset": 1}, {"nbytes": GRANULE + 1},
        {"generation": ref.generation + 1}, {"lease": ref.lease ^ 1},
    ):  # fmt: skip
        values = {name: getattr(ref, name) for name in ref.__struct_fields__}
        with pytest.raises(BlockError):
            store.view(type(ref)(**(values | forged)))


def test_leases_are_bounded() -> None:
    store, clock = make(leases=3)
    store.put(key(1), content(1))
    for _ in range(3):
        store.lease(key(1), 1e9)
    with pytest.raises(Full) as refused:
        store.lease(key(1))
    assert refused.value.code == "refused_leases"
    clock.advance(Limits().lease_max_s)
    store.lease(key(1))
    assert store.stats()["leases"] == 1


def test_closed_store_gives_nothing() -> None:
    store, _ = make()
    store.put(key(1), content(1))
    lease = store.lease(key(1))
    store.close()
    store.close()
    for action in (lambda: store.read(key(1)), lambda: store.view(lease), lambda: store.put(key(1), content(1))):
        with pytest.raises(BlockError):
            action()


def test_integrity_check_sees_damage() -> None:
    memory = PrivateMemory(8 * GRANULE)
    store = Store(memory, Limits(tenant_share=1.0))
    store.put(key(1), content(1))
    for place, value in (((0, 0), 77), ((0, 1), 5), ((3, 0), 1)):
        saved = int(memory.words[place])
        memory.words[place] = value
        with pytest.raises(IntegrityError):
            store.check_integrity()
        memory.words[place] = saved
    store._space.take(1)
    with pytest.raises(IntegrityError, match="lost"):
        store.check_integrity()


def test_threads_that_write_and_read_leave_the_books_right() -> None:
    store = Store(PrivateMemory(6 * GRANULE), Limits(tenant_share=1.0, lease_s=0.0))  # leases are over at once
    wrong: list[int] = []
    whole = [0]

    def write(seed: int) -> None:
        for turn in range(300):
            number = (seed * 7 + turn) % 5
            with contextlib.suppress(Full):  # leased for the moment
                store.put(key(number), content(number, GRANULE * (1 + turn % 2)))

    def read() -> None:
        turn, until = 0, time.monotonic() + 60.0
        while (turn < 600 or not whole[0]) and time.monotonic() < until:
            turn += 1
            try:
                # some end while they are copied, wherever the machine is fast or slow enough for that
                lease = store.lease(key(turn % 5), 0.0005 if turn % 2 else 0.02)
                out = np.zeros(lease.nbytes, np.uint8)
                store.view(lease).copy_into(out)
            except BlockError:
                continue
            whole[0] += 1
            if (out != content(turn % 5)[0]).any():
                wrong.append(turn)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert whole[0]
    store.check_integrity()


class Books(RuleBasedStateMachine):
    """Random work; after every step the books add up and every lease that is not over reads what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.clock = make(granules=12, tenant_share=0.75)
        self.leases: list[tuple[Lease, int]] = []
        self.values: dict[BlockKey, int] = {}
        self.turn = 0

    @rule(number=st.integers(0, 6), salt=st.sampled_from([b"", b"a"]), size=st.integers(1, 4 * GRANULE))
    def put(self, number: int, salt: bytes, size: int) -> None:
        self.turn += 1
        try:
            self.store.put(key(number, salt), content(self.turn, size))
        except Full:
            return
        self.values[key(number, salt)] = self.turn

    @rule(size=st.integers(1, 3 * GRANULE))
    def discard(self, size: int) -> None:
        try:
            self.store.discard(self.store.stage(size))
        except Full:
            return

    @rule(number=st.integers(0, 6), salt=st.sampled_from([b"", b"a"]), seconds=st.floats(0.1, 3))
    def lease(self, number: int, salt: bytes, seconds: float) -> None:
        try:
            lease = self.store.lease(key(number, salt), seconds)
        except Missing:
            return
        self.leases.append((lease, self.values[lease.key]))

    @rule(index=st.integers(0, 50))
    def release(self, index: int) -> None:
        if self.leases:
            self.store.release(self.leases.pop(index % len(self.leases))[0].number)

    @rule(seconds=st.floats(0, 2))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(number=st.integers(0, 6))
    def drop(self, number: int) -> None:
        self.store.drop(key(number))

    @invariant()
    def books_add_up(self) -> None:
        self.store.check_integrity()
        for lease, turn in self.leases:
            if lease.until_ns > self.clock.now:
                assert (self.store.view(lease).array == content(turn)[0]).all()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_space_joins_what_touches() -> None:
    space = Space(10)
    starts = [space.take(2) for _ in range(5)]
    assert starts == [0, 2, 4, 6, 8]
    assert space.take(1) is None
    for start in (2, 6, 4):
        space.give(start, 2)
    assert space.runs == ((2, 6),)
    assert (space.free, space.largest) == (6, 6)
    for bad in ((2, 1), (1, 2), (9, 2), (-1, 1), (0, 0)):
        with pytest.raises(ValueError):
            space.give(*bad)
    assert longest([(4, 2), (0, 3), (6, 1)]) == 3
