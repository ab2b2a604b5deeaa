"""What several drafts of one answer amount to.

``consensus``: two of them are closer than ``agree`` and nothing a distance overlooks (a number, a negation, a name) tells them
apart. ``divergence``: every two are further apart than ``diverge``. ``leaning``: anything between. A single draft is a
leaning towards it; without any the outcome is ``none``.

A draft tagged invalid takes no part, unless all are: then the tags tell them apart no more.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from deployments.chain.acceptance.guard import objection
from deployments.chain.answer.candidate import Candidate
from deployments.chain.answer.distance import Matrix, matrix

Outcome = Literal["consensus", "leaning", "divergence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Distances that decide, ``0 ≤ agree ≤ diverge ≤ 1``."""

    agree: float = 0.1  # two drafts closer than this agree
    diverge: float = 0.15  # nobody closer than this: nobody agrees even nearly
    guard: bool = True  # drafts that differ in a number, a negation or a name never agree

    def __post_init__(self) -> None:
        if not 0.0 <= self.agree <= self.diverge <= 1.0:  # also false for NaN
            raise ValueError(f"0 <= agree <= diverge <= 1 is needed, not agree {self.agree}, diverge {self.diverge}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Consensus:
    """The outcome for ``K`` drafts, which it names by their index."""

    outcome: Outcome
    chosen: int | None  # the draft agreed upon, or the only one; None: somebody has to choose
    agreeing: tuple[
        int, ...
    ]  # the chosen one and those that agree with it, nearest first; without consensus all that take part
    distances: Matrix  # [K, K]
    objections: tuple[tuple[int, int, str], ...] = ()  # pairs that are close and still differ, and in what


def decide(
    candidates: Sequence[Candidate],
    thresholds: Thresholds,
    *,
    vocab_size: int,
    invalid: Collection[int] = (),
    distances: Matrix | None = None,
) -> Consensus:
    """The outcome. ``invalid``: indices of drafts with such a tag; ``distances``: what :func:`matrix` returns, if known."""
    distances = matrix(candidates, vocab_size) if distances is None else distances
    order = sorted(range(len(candidates)), key=lambda i: rank(candidates[i]))
    part = [i for i in order if i not in invalid] or order
    if len(part) < 2:
        outcome: Outcome = "leaning" if part else "none"
        return Consensus(outcome=outcome, chosen=part[0] if part else None, agreeing=tuple(part), distances=distances)
    near = [(i, j) for i, j in combinations(part, 2) if distances[i, j] < thresholds.agree]
    objections = tuple((i, j, why) for i, j in near if thresholds.guard and (why := _objection(candidates, i, j)))
    apart = {(i, j) for i, j, _ in objections}
    partners: dict[int, list[int]] = {i: [] for i in part}
    for i, j in near:
        if (i, j) not in apart:
            partners[i].append(j)
            partners[j].append(i)
    if any(partners.values()):
        # most partners, then the nearest partner, then the order of sources
        chosen = min(
            (i for i in part if partners[i]),
            key=lambda i: (-len(partners[i]), min(distances[i, j] for j in partners[i]), part.index(i)),
        )
        others = sorted(partners[chosen], key=lambda j: (distances[chosen, j], part.index(j)))
        agreeing = (chosen, *others)
        return Consensus(
            outcome="consensus", chosen=chosen, agreeing=agreeing, distances=distances, objections=objections
        )
    diverging = all(distances[i, j] > thresholds.diverge for i, j in combinations(part, 2))
    outcome = "divergence" if diverging else "leaning"
    return Consensus(outcome=outcome, chosen=None, agreeing=tuple(part), distances=distances, objections=objections)


def rank(candidate: Candidate) -> tuple[tuple[tuple[bool, int, str], ...], str, tuple[int, ...]]:
    """Sorts drafts by their source, ``#2`` before ``#10``, whatever order they came in."""
    parts = re.split(r"(\d+)", candidate.source)
    key = tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts)
    return key, candidate.text, candidate.tokens


def _objection(candidates: Sequence[Candidate], i: int, j: int) -> str:
    return objection(candidates[i].text.strip(), candidates[j].text.strip())
