"""Timing things that are compared: they take turns, call by call, so that whatever the machine does meets all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence

from scripts.profile_lib.figures import Samples, figures, paired_ratio, pooled

Work = Callable[[], Mapping[str, float]]  # one turn: milliseconds by name
Tell = Callable[[float, str], None]  # how much is done (0 to 1), and what comes next
Taken = dict[str, list[list[float]]]  # milliseconds by name, one list a repetition


def timed(name: str, call: Callable[[], object]) -> Work:
    """A turn that times one call."""

    def once() -> dict[str, float]:
        started = time.perf_counter_ns()
        call()
        return {name: (time.perf_counter_ns() - started) / 1e6}

    return once


def take_turns(
    works: Sequence[Work], repetitions: int, calls: int, tell: Tell, doing: str, once: Sequence[Work] = ()
) -> Taken:
    """``repetitions`` x ``calls`` turns of each of ``works``, after one that does not count; who begins changes each time.

    ``once``: slow ones, which get a single turn a repetition.
    """
    taken: Taken = {}
    for work in (*works, *once):
        work()
    for repetition in range(repetitions):
        tell(repetition / repetitions, doing)
        for call in range(calls):
            first = (repetition * calls + call) % len(works)
            for work in (*works[first:], *works[:first], *(once if call == 0 else ())):
                for name, ms in work().items():
                    lists = taken.setdefault(name, [])
                    if len(lists) == repetition:
                        lists.append([])
                    lists[repetition].append(ms)
    return taken


def speed(taken: Taken, name: str, nbytes: int, *bases: str) -> dict[str, float | dict[str, float] | None]:
    """Times of ``name`` (ms), GB/s, and for each base how fast it is beside it: base's time / its own, within repetitions."""
    samples: Samples = taken[name]
    found: dict[str, float | dict[str, float] | None] = {"bytes": nbytes, "ms": pooled(samples)}
    found["gb_per_s"] = nbytes / figures([value for part in samples for value in part])["median"] / 1e6
    return found | {f"of_{base}": paired_ratio(taken[base], samples) for base in bases}


def line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) of the line with the least squared *relative* errors: the largest sizes do not drown the fixed cost.

    Raises ValueError for fewer than two sizes.
    """
    if len(set(sizes)) < 2:
        raise ValueError("a line needs two sizes")
    weights = [1 / time**2 for time in times]
    total = sum(weights)
    x = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    y = sum(w * time for w, time in zip(weights, times, strict=True)) / total
    spread = sum(w * (size - x) ** 2 for w, size in zip(weights, sizes, strict=True))
    slope = sum(w * (s - x) * (t - y) for w, s, t in zip(weights, sizes, times, strict=True)) / spread
    return y - slope * x, slope
