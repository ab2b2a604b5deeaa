"""Which rows a step computes, and when it should start."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.protocol import Sampling
from deployments.draft.calibration import Calibration
from deployments.draft.choose import Choice
from deployments.draft.lines import Branch, Session
from deployments.draft.pace import Pace
from deployments.draft.schedule import (
    Row,
    Start,
    best_rows,
    idle_rows,
    reading_alone_is_cheaper,
    step_seconds,
    use_of_reading,
    wanted_rows,
)
from hw.onnx.costs import StepCosts

COSTS = StepCosts(0.010, 0.001, 0.010, 0.002)


def choice(token: int, confidence: float, runners: tuple[int, ...] = (90, 91, 92)) -> Choice:
    return Choice(token, np.empty(0, np.int32), np.empty(0, np.float16), 1.0, runners, confidence)


def session(*confidences: float, committed: int = 3, want: int = 4, sent: int = 4, slot: int = 0) -> Session:
    made = Session(("t", "a"), slot, 0, Sampling(0.0, 0), list(range(committed)), 0.0, want=want, depth=want, sent=sent)
    made.guess = [choice(10 + index, confidence) for index, confidence in enumerate(confidences)]
    made.computed = made.total - 1
    return made


def rows_of(held: Session, **more: object) -> list[Row]:
    arguments: dict[str, object] = {"ahead": None, "context": 1000, "copy_s": 0.0, "branching": True, **more}
    return idle_rows(held, Calibration(), **arguments)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 0.1), st.floats(0, 0.1))
def test_best_rows_have_the_best_rate_of_all_numbers_of_rows(values: list[float], base_s: float, row_s: float) -> None:
    costs = StepCosts(base_s, row_s)
    rows = [Row(value, session(slot=index)) for index, value in enumerate(values)]
    best = best_rows(rows, costs, 0)
    ordered = sorted(values, reverse=True)
    assert sorted((row.value for row in best), reverse=True) == ordered[: len(best)]
    if costs.decode(1) > 0 and values:
        rate = sum(row.value for row in best) / step_seconds(best, costs)
        for count in range(1, len(values) + 1):
            assert rate >= sum(ordered[:count]) / costs.decode(count) * (1 - 1e-9)
    elif values:
        assert len(best) == len(values)  # what costs nothing is all done


def test_no_more_branches_start_than_slots_allow() -> None:
    held = session(0.9)
    rows = [Row(0.5, held), *(Row(0.4, Start(held, 3, token, 0)) for token in range(5))]
    assert [isinstance(row.work, Start) for row in best_rows(rows, StepCosts(), 2)] == [False, True, True]


def test_a_dear_copy_keeps_a_branch_out() -> None:
    held = session(0.9)
    start = Start(held, 3, 1, 0)
    assert len(best_rows([Row(0.9, held), Row(0.3, start, 0.0)], COSTS, 9)) == 2
    assert len(best_rows([Row(0.9, held), Row(0.3, start, 0.1)], COSTS, 9)) == 1


def test_values_of_the_main_line_and_of_branches() -> None:
    held = session(0.9, 0.5, 0.8)
    held.branches.append(Branch(held, 4, 90, 0, slot=1, computed=5, guess=[choice(1, 0.6)]))
    shares = Calibration().shares(True)
    rows = rows_of(held)
    assert rows[0].work is held
    assert rows[0].value == pytest.approx(0.9 * 0.5 * 0.8)
    assert rows[1].work is held.branches[0]
    assert rows[1].value == pytest.approx(0.9 * 0.5 * shares[0] * 0.6)
    starts = {(row.work.start, row.work.token): row.value for row in rows[2:] if isinstance(row.work, Start)}
    assert starts == pytest.approx(
        {
            (3, 90): 0.1 * shares[0],
            (4, 91): 0.9 * 0.5 * shares[1],  # the first is taken
            (5, 90): 0.9 * 0.5 * 0.2 * shares[0],
        }
    )


def test_lines_end_where_the_next_draft_would() -> None:
    assert [row for row in rows_of(session(*[0.9] * 9)) if isinstance(row.work, Session)] == []
    assert rows_of(session(*[0.9] * 8))[0].near is False
    assert rows_of(session(*[0.9] * 4))[0].near is True
    assert [row for row in rows_of(session(*[0.9] * 4), context=7) if isinstance(row.work, Session)] == []
    assert rows_of(session(*[0.9] * 5), ahead=1) == []
    starts = [row.work.start for row in rows_of(session(*[0.5] * 9, sent=2)) if isinstance(row.work, Start)]
    assert max(starts) <= 3 + 2  # the target cannot part from the main line further on in this round


def test_copies_are_counted_from_what_a_spare_holds() -> None:
    held = session(0.5, 0.5)
    assert [row.setup_s for row in rows_of(held, copy_s=1.0)[1:]] == [3.0, 4.0]


def test_what_is_not_computed_cannot_be_branched_off() -> None:
    held = session(0.5, 0.5, 0.5)
    held.computed = 3
    assert [row.work.start for row in rows_of(held) if isinstance(row.work, Start)] == [3]


def test_a_session_that_has_to_read_first_is_worth_less() -> None:
    calibration = Calibration()
    ready, behind = session(0.5), session(0.5)
    behind.computed -= 2
    first, second = wanted_rows([ready, behind], calibration)
    assert first.value == pytest.approx(0.5 * calibration.mean(True))
    assert second.value == pytest.approx(first.value / 3)


def test_use_of_reading() -> None:
    held = session(0.8, 0.5)
    held.computed = 2  # one committed token and two guessed ones to read
    assert use_of_reading(held) == pytest.approx((1 + 0.8 + 0.4) / 3)
    held.computed = 4
    assert use_of_reading(held) == pytest.approx(0.4)


def test_several_tokens_are_read_in_one_call_where_that_is_cheaper() -> None:
    held = session(committed=12)
    held.computed = 0
    assert reading_alone_is_cheaper([held], COSTS)
    assert not reading_alone_is_cheaper([held], StepCosts(0.010, 0.001, 0.010, 0.020))


# --- pace -------------------------------------------------------------------------------------------------------------


def paced(gap_s: float) -> Pace:
    pace = Pace()
    pace.answered(10.0)
    pace.received(10.0 + gap_s)
    pace.answered(20.0)
    return pace


def test_a_step_pays_when_it_fits_or_saves_more_than_it_delays() -> None:
    pace = paced(0.020)
    assert Pace().pays(0.0, 1.0, 0.0)  # nothing known of the rhythm
    assert pace.pays(20.005, 0.010, 0.0)  # fits
    assert not pace.pays(20.015, 0.010, 0.004)  # 5 ms too long
    assert pace.pays(20.015, 0.010, 0.006)
    assert not pace.pays(21.0, 0.010, 0.009)  # overdue: the whole step may be delay, but no more
    assert pace.pays(21.0, 0.010, 0.011)


def test_without_a_worth_a_step_saves_its_own_time() -> None:
    pace = paced(0.020)
    assert pace.worthwhile(20.015, 0.010, 0.6)
    assert not pace.worthwhile(20.015, 0.010, 0.4)
