"""How much of a draft its target accepts, from what a source guessed along the target's own answers. Pure.

An accepted draft is the target's own text. So a source that is given the target's answer up to some point stands where it would
stand in a running system, and one pass over an answer tells what would become of a draft from every point of it. Rounds of any
length are then replayed from that: the next one starts where the one before ended, as in the engine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

DEPTH = 8  # positions of a draft that are looked at


class Trail(msgspec.Struct, frozen=True, kw_only=True):
    """One source along one answer of ``len(right) + 1`` tokens.

    Digit ``at - 1`` belongs to the point where ``at`` tokens of the answer are committed (the first one comes with the
    prompt): ``offered`` of up to :data:`DEPTH` tokens the source proposes there, ``right`` how many of the leading ones are the
    answer's. ``limit``: most tokens the answer could have had; the engine asks for no draft beyond.
    """

    limit: int
    offered: str
    right: str
    misses: int = 0  # points where the source chose another token than the target
    runners: tuple[int, ...] = ()  # of those, how often the target's token came first, second, … among its runner-ups


@dataclass(frozen=True)
class Rounds:
    """Engine steps with drafts of at most ``most`` tokens. Lists of ``most`` entries are by position in the draft, from 0.

    ``verifying``: ``[most + 1]`` steps by how many tokens they verify, 0 being a plain step. ``tested``: drafts that the target
    looked at that far, all before being right; ``right``: of those, the ones right there, too.
    """

    most: int
    verifying: tuple[int, ...]
    tested: tuple[int, ...]
    right: tuple[int, ...]
    committed: int

    @property
    def steps(self) -> int:
        return sum(self.verifying)

    @property
    def drafted(self) -> int:
        return sum(count * steps for count, steps in enumerate(self.verifying))

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the tokens verified, as the running system counts it; None without drafts."""
        return sum(self.right) / self.drafted if self.drafted else None

    @property
    def per_step(self) -> float:
        """Tokens committed in a step."""
        return self.committed / self.steps if self.steps else 1.0

    def by_position(self) -> list[float | None]:
        """Acceptance at each position, given that all before were accepted; None where none was looked at."""
        return [right / tested if tested else None for right, tested in zip(self.right, self.tested, strict=True)]

    def chances(self) -> list[float]:
        """As :meth:`by_position`, but a position for which nothing was drafted counts as not accepted: their running products
        are the shares of steps that accept at least one, two, … tokens."""
        found, reached = [], self.steps
        for right in self.right:
            found.append(right / reached if reached else 0.0)
            reached = right
        return found

    def shares(self) -> list[float]:
        """``[most + 1]``: of the steps, how many verify 0, 1, … tokens."""
        return [steps / self.steps if self.steps else float(not count) for count, steps in enumerate(self.verifying)]


def replay(trails: Iterable[Trail], most: int) -> Rounds:
    """What drafting at most ``most`` (1 to :data:`DEPTH`) tokens a round would have come to on these answers."""
    if not 1 <= most <= DEPTH:
        raise ValueError(f"drafts of 1 to {DEPTH} tokens were looked at, not {most}")
    verifying, tested, right = [0] * (most + 1), [0] * most, [0] * most
    committed = 0
    for trail in trails:
        at, length = 1, len(trail.right) + 1
        while at < length:
            # the step adds a token of the target's own, so a draft never reaches the last one
            offered = max(0, min(most, trail.limit - at - 1, int(trail.offered[at - 1])))
            agreed = min(offered, int(trail.right[at - 1]))
            verifying[offered] += 1
            for position in range(min(offered, length - at, agreed + 1)):
                tested[position] += 1
                right[position] += position < agreed
            step = min(agreed + 1, length - at)  # nothing of the target's own follows an end that was drafted
            committed += step
            at += step
    return Rounds(most, tuple(verifying), tuple(tested), tuple(right), committed)


def share_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Standard error of ``sum(hits) / sum(tries)`` over answers of (hits, tries): tokens of one answer are not independent.

    The ratio estimator's (Cochran 1977, "Sampling Techniques", section 6.3). 1 where there are too few answers to say.
    """
    tries, n = sum(each for _, each in pairs), len(pairs)
    if n < 2 or not tries:
        return 1.0
    share = sum(hits for hits, _ in pairs) / tries
    squares = sum((hits - share * each) ** 2 for hits, each in pairs)
    return float((n / (n - 1) * squares) ** 0.5 / tries)


def runs_of(matches: Sequence[bool]) -> str:
    """For every point the number of right guesses in a row from it on, at most :data:`DEPTH`: digits for :attr:`Trail.right`.

    For sources whose guess at a point does not depend on where the draft began.
    """
    runs, length = [0] * len(matches), 0
    for at in reversed(range(len(matches))):
        length = min(length + 1, DEPTH) if matches[at] else 0
        runs[at] = length
    return "".join(map(str, runs))


def runner_shares(trails: Iterable[Trail]) -> list[float]:
    """Of the tokens a source got wrong, the share that the target replaced by its first, second, … runner-up; empty if unknown."""
    known = [trail for trail in trails if trail.runners]
    misses = sum(trail.misses for trail in known)
    ranks = max((len(trail.runners) for trail in known), default=0)
    return [sum(trail.runners[rank] for trail in known) / misses for rank in range(ranks)] if misses else []
