"""What the rules look at: drafts, the target's own draws, and both distributions, as arrays of one batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deployments.chain.acceptance.lossless import NO_DRAFT, PAD

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """``B`` requests, ``T`` draft tokens, ``k`` probabilities with each, ``V`` tokens of vocabulary, ``S`` stop tokens.

    *Matched* logits are the target's after everything that forbids or shifts tokens (grammar, allowed tokens, bad words,
    min_tokens, penalties, bias) and after the temperature, but before min_p, top-k and top-p: the draft's probabilities
    are those of its whole softmax at the same temperature (both at 1 where the request is greedy).
    """

    drafts: Ints  # [B, T], rows padded with NO_DRAFT
    drawn: Ints  # [B, T + 1], the target's own token at each position
    top_ids: Ints  # [B, T, k]
    top_probs: Floats  # [B, T, k]; what is missing to 1 is the tail's mass
    logits: Floats  # [B, T, V], matched
    allowed: Bools  # [B, T]: the draft token is still possible after min_p, top-k and top-p as well
    uniform: Floats  # [B, T] in [0, 1), keyed by (seed, position)
    generated: Ints  # [B] tokens generated before the first draft token
    stops: Ints  # [B, S], rows padded with PAD
    similarity: Floats  # [B, T] cosine of the two continuations; NaN where not known or where a guard objects

    def mismatches(self) -> Bools:
        """Draft tokens ``[B, T]`` a rule may let pass at all: possible for the target, and neither ends the answer.

        A token the request forbids never passes, and how long an answer is stays the target's own decision.
        """
        own = self.drawn[:, :-1]
        differs = (self.drafts != own) & (self.drafts != NO_DRAFT) & self.allowed
        result: Bools = differs & ~self._stops(self.drafts) & ~self._stops(own)
        return result

    def _stops(self, tokens: Ints) -> Bools:
        result: Bools = ((tokens[..., None] == self.stops[:, None, :]) & (tokens[..., None] != PAD)).any(axis=-1)
        return result
