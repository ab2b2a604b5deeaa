"""Computing for a while, as an engine does between two messages: a core that has just slept is another core."""

import time

STEP_S = 0.02  # of computing before each message
WARM_UP = 10  # messages before those that count


def compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
