"""An engine, its drafts and their costs in virtual time: the whole of what the controller decides about, in milliseconds."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deployments.chain.controller import Controller
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Draft, Drafts, Sampling, Step
from deployments.target.rounds import DraftRounds
from deployments.target.sequence import Running
from deployments.target.sources import Proposal


@dataclass
class Costs:
    """Seconds. The defaults resemble a small model on two cores of a slow machine."""

    alone_s: float = 0.040
    shared_s: float = 0.050  # a step while a core is lent
    verified_s: float = 0.001  # each token beyond the first of a step
    draft_s: float = 0.020  # each token that was not waiting
    noise: float = 0.1


class ModelDraft:
    """A draft that agrees with probability ``agreement``, and has ``ready`` tokens waiting if its last line held."""

    def __init__(self, engine: "Engine", agreement: float, confidence: float, ready: int) -> None:
        self.engine, self.agreement, self.confidence, self.ready = engine, agreement, confidence, ready
        self.name, self.dropped = "model#1", Counter[str]()
        self.asked = 0
        self._answer: Drafts | None = None

    def post(self, step: Step) -> bool:
        drafts, longest = [], 0
        for commit in step.commits:
            waiting = min(self.ready, commit.want)
            tokens = max(waiting, min(commit.want, 2))
            longest = max(longest, tokens - waiting)
            guess = self.engine.guess(commit.session, tokens, self.agreement)
            accept = np.full(tokens, self.confidence, "<f2").tobytes()
            drafts.append(Draft(commit.session, commit.epoch, commit.length, guess, ready=waiting, accept=accept))
        self.asked += any(commit.want for commit in step.commits)
        rows = sum(commit.want > 0 for commit in step.commits)
        self.engine.now += longest * self.engine.costs.draft_s * (1 + 0.3 * max(rows - 1, 0))
        self._answer = Drafts(PROTOCOL_VERSION, self.name, step.number, drafts)
        return True

    def collect(self, number: int, timeout_s: float) -> Drafts | None:
        return self._answer

    def close(self) -> None: ...


@dataclass
class TextSource:
    """A source without weights that has something to say at a share of the positions."""

    engine: "Engine"
    agreement: float
    share: float
    length: int
    confidence: float = 0.8
    name: str = "suffix"
    proposed: int = 0

    def begin(self, request: str, tenant: str, prompt: object) -> None: ...

    def extend(self, request: str, tokens: list[int]) -> None: ...

    def propose(self, request: str, most: int) -> Proposal | None:
        if self.engine.random.random() > self.share:
            return None
        self.proposed += 1
        tokens = self.engine.guess(request, min(most, self.length), self.agreement)
        return Proposal(tokens, [self.confidence] * len(tokens), 4, self.name)

    def finish(self, request: str) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def clear(self) -> None: ...


@dataclass
class Engine:
    """Runs batches of sequences whose true text is ``position % 997``."""

    costs: Costs = field(default_factory=Costs)
    lends: bool = True
    seed: int = 1
    now: float = 0.0
    drift: float = 0.0  # share by which the machine becomes slower and faster again, in waves of ten seconds

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.rounds: DraftRounds
        self.length: dict[str, int] = {}
        self.committed = 0
        self.drafts: dict[str, list[int]] = {}
        self.names = 0
        self.busy_s = 0.0  # time of all steps, had the machine's speed been the same throughout

    def start(self, sources: Callable[["Engine"], list[TextSource]] = lambda engine: []) -> None:
        self.rounds = DraftRounds(
            "t", 1000, FaultPolicy(), Controller(self.lends), sources(self), clock=lambda: self.now
        )

    def guess(self, session: str, count: int, agreement: float) -> list[int]:
        """A draft whose every token is right with probability ``agreement``."""
        base = self.length[session]
        return [(base + index) % 997 if self.random.random() < agreement else 998 for index in range(count)]

    def batch(self, size: int, tokens: int) -> float:
        """Run ``size`` new sequences for ``tokens`` tokens each; tokens per second."""
        began, done, steps = self.now, 0, self.busy_s
        running = [f"r{self.names + index}" for index in range(size)]
        self.names += size
        for name in running:
            self.length[name] = 10
            self.rounds.begin(name, name, list(range(10)), False)
        self.rounds.announce([(name, list(range(10)), Sampling(0.0, 1), tokens) for name in running])
        self.drafts = {}
        while running:
            done += self._step(running, tokens)
            finished = [name for name in running if self.length[name] >= 10 + tokens]
            self.rounds.finish(finished)
            running = [name for name in running if name not in finished]
        self.rounds.flush()
        return done / (self.busy_s - steps if self.drift else self.now - began)

    def _step(self, running: list[str], tokens: int) -> int:
        self.rounds.step_begins(True)
        verified = len(running) + sum(len(draft) for draft in self.drafts.values())
        base = self.costs.shared_s if self.lends and self.rounds.lends else self.costs.alone_s
        spread = self.random.uniform(1 - self.costs.noise, 1 + self.costs.noise)
        wave = 1 + self.drift * math.sin(self.now * 2 * math.pi / 10)
        self.busy_s += base + self.costs.verified_s * (verified - 1)
        self.now += (base + self.costs.verified_s * (verified - 1)) * spread * wave
        items, done = [], 0
        for name in running:
            new = []
            for guess in [*self.drafts.get(name, []), -1]:
                new.append((self.length[name] + len(new)) % 997)
                if guess != new[-1]:
                    break
            self.length[name] += len(new)
            done += len(new)
            want = min(16, 10 + tokens - self.length[name] - 1)
            items.append(
                Running(name, new, self.length[name], lambda a, b: list(range(a, b)), max(want, 0), Sampling(0.0, 1), 4)
            )
        self.drafts = self.rounds.round(items)
        return done

    def plain(self, size: int) -> float:
        """Tokens per second without any draft."""
        return size / (self.costs.alone_s + self.costs.verified_s * (size - 1))
