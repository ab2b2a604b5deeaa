"""Semantic acceptance: a mismatch passes if the draft's and the target's continuations mean the same.

A sentence model behind :class:`Similarity` says how close two texts are; :mod:`.guard` says where closeness proves nothing. What
is not known in time is not close.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from deployments.chain.acceptance.continuations import Phrase
from deployments.chain.acceptance.evidence import Bools, Evidence, Floats
from deployments.chain.acceptance.guard import objection, objection_in_text
from deployments.chain.acceptance.policy import Policy

Text = str | Phrase


class Similarity(Protocol):
    """Compares texts, or words in their texts, by meaning."""

    def compare(self, pairs: Sequence[tuple[Text, Text]], budget_s: float) -> Sequence[float]:
        """Cosine in [-1, 1] of each pair; NaN for pairs that did not fit into ``budget_s``."""


def different(draft: Text, target: Text) -> str:
    """What the guard has against a pair, see :mod:`.guard`; empty where it has nothing."""
    if isinstance(draft, str) or isinstance(target, str):
        return objection("".join(draft), "".join(target))
    return objection_in_text(draft[0], draft[1], target[1], draft[2])


def similarities(pairs: Sequence[tuple[Text, Text]], model: Similarity, budget_s: float) -> list[float]:
    """Cosine of each (draft's, target's) continuation; NaN where the guard objects or the model did not answer."""
    result = [math.nan] * len(pairs)
    open_pairs = [index for index, (draft, target) in enumerate(pairs) if not different(draft, target)]
    if open_pairs:
        found = model.compare([pairs[index] for index in open_pairs], budget_s)
        for index, value in zip(open_pairs, found, strict=True):
            result[index] = value
    return result


def top_probability(logits: Floats) -> Floats:
    """The target's largest probability ``[...]`` of ``logits [..., V]``; 1 where it is not defined."""
    with np.errstate(invalid="ignore", over="ignore"):
        highest = logits.max(axis=-1)
        top = 1.0 / np.exp(logits.astype(np.float64) - highest[..., None]).sum(axis=-1)
    return np.where(np.isfinite(top), top, 1.0)


def passes(policy: Policy, evidence: Evidence) -> Bools:
    """Mismatches that pass, ``[B, T]``: similar enough, and the target not certain of its own token."""
    close = evidence.similarity >= policy.similarity  # false for NaN
    result: Bools = evidence.mismatches() & close & (top_probability(evidence.logits) <= policy.mask)
    return result
