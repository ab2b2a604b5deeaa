"""A draft channel without a socket: the harness of tests and of experiments in one process."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from deployments.chain.protocol import Drafter, Drafts, Step


class InProcessChannel:
    """Runs a :class:`Drafter` inline, or in a thread when a delay must overlap with the caller's waiting.

    ``fault(number)`` is asked for every message and returns one of ``"ok"``, ``"lose"`` (the draft never sees it),
    ``"mute"`` (the draft sees it, the answer is lost) or ``"late"`` (the answer comes one step later).
    """

    def __init__(
        self,
        drafter: Drafter,
        name: str = "inprocess",
        delay_s: float = 0.0,
        fault: Callable[[int], str] | None = None,
    ) -> None:
        self.name = name
        self.drafter = drafter
        self.dropped: Counter[str] = Counter()
        self._delay_s = delay_s
        self._fault = fault or (lambda number: "ok")
        self._answers: deque[tuple[float, Drafts]] = deque()
        self._held: list[Drafts] = []
        self._lock = threading.Lock()
        self._closed = False

    def post(self, step: Step) -> bool:
        if self._closed:
            return False
        kind = self._fault(step.number)
        if kind == "lose":
            return True
        with self._lock:
            answer = self.drafter.step(step)
        if not any(commit.want for commit in step.commits):  # closes and announcements: nobody waits for an answer
            return True
        ready = time.perf_counter() + self._delay_s
        self._answers.extend((ready, held) for held in self._held)
        self._held.clear()
        if kind == "late":
            self._held.append(answer)
        elif kind != "mute":
            self._answers.append((ready, answer))
        return True

    def collect(self, number: int, timeout_s: float) -> Drafts | None:
        until = time.perf_counter() + timeout_s
        while self._answers:
            ready, answer = self._answers[0]
            if ready > until:
                break
            time.sleep(max(0.0, ready - time.perf_counter()))
            self._answers.popleft()
            if answer.number == number:
                return answer
            self.dropped["late"] += 1
        time.sleep(max(0.0, until - time.perf_counter()))
        return None

    def close(self) -> None:
        self._closed = True
