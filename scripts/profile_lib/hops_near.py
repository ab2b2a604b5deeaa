"""Child process: the target's end of the channel, which times what it sends. Commands: ``key``, ``measure``.

Times of both processes are ``time.perf_counter``, which on Linux is one clock for the whole machine.
"""

import time

import msgspec

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, DraftChannel, Drafts, Step
from deployments.channel.endpoint import Endpoint, KeyPair
from deployments.channel.unix import UnixChannel
from deployments.channel.zeromq import ZmqChannel
from scripts.profile_lib.busy import STEP_S, WARM_UP, compute
from scripts.profile_lib.commands import serve

HOPS = {
    "post": "the sending call, part of the next row",
    "out": "sent until it has arrived at the draft",
    "queue": "arrived until the draft's step begins (it finishes the piece of work it is at)",
    "step": "the draft's step, which has nothing to compute here",
    "back": "step ended until the target has the answer",
    "round_trip": "all of it",
    "transport": "out and back, without queue and step",
}


CHANNELS: dict[str, type[UnixChannel] | type[ZmqChannel]] = {"unix": UnixChannel, "zeromq": ZmqChannel}


def hops(sent: float, posted: float, answer: Drafts, back: float) -> dict[str, float]:
    """Milliseconds of each of :data:`HOPS`; the other times are seconds of one clock, ``answer`` a noting drafter's."""
    began = float(answer.source)
    arrived, ended = began - answer.queue_s, began + answer.work_s
    seconds = {
        "post": posted - sent,
        "out": arrived - sent,
        "queue": began - arrived,
        "step": ended - began,
        "back": back - ended,
        "round_trip": back - sent,
        "transport": (arrived - sent) + (back - ended),
    }
    return {name: 1e3 * value for name, value in seconds.items()}


class NearEnd:
    """Each public method is one command."""

    def __init__(self) -> None:
        self._keys = KeyPair.new()
        self._faults = FaultPolicy()

    def key(self) -> dict[str, str]:
        return {"key": self._keys.public}

    def measure(self, endpoint: dict[str, object], transport: str, messages: int) -> dict[str, object]:
        """Send ``messages`` over one of :data:`CHANNELS`, each after some computing: hops of those that were answered, and how many were not.

        Raises ``OSError`` when there is no connection or the draft never answers.
        """
        channel = CHANNELS[transport](msgspec.convert(endpoint, Endpoint), self._keys, self._faults)
        try:
            first = self._connect(channel)
            found, missed = [], 0
            for number in range(first, first + WARM_UP + messages):
                compute(STEP_S)
                timed = self._send(channel, number)
                if number < first + WARM_UP:
                    continue
                if timed is None:
                    missed += 1
                else:
                    found.append(timed)
        finally:
            channel.close()
        return {"hops": found, "missed": missed}

    def _connect(self, channel: DraftChannel) -> int:
        """Send until one is answered; returns the next free number."""
        until = time.monotonic() + self._faults.rpc_timeout_s
        number = 0
        while time.monotonic() < until:
            number += 1
            if self._send(channel, number) is not None:
                return number + 1
            time.sleep(self._faults.draft_deadline_min_s)
        raise ConnectionError(f"the draft's end did not answer: {dict(channel.dropped)}")

    def _send(self, channel: DraftChannel, number: int) -> dict[str, float] | None:
        """One message and its answer, as a step with one sequence at batch 1."""
        commits = [Commit("profile", 0, 3, [1, 2, 3], 2)]
        step = Step(PROTOCOL_VERSION, "profile", number, self._faults.draft_deadline_s, commits, [])
        sent = time.perf_counter()
        if not channel.post(step):
            return None
        posted = time.perf_counter()
        answer = channel.collect(number, self._faults.draft_deadline_s)
        back = time.perf_counter()
        return None if answer is None else hops(sent, posted, answer, back)


if __name__ == "__main__":
    serve(NearEnd())
