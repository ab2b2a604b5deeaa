"""What a step takes, by its tokens: whatever was observed, a prediction is a time."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.step_times import StepTimes

STEPS = st.tuples(st.sampled_from(["alone", "shared"]), st.integers(1, 1500), st.floats(1e-4, 30.0), st.booleans())


@given(st.lists(STEPS, min_size=1, max_size=60))
def test_predictions_are_positive_and_grow_with_the_tokens(steps: list[tuple[str, int, float, bool]]) -> None:
    times = StepTimes()
    for lane, tokens, seconds, plain in steps:
        times.observe(lane, tokens, seconds, plain)
        for asked in ("alone", "shared", "never seen"):
            predicted = [times.predict(asked, size) for size in (1, 2, 3, 8, 17, 64, 900, 5000)]
            assert predicted[0] > 0.0
            assert predicted == sorted(predicted)
            assert times.slope(asked, 4) > 0.0


def test_one_stall_of_a_large_step_does_not_make_small_ones_free() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe("alone", 40, 4.0, True)
    times.observe("alone", 64, 12.0)
    times.observe("alone", 1, 0.001)
    assert times.predict("alone", 1) > 0.0
