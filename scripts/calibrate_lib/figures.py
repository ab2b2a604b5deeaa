"""What one setting changed: figures over all of its answers beside the lossless ones, each with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from scripts.calibrate_lib.answers import Pair
from scripts.calibrate_lib.intervals import Estimate, bootstrap, paired_change, wilson


@dataclass(frozen=True)
class Figures:
    """None: not measured, or there is nothing it could be measured on."""

    changed: Estimate | None  # share of answers that a client sees changed
    differing: Estimate | None  # share of places where the token is another
    relaxed: Estimate | None  # share of tokens that the policy let pass
    first_difference: float | None  # median place of the first other token, over answers that have one
    agreement: Estimate | None  # share of answers of which what counts is the same
    similarity: Estimate | None  # mean cosine of the sentence model
    perplexity: Estimate | None  # the target's, of the answers
    perplexity_ratio: Estimate | None  # to its perplexity of its own answers
    score: Estimate | None  # share of right answers, over items that have one
    score_change: Estimate | None  # against the lossless answers to the same items
    acceptance: Estimate | None  # share of drafted tokens
    tokens_per_step: Estimate | None
    step_gain: Estimate | None  # tokens a step, as a ratio to lossless


NOTHING = Figures(**dict.fromkeys(field.name for field in fields(Figures)))


def figures(pairs: Sequence[Pair]) -> Figures:
    """Of any number of answers, of one set or of several."""
    n = len(pairs)
    if not n:
        return NOTHING
    others, owns = [pair.other for pair in pairs], [pair.own for pair in pairs]
    tokens, steps = [len(a.tokens) for a in others], [a.steps for a in others]
    own_tokens, own_steps = [len(a.tokens) for a in owns], [a.steps for a in owns]
    parted = [place for pair in pairs if (place := pair.first_difference) is not None]
    judged = [right for pair in pairs if (right := pair.right) is not None]
    scored = [(o.nll, len(o.tokens), s.nll, len(s.tokens)) for s, o in zip(owns, others, strict=True)]
    known = [row for row in scored if row[0] is not None and row[2] is not None]
    nll, counts, own_nll, own_counts = ([row[i] for row in known] for i in range(4))
    close = [a.similarity for a in others if a.similarity is not None]
    return Figures(
        changed=wilson(sum(pair.changed for pair in pairs), n),
        differing=bootstrap([[pair.differing for pair in pairs], [pair.places for pair in pairs]], np.divide),
        relaxed=bootstrap([[len(a.relaxed) for a in others], tokens], np.divide),
        first_difference=median(parted) if parted else None,
        agreement=wilson(sum(pair.agrees for pair in pairs), n),
        similarity=bootstrap([close, [1.0] * len(close)], np.divide) if len(close) == n else None,
        perplexity=bootstrap([nll, counts], lambda a, b: np.exp(a / b)),  # type: ignore[list-item]
        perplexity_ratio=bootstrap(
            [nll, counts, own_nll, own_counts],  # type: ignore[list-item]
            lambda a, b, c, d: np.exp(a / b - c / d),
        ),
        score=wilson(sum(after for _, after in judged), len(judged)),
        score_change=paired_change([before for before, _ in judged], [after for _, after in judged]),
        acceptance=bootstrap([[a.accepted for a in others], [a.drafted for a in others]], np.divide),
        tokens_per_step=bootstrap([tokens, steps], np.divide),
        step_gain=bootstrap([tokens, steps, own_tokens, own_steps], lambda a, b, c, d: (a / b) / (c / d)),
    )
