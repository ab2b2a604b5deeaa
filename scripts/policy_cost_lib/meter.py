"""Times what a policy does within a step, beside what the sampler does anyway.

The functions the engine calls are wrapped, not imitated: what is timed is what runs.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.target import policy_rules
from deployments.target.acceptance import AcceptanceSampler
from deployments.target.policy_rules import Relaxation


@dataclass
class Step:
    """One verifying step."""

    requests: int = 0
    drafted: int = 0
    policy_s: float = 0.0  # all that would not run without a policy
    sampler_s: float = 0.0  # the rest of the sampler
    candidates: int = 0  # mismatches that could pass
    passed: int = 0  # tokens in place of the target's own, those behind the accepted prefix included


class Meter:
    """Collects :class:`Step` after :class:`Step` once installed; one a process."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._step = Step()

    def install(self) -> None:
        for name in ("__init__", "before", "after"):
            self._time(Relaxation, name)
        self._count()
        inner = AcceptanceSampler.forward

        @functools.wraps(inner)
        def forward(sampler: AcceptanceSampler, metadata: Any, *rest: Any) -> Any:
            counts = metadata.num_draft_tokens
            self._step = step = Step(len(counts), sum(counts))
            start = time.perf_counter()
            output = inner(sampler, metadata, *rest)
            step.sampler_s = time.perf_counter() - start - step.policy_s
            step.passed = sum(len(offsets) for offsets in _relaxed(sampler))
            self.steps.append(step)
            return output

        AcceptanceSampler.forward = forward  # type: ignore[method-assign]

    def take(self) -> list[Step]:
        """What was collected since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def _time(self, owner: type, name: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self._step.policy_s += time.perf_counter() - start

        setattr(owner, name, timed)

    def _count(self) -> None:
        inner: Callable[..., Any] = policy_rules.candidates

        @functools.wraps(inner)
        def counting(*arguments: Any) -> Any:
            found = inner(*arguments)
            self._step.candidates += 0 if found is None else len(found.token)
            return found

        policy_rules.candidates = counting


def _relaxed(sampler: AcceptanceSampler) -> list[list[int]]:
    marks = sampler._relaxed
    return [] if marks is None else [row.nonzero()[0].tolist() for row in marks]
