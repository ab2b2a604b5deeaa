"""scripts/kv bench: how turns are taken, and what figures are made of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.kv_lib.turns import line, speed, take_turns, timed


@given(st.floats(0.01, 10), st.floats(1e-6, 1e-3), st.lists(st.integers(1, 10**6), min_size=2, unique=True))
def test_the_line_through_points_of_a_line_is_that_line(fixed: float, slope: float, sizes: list[int]) -> None:
    found = line(sizes, [fixed + slope * size for size in sizes])
    for size in (min(sizes), max(sizes)):
        assert found[0] + found[1] * size == pytest.approx(fixed + slope * size, rel=1e-3)


def test_a_line_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        line([5, 5], [1.0, 2.0])


def test_turns_are_taken_alternately_and_counted() -> None:
    said: list[str] = []
    works = [timed("a", lambda: said.append("a")), timed("b", lambda: said.append("b"))]
    slow = timed("slow", lambda: said.append("slow"))
    taken = take_turns(works, 2, 3, lambda fraction, doing: None, "", [slow])
    assert {name: [len(part) for part in parts] for name, parts in taken.items()} == {
        "a": [3, 3],
        "b": [3, 3],
        "slow": [1, 1],
    }
    assert said[:3] == ["a", "b", "slow"]  # these do not count
    assert [said[3], said[6]] == ["a", "b"]  # who begins changes


def test_speed_is_taken_within_repetitions() -> None:
    taken = {"copy": [[1.0, 1.0], [10.0]], "work": [[2.0, 2.0], [20.0]]}
    found = speed(taken, "work", 4_000_000, "copy")
    assert found["of_copy"] == pytest.approx(0.5)
    assert found["gb_per_s"] == pytest.approx(2.0)
