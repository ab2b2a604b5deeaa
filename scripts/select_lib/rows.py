"""What the parts of a run amount to: a row for each candidate, with predictions, warnings and, where it was tried, what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import msgspec

from hw.onnx.checkpoint import CONDITIONED
from scripts.select_lib import predict
from scripts.select_lib.acceptance import DEPTH, Rounds, Trail, replay, runner_shares, share_error
from scripts.select_lib.answers import GREEDY, Answers
from scripts.select_lib.candidates import Candidate
from scripts.select_lib.measure import ALL, OWN
from scripts.select_lib.predict import DraftCosts, Prediction, Steps
from scripts.select_lib.trial import OVERLAPPED, SYNCHRONOUS, WITHOUT_MODEL

OVERHEAD_MS = 1.0  # of a round beyond verifying and drafting, before any was measured: docs/benchmarks/latest.md
LENGTHS = range(1, DEPTH + 1)
AGREE = 0.02  # acceptance measured and counted should differ by no more


@dataclass(frozen=True)
class Trial:
    """Predicted and measured, one request at a time. Acceptance is that of all tokens verified."""

    mode: str
    tokens: int
    predicted_per_s: float
    predicted_plain_per_s: float
    predicted_acceptance: float | None
    measured: Mapping[str, Any]
    error: float = 0.0  # standard error of the acceptance that was measured, over answers

    @property
    def noise(self) -> float:
        """Half of the 95 % interval of :attr:`difference`, over answers: the two texts differ where bfloat16 ties."""
        counted = share_error([(hits, tries) for hits, tries in self.measured.get("by_request", [])])
        return 1.96 * float((counted**2 + self.error**2) ** 0.5)

    @property
    def acceptance(self) -> float | None:
        """As counted by the running system."""
        drafted = self.measured["drafted"]
        return self.measured["accepted"] / drafted if drafted else None

    @property
    def difference(self) -> float | None:
        """Counted less measured."""
        if self.acceptance is None or self.predicted_acceptance is None:
            return None
        return self.acceptance - self.predicted_acceptance

    @property
    def agrees(self) -> bool:
        return self.difference is not None and abs(self.difference) <= AGREE

    @property
    def speedup(self) -> float:
        return float(self.measured["tokens_per_s"] / self.measured["plain_per_s"])

    @property
    def predicted_speedup(self) -> float:
        return self.predicted_per_s / self.predicted_plain_per_s


@dataclass
class Row:
    """One candidate. ``follow`` and ``costs`` as :meth:`Measurements.candidate` gives them, ``steps`` the target's."""

    candidate: Candidate
    answers: Answers
    follow: Mapping[str, Any]
    costs: Mapping[str, Any]
    steps: Mapping[str, Any]
    trials: list[Trial] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _replayed: dict[tuple[str, int, str | None], Rounds] = field(default_factory=dict, init=False, repr=False)

    # --- acceptance -----------------------------------------------------------------------------------------------

    def trails(self, kind: str, name: str | None = None) -> list[Trail]:
        """Of greedy or sampled answers, to prompts of one set or to all."""
        found = [msgspec.convert(trail, Trail) for trail in self.follow[kind]]
        return [trail for trail, its in zip(found, self.answers.sets, strict=True) if name in (None, its)]

    def rounds(self, kind: str, most: int, name: str | None = None) -> Rounds:
        """What drafts of at most ``most`` tokens came to."""
        key = (kind, most, name)
        if key not in self._replayed:
            self._replayed[key] = replay(self.trails(kind, name), most)
        return self._replayed[key]

    def first(self, kind: str, name: str | None = None) -> float | None:
        """Acceptance at the first position."""
        return self.rounds(kind, DEPTH, name).by_position()[0]

    # --- costs ----------------------------------------------------------------------------------------------------

    @cached_property
    def context(self) -> float:
        """Tokens before the middle of an answer."""
        answers = self.answers
        return fmean(len(p) + len(a) / 2 for p, a in zip(answers.prompts, answers.greedy, strict=True))

    def token_ms(self, context: float, batch: int) -> float:
        """Of a call that drafts a token for each of ``batch`` sequences; along straight lines between the contexts measured."""
        return predict.step_ms([(c, ms) for c, b, ms in self.costs["calls"] if b == batch], max(context, 1.0))

    def draft_costs(self, *, beside: bool) -> DraftCosts:
        """At the answers' context; ``beside`` the target at work."""
        batches = sorted({batch for _, batch, _ in self.costs["calls"]})
        points = [(batch, self.token_ms(self.context, batch)) for batch in batches]
        base, row = line(points)
        slower = (self.costs["beside"]["draft_slower"] or 1.0) if beside else 1.0
        return DraftCosts(base * slower, row * slower, self.costs["unread_ms"] * slower)

    def step_costs(self, batch: int, *, beside: bool) -> Steps:
        """The target's steps with all its cores, or ``beside`` the draft at work without the draft's."""
        points = self.steps[OWN if beside else ALL][str(batch)]
        slower = (self.costs["beside"]["target_slower"] or 1.0) if beside else 1.0
        return [(int(verified), float(ms) * slower) for verified, ms in points]

    @property
    def reads_again(self) -> bool:
        """Whether it computes accepted tokens anew, because the target's hidden states of them come with the commit."""
        return self.candidate.kind == CONDITIONED

    # --- predictions ----------------------------------------------------------------------------------------------

    @property
    def batches(self) -> list[int]:
        return sorted(int(batch) for batch in self.steps[ALL])

    def plain(self, batch: int) -> float:
        """Tokens a second of the target alone, on all its cores."""
        return predict.plain(self.steps[ALL][str(batch)], batch)

    def predictions(self, batch: int, kind: str = GREEDY) -> dict[str, list[Prediction]]:
        """By mode, for drafts of 1 to :data:`DEPTH` tokens."""
        rounds = {tokens: self.rounds(kind, tokens) for tokens in LENGTHS}
        if not self.candidate.asks_model:
            steps = self.step_costs(batch, beside=False)
            found = [predict.without_model(steps, r.shares(), r.chances(), batch) for r in rounds.values()]
            return {WITHOUT_MODEL: found}
        runners = runner_shares(self.trails(kind))
        deepest = [chance or 0.0 for chance in rounds[DEPTH].by_position()]
        modes = modes_of(self.candidate)
        both: dict[str, list[Prediction]] = {mode: [] for mode in modes}
        for tokens, each in rounds.items():
            chances = each.chances()
            both[SYNCHRONOUS].append(
                predict.synchronous(
                    self.step_costs(batch, beside=False),
                    self.draft_costs(beside=False),
                    chances,
                    batch,
                    OVERHEAD_MS,
                    reads_again=self.reads_again,
                )
            )
            if OVERLAPPED not in modes:
                continue
            both[OVERLAPPED].append(
                predict.overlapped(
                    self.step_costs(batch, beside=True),
                    self.draft_costs(beside=True),
                    chances,
                    deepest[min(tokens, DEPTH - 1)],
                    runners,
                    batch,
                    OVERHEAD_MS,
                )
            )
        return both

    def best(self, batch: int, kind: str = GREEDY) -> tuple[str, Prediction]:
        """The fastest way to use it: mode and length of drafts."""
        found = {mode: predict.best(each) for mode, each in self.predictions(batch, kind).items()}
        mode = max(found, key=lambda name: found[name].tokens_per_s)
        return mode, found[mode]

    def speedup(self, batch: int, kind: str = GREEDY) -> float:
        """Predicted, to the target alone."""
        return self.best(batch, kind)[1].tokens_per_s / self.plain(batch)

    def trial(self, mode: str, tokens: int, measured: Mapping[str, Any]) -> Trial:
        """What was predicted for a run in the real engine, beside what came of it. The reading of prompts is part of both."""
        answers = self.answers
        prediction = self.predictions(1)[mode][tokens - 1]
        rounds = self.rounds(GREEDY, tokens)
        written, reading_s = sum(map(len, answers.greedy)), sum(answers.reading_s)
        return Trial(
            mode,
            tokens,
            written / (reading_s + rounds.steps * prediction.round_ms / 1e3),
            written / (reading_s + (written - len(answers.greedy)) / self.plain(1)),
            rounds.acceptance,
            measured,
            share_error([(sum(r.right), r.drafted) for r in (replay([t], tokens) for t in self.trails(GREEDY))]),
        )

    # --- what pays ------------------------------------------------------------------------------------------------

    def affordable(self) -> tuple[float, int]:
        """Most ms a drafted token may cost, one sequence, synchronously, and the length of drafts that affords it."""
        chances = [self.rounds(GREEDY, tokens).chances() for tokens in LENGTHS]
        return predict.affordable_ms(self.step_costs(1, beside=False), chances, OVERHEAD_MS)

    def break_even(self, mode: str) -> float | None:
        """The acceptance from which on this draft's costs are worth it in this mode, one sequence."""
        runners = runner_shares(self.trails(GREEDY))
        beside = mode == OVERLAPPED
        steps, costs = self.step_costs(1, beside=beside), self.draft_costs(beside=beside)

        def fastest(acceptance: float) -> float:
            found = []
            for tokens in LENGTHS:
                chances = [acceptance] * tokens
                if beside:
                    found.append(predict.overlapped(steps, costs, chances, acceptance, runners, 1, OVERHEAD_MS))
                else:
                    found.append(
                        predict.synchronous(steps, costs, chances, 1, OVERHEAD_MS, reads_again=self.reads_again)
                    )
            return predict.best(found).tokens_per_s

        return predict.break_even(fastest, self.plain(1))


def modes_of(candidate: Candidate) -> tuple[str, ...]:
    """How the engine can use it. What takes the target's hidden states has none of them before the target is done."""
    if not candidate.asks_model:
        return (WITHOUT_MODEL,)
    return (SYNCHRONOUS,) if candidate.kind == CONDITIONED else (OVERLAPPED, SYNCHRONOUS)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """``base`` and ``row`` of the straight line nearest to ``(rows, ms)``, neither below 0; one point: all of it is base."""
    if len(points) == 1:
        return points[0][1], 0.0
    x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
    row = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    row = min(max(row, 0.0), y / x)
    return y - row * x, row
