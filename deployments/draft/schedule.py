"""What to compute next: every line that could get a token is a row with a value; the best set of rows is the one that yields
most value for its time. Pure; no model, no clock.

The value of a row is the probability that the token it yields is of use, so that ``value * token_worth_s`` is the time it
saves the target on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deployments.draft.calibration import Calibration
from deployments.draft.lines import Line, Session
from hw.onnx.costs import StepCosts

_LEAST_BRANCH = 0.01  # an outcome less likely than that is not worth a copy of KV


class Start(NamedTuple):
    """A branch that could be started."""

    session: Session
    start: int  # position it leaves the main line at
    token: int
    rank: int  # place of the token among the runner-ups there


class Row(NamedTuple):
    """One token of one line."""

    value: float
    work: Line | Start
    setup_s: float = 0.0  # before the model call: the copy of a new branch's KV
    near: bool = False  # continues the main line, up to the token after the one that is verified last


def best_rows(rows: Iterable[Row], costs: StepCosts, branch_slots: int) -> list[Row]:
    """The rows to compute in one step: those that maximise value for time; at most ``branch_slots`` of them start branches."""
    chosen: list[Row] = []
    value = setup_s = rate = 0.0
    count = 0
    for row in sorted(rows, key=lambda row: row.value, reverse=True):
        if isinstance(row.work, Start):
            if not branch_slots:
                continue
            branch_slots -= 1
        chosen.append(row)
        value += row.value
        setup_s += row.setup_s
        spent = costs.decode(len(chosen)) + setup_s
        now = value / spent if spent > 0.0 else float("inf")
        if now >= rate:
            rate, count = now, len(chosen)
    return chosen[:count]


def step_seconds(rows: Sequence[Row], costs: StepCosts) -> float:
    """What computing the rows together is expected to take."""
    return costs.decode(len(rows)) + sum(row.setup_s for row in rows)


def reading_alone_is_cheaper(sessions: Sequence[Session], costs: StepCosts) -> bool:
    """Whether sessions that are some tokens behind should read them in one call each rather than step together."""
    behind = [session.pending for session in sessions]
    alone = sum(costs.prefill(count) for count in behind) - len(sessions) * (costs.decode(2) - costs.decode(1))
    together = sum(costs.decode(sum(count > turn for count in behind)) for turn in range(1, max(behind)))
    return alone <= together


def use_of_reading(session: Session) -> float:
    """Of the tokens a session has to read, the share that the target is expected to commit."""
    expected, reached = float(max(session.behind, 0)), 1.0
    for index, choice in enumerate(session.guess):
        reached *= choice.confidence
        if index >= -session.behind:
            expected += reached
    return expected / session.pending


def wanted_rows(sessions: Iterable[Session], calibration: Calibration) -> list[Row]:
    """A row for each session the target waits for: the next token it has not drafted yet, by the calls that takes."""
    return [
        Row(
            session.likelihood() * calibration.mean(session.sampling.temperature <= 0.0) / session.pending,
            session,
        )
        for session in sessions
    ]


def idle_rows(
    session: Session, calibration: Calibration, *, ahead: int | None, context: int, copy_s: float, branching: bool
) -> list[Row]:
    """Rows of an active session for idle time: its main line, its branches, and branches that could be started.

    No line goes further than ``ahead`` tokens beyond what the target verifies now; None: the target's own token and as many as
    it wants then. ``copy_s``: seconds to copy the KV of one position. ``branching``: whether branches may be started.
    """
    base, guess = len(session.tokens), session.guess
    rows: list[Row] = []
    beyond = 1 + session.depth if ahead is None else ahead
    before = []  # probability that the target agrees with all of the guess before each index
    reached = 1.0
    read = 1.0  # that it gets to what is to be read next
    for index, choice in enumerate(guess):
        before.append(reached)
        reached *= choice.confidence
        if base + index <= session.computed:
            read = reached
    catching_up = session.pending > 1
    if catching_up or (len(guess) < session.sent + beyond and session.total < context):
        near = catching_up or len(guess) <= session.sent
        rows.append(Row(read if catching_up else reached, session, 0.0, near))
    shares = calibration.shares(session.sampling.temperature <= 0.0)
    for branch in session.branches:
        if branch.pending > 1 or (len(branch.guess) < beyond - 1 and branch.total < context):
            at = branch.start - base
            value = before[at] * (1.0 - guess[at].confidence) * shares[branch.rank]
            for choice in branch.guess:
                value *= choice.confidence
            rows.append(Row(value, branch))
    if not branching or beyond < 2:
        return rows
    # The target's own token takes the place of one of those it verifies, or comes after the last of them.
    held = max((spare.valid for spare in session.spares), default=0)
    taken = {(branch.start, branch.token) for branch in session.branches}
    for index, choice in enumerate(guess[: session.sent + 1]):
        start = base + index
        miss = before[index] * (1.0 - choice.confidence)
        if start > session.computed or start + 1 >= context or miss * shares[0] < _LEAST_BRANCH:
            continue
        for rank, token in enumerate(choice.runners):
            if (start, token) not in taken:
                value = miss * shares[rank]
                if value >= _LEAST_BRANCH:
                    rows.append(Row(value, Start(session, start, token, rank), copy_s * max(0, start - held)))
                break
    return rows
