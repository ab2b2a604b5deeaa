"""The answer chain's metrics, on Ray's metrics port; one router replica's each."""

from collections.abc import Callable
from typing import Protocol

from deployments.target.metrics import Counter

ANSWERS = ("chain_answer_total", "Answers in answer mode, by what their drafts amounted to", ("outcome",))
FAILURES = (
    "chain_answer_failures_total",
    "Times a part of the answer chain failed and the answer came without it",
    ("part", "reason"),
)
WAITS = ("chain_answer_wait_ms", "What an answer waited for a part of the answer chain", ("part",))
BOUNDARIES = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]


class Histogram(Protocol):
    """As ``ray.serve.metrics.Histogram``."""

    def observe(self, value: float, tags: dict[str, str]) -> None: ...


class AnswerMetrics:
    """What requests add to."""

    def __init__(
        self,
        counter: Callable[[str, str, tuple[str, ...]], Counter],
        histogram: Callable[[str, str, list[int], tuple[str, ...]], Histogram],
    ) -> None:
        """``counter`` and ``histogram`` make a metric from its name, description, (boundaries,) and label names."""
        self._answers, self._failures = counter(*ANSWERS), counter(*FAILURES)
        self._waits = histogram(WAITS[0], WAITS[1], BOUNDARIES, WAITS[2])

    @classmethod
    def of_replica(cls) -> "AnswerMetrics":
        """With Serve's metrics; only inside a replica."""
        from ray.serve import metrics

        return cls(metrics.Counter, metrics.Histogram)

    def answered(self, outcome: str) -> None:
        """``consensus``, ``leaning``, ``divergence``, ``none``, or ``failed``."""
        self._answers.inc(1, {"outcome": outcome})

    def failed(self, part: str, reason: str) -> None:
        """``part``: the kind of source (``model``, ``rules`` …), ``validators``, ``score``, ``write`` or ``chain``."""
        self._failures.inc(1, {"part": part, "reason": reason})

    def waited(self, part: str, ms: float) -> None:
        """``drafts`` or ``resolution``."""
        self._waits.observe(ms, {"part": part})
