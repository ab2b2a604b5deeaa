"""Draft channels without a socket: the harness of tests and of experiments in one process."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from deployments.chain.protocol import Drafter, Drafts, Step

_IDLE_SLICE_S = 0.02


class InProcessChannel:
    """Runs a :class:`Drafter` inline.

    ``fault(number)`` is asked for every message and returns one of ``"ok"``, ``"lose"`` (the draft never sees it),
    ``"mute"`` (the draft sees it, the answer is lost), ``"late"`` (the answer comes one step later) or ``"hold"`` (the draft
    sees it only after the next one).
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
        self._late: list[Drafts] = []
        self._held: list[Step] = []
        self._closed = False
        self._target = ""

    def post(self, step: Step) -> bool:
        if self._closed:
            return False
        self._target = step.target
        kind = self._fault(step.number)
        if kind == "hold":
            self._held.append(step)
        elif kind != "lose":
            self._deliver(step, kind)
            held, self._held = self._held, []
            for earlier in held:
                self._deliver(earlier, "ok")
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
        self._disconnect()

    def _disconnect(self) -> None:
        """As a draft behind a socket, this one forgets the sessions of a target that hung up."""
        if self._target:
            self.drafter.disconnect(self._target)

    def _deliver(self, step: Step, kind: str) -> None:
        self._answer(step, self.drafter.step(step), kind)

    def _answer(self, step: Step, answer: Drafts, kind: str) -> None:
        if not any(commit.want for commit in step.commits):  # closes and announcements: nobody waits for an answer
            return
        ready = time.perf_counter() + self._delay_s
        self._answers.extend((ready, late) for late in self._late)
        self._late.clear()
        if kind == "late":
            self._late.append(answer)
        elif kind != "mute":
            self._answers.append((ready, answer))


class OverlappedChannel(InProcessChannel):
    """The drafter has a thread of its own and works in the time between messages, as it does behind a socket.

    ``delay(number)``: seconds by which the draft hears of a message later.
    """

    def __init__(
        self,
        drafter: Drafter,
        name: str = "overlapped",
        fault: Callable[[int], str] | None = None,
        delay: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(drafter, name, fault=fault)
        self._delay = delay or (lambda number: 0.0)
        self._steps: SimpleQueue[tuple[Step, str]] = SimpleQueue()
        self._ready = threading.Condition()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"draft-{name}", daemon=True)
        self._thread.start()

    def collect(self, number: int, timeout_s: float) -> Drafts | None:
        until = time.perf_counter() + timeout_s
        with self._ready:
            while True:
                while self._answers:
                    answer = self._answers.popleft()[1]
                    if answer.number == number:
                        return answer
                    self.dropped["late"] += 1
                left = until - time.perf_counter()
                if left <= 0 or not self._thread.is_alive():
                    return None
                self._ready.wait(left)

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        self._disconnect()

    def _deliver(self, step: Step, kind: str) -> None:
        self._steps.put((step, kind))

    def _run(self) -> None:
        idle = getattr(self.drafter, "idle", lambda budget_s, should_stop: False)
        busy = True
        try:
            while not self._closed:
                try:
                    step, kind = self._steps.get(timeout=0.0 if busy else _IDLE_SLICE_S)
                except Empty:
                    busy = idle(_IDLE_SLICE_S, lambda: self._closed or not self._steps.empty())
                    continue
                time.sleep(self._delay(step.number))
                answer = self.drafter.step(step)
                with self._ready:
                    self._answer(step, answer, kind)
                    self._ready.notify()
                busy = True
        except BaseException as error:  # what the thread died of, for whoever looks; the target only sees silence
            self.failure = error
            with self._ready:
                self._ready.notify()
