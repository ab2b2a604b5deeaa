"""The rules by name, and the one function that applies a policy to a batch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance import block, lossless, nkl, probabilistic, semantic
from deployments.chain.acceptance.evidence import Bools, Evidence
from deployments.chain.acceptance.policy import Policy

Rule = Callable[[Policy, Evidence], Bools]  # which mismatches [B, T] pass


def _nothing(_: Policy, evidence: Evidence) -> Bools:
    return np.zeros(evidence.drafts.shape, dtype=np.bool_)


# ``block`` is not among them: it counts what one of these lets pass
RULES: dict[str, Rule] = {
    "lossless": _nothing,
    "nkl": nkl.passes,
    "probabilistic": probabilistic.passes,
    "semantic": semantic.passes,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What a batch commits."""

    committed: npt.NDArray[np.int64]  # [B, T + 1] padded with PAD: accepted draft tokens, then one of the target's own
    accepted: npt.NDArray[np.int64]  # [B]
    relaxed: Bools  # [B, T] accepted tokens that differ from the target's own


def decide(policy: Policy, evidence: Evidence) -> Decision:
    """Apply one policy. Only a prefix is ever accepted: what follows a refused token was computed on top of it."""
    own = evidence.drafts == evidence.drawn[:, :-1]
    passing = block.keep_long(own, RULES[policy.rule](policy, evidence), policy.block)
    tokens = evidence.drawn.copy()
    tokens[:, :-1] = np.where(passing, evidence.drafts, tokens[:, :-1])
    committed, accepted = lossless.verify(evidence.drafts, tokens)
    inside = np.arange(evidence.drafts.shape[1])[None, :] < accepted[:, None]
    return Decision(committed, accepted, passing & inside)
