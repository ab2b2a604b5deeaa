"""Slots, their memory, provider profiles and step costs: what needs no ONNX file."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hw.onnx.costs import StepCosts
from hw.onnx.slots import KVBuffer, SlotTable, runs
from hw.providers import Tuning, UnknownProvider, get_profile, known_profiles


@given(st.lists(st.integers(0, 9), max_size=200))
def test_slot_table(actions: list[int]) -> None:
    table = SlotTable(5)
    taken: set[int] = set()
    for action in actions:
        if action < 5:
            slot = table.take()
            assert slot == min(set(range(5)) - taken, default=None)
            taken |= set() if slot is None else {slot}
        elif action - 5 in taken:
            table.give(action - 5)
            taken.remove(action - 5)
        else:
            with pytest.raises(KeyError):
                table.give(action - 5)
        assert table.taken == taken
        assert table.free == 5 - len(taken)
    for slot in range(5):
        if slot in taken:
            with pytest.raises(ValueError):
                table.claim(slot)
        else:
            table.claim(slot)
            assert slot in table.taken
    assert table.take() is None


@given(st.sets(st.integers(0, 40)), st.integers(0, 5))
def test_runs_cover_and_bridge(slots: set[int], gap: int) -> None:
    found = runs(sorted(slots), gap)
    covered = [slot for low, high in found for slot in range(low, high)]
    assert len(covered) == len(set(covered))
    assert slots <= set(covered)
    assert all(low in slots and high - 1 in slots for low, high in found)
    assert all(right[0] - left[1] > gap for left, right in itertools.pairwise(found))


def test_kv_buffer_moves_a_prefix_and_restores_the_first_position() -> None:
    kv = KVBuffer(layers=2, slots=3, kv_heads=2, context=8, head_dim=4)
    kv.array[:] = np.random.default_rng(0).normal(size=kv.array.shape)
    before = kv.array.copy()
    kv.move(2, 0, 5)
    assert np.array_equal(kv.array[:, 0, :, :5], before[:, 2, :, :5])
    assert np.array_equal(kv.array[:, 0, :, 5:], before[:, 0, :, 5:])
    assert np.array_equal(kv.array[:, 1:], before[:, 1:])
    saved = kv.first(1)
    kv.array[:, 1, :, 0] = 0
    kv.restore_first(1, saved)
    assert np.array_equal(kv.array[:, 1], before[:, 1])


def test_unknown_provider_names_the_known_ones() -> None:
    with pytest.raises(UnknownProvider, match="cpu"):
        get_profile("npu9000")
    assert get_profile("cpu").cannot
    assert "cpu" in known_profiles()


def test_tuning() -> None:
    assert Tuning(2, (0, 3)).session_entries() == {
        "session.intra_op.allow_spinning": "1",
        "session.intra_op_thread_affinities": "4",
    }
    assert Tuning().session_entries() == {"session.intra_op.allow_spinning": "0"}
    for threads, cores in ((0, ()), (2, (1,)), (2, (1, 1)), (1, (-1,))):
        with pytest.raises(ValueError):
            Tuning(threads, cores)


def test_costs_follow_what_calls_take() -> None:
    costs = StepCosts(1.0, 0.5, 1.0, 0.1)
    assert costs.decode(0) == costs.prefill(0) == 0.0
    for _ in range(100):
        costs.saw_decode(2, 6.0)
        costs.saw_prefill(10, 1.0)
    assert costs.decode(2) == pytest.approx(6.0, rel=0.01)
    assert costs.prefill(10) == pytest.approx(1.0, rel=0.01)
    assert costs.prefill(costs.prefill_fitting(3.0)) <= 3.0
    assert StepCosts().prefill_fitting(1.0) > 10**6
