"""Verification by agreement: a draft token is committed iff it is the token the target itself drew at that position.

The target draws one token at every verified position with noise keyed by (seed, position). Its draw at position ``i`` is
conditioned on the draft tokens before ``i``, so it is what plain decoding would have drawn exactly as long as all of those
equal the target's own draws. Hence only a *prefix* of agreeing tokens counts, followed by the target's own token.
"""

import numpy as np
import numpy.typing as npt

PAD = -1  # in outputs: no token here
NO_DRAFT = -2  # in drafts: row shorter than the widest; agrees with nothing


def verify(
    drafts: npt.NDArray[np.integer],  # [B, T], rows padded with NO_DRAFT
    drawn: npt.NDArray[np.integer],  # [B, T + 1], the target's own token at each position
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ``(committed [B, T + 1] padded with PAD, accepted [B])``.

    Row ``b`` commits ``accepted[b]`` draft tokens and then the target's own ``drawn[b, accepted[b]]``.
    """
    if drafts.ndim != 2 or drawn.shape != (drafts.shape[0], drafts.shape[1] + 1):
        raise ValueError(f"drafts {drafts.shape} need drawn tokens [B, T + 1], got {drawn.shape}")
    agrees = drafts == drawn[:, :-1]  # [B, T]
    accepted = np.cumprod(agrees, axis=1).sum(axis=1)  # length of the agreeing prefix
    keep = np.arange(drawn.shape[1])[None, :] <= accepted[:, None]
    return np.where(keep, drawn, PAD).astype(np.int64), accepted.astype(np.int64)
