"""Rounds as reported, and cutting them to what the client received."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.trace import Round, Trace, clip


def a_round(base: int, drafted: list[int], accepted: int, own: list[int], reason: str = "") -> Round:
    return Round(base, drafted, accepted, own, "int4", 1.0, 0.5, reason)


def test_totals_are_kept_without_rounds() -> None:
    trace = Trace(keep_rounds=False, prompt_tokens=5)
    trace.add(a_round(5, [1, 2, 3], 2, [9]))
    trace.add(a_round(8, [], 0, [4], "deadline"))
    result = trace.as_dict()
    assert (result["drafted"], result["accepted"], result["rounds_n"]) == (3, 2, 2)
    assert result["reasons"] == {"deadline": 1}
    assert result["rounds"] == []


@given(st.lists(st.integers(0, 4), min_size=1, max_size=10), st.integers(0, 60))
def test_clip_keeps_exactly_the_tokens_sent(accepted: list[int], completion: int) -> None:
    trace = Trace(keep_rounds=True, prompt_tokens=0)
    base = 0
    for count in accepted:
        trace.add(a_round(base, [1] * 4, count, [9]))
        base += count + 1
    clipped = clip(trace.as_dict(), completion)
    kept = sum(item["accepted"] + len(item["own"]) for item in clipped["rounds"])
    assert kept == min(completion, base)
    assert all(item["accepted"] or item["own"] for item in clipped["rounds"])


def test_clip_drops_relaxed_tokens_that_were_not_sent() -> None:
    trace = Trace(keep_rounds=True, prompt_tokens=0)
    item = a_round(0, [1, 2, 3, 4], 4, [9])
    item.relaxed = [1, 3]
    trace.add(item)
    assert trace.as_dict()["relaxed"] == 2
    assert clip(trace.as_dict(), 3)["rounds"][0]["relaxed"] == [1]
    assert clip(trace.as_dict(), 5)["rounds"][0]["relaxed"] == [1, 3]
