"""Batches of drafts with probabilities, for tests of policies."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from deployments.chain.acceptance.evidence import Evidence
from deployments.chain.acceptance.lossless import NO_DRAFT, PAD


def evidence_of(**given: Any) -> Evidence:
    """Arrays out of lists; what is left out forbids nothing."""
    drafts = np.asarray(given["drafts"], np.int64)
    batch = len(drafts)
    whole: dict[str, Any] = {
        "allowed": np.ones(drafts.shape, bool),
        "uniform": np.zeros(drafts.shape),
        "generated": np.zeros(batch, np.int64),
        "stops": np.full((batch, 0), PAD),
        "similarity": np.full(drafts.shape, np.nan),
        **{name: np.asarray(value) for name, value in given.items()},
    }
    return Evidence(**{**whole, "drafts": drafts})


@st.composite
def batches(draw: st.DrawFn, vocab: int) -> Evidence:
    """Drafts near and far from the target, in float32 and float16 as in the engine, with forbidden tokens and stops."""
    batch, width, k = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = (rng.normal(size=(batch, width, vocab)) * draw(st.sampled_from([0.3, 1.0, 3.0]))).astype(np.float32)
    apart = rng.choice([0.0, 0.3, 2.0], size=(batch, width, 1))
    weights = np.exp(logits + rng.normal(size=logits.shape) * apart)
    draft = weights / weights.sum(axis=-1, keepdims=True)
    ids = np.argsort(-draft, axis=-1)[..., :k]
    half = np.take_along_axis(draft, ids, axis=-1).astype(np.float16)
    probs = np.nextafter(half, np.float16(0)).astype(np.float32)
    probs[rng.random((batch, width)) < 0.1] = 0.0  # a position of which the draft knows nothing
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.1]))] = -np.inf
    logits[..., 0] = np.maximum(logits[..., 0], 0.0)  # something is always possible
    drawn = np.concatenate([logits.argmax(axis=-1), rng.integers(0, vocab, (batch, 1))], axis=1)
    chosen = np.take_along_axis(ids, rng.integers(0, k, (batch, width, 1)), axis=-1)[..., 0]
    drafts = np.where(rng.random((batch, width)) < 0.5, drawn[:, :-1], chosen)
    drafts = np.where(rng.random((batch, width)) < 0.1, rng.integers(0, vocab, (batch, width)), drafts)
    allowed = np.isfinite(np.take_along_axis(logits, drafts[..., None], axis=-1)[..., 0])
    for row in range(batch):
        drafts[row, draw(st.integers(0, width)) :] = NO_DRAFT
    stops = np.full((batch, 2), PAD)
    stops[rng.random(batch) < 0.4, 0] = int(rng.integers(0, vocab))
    return evidence_of(
        drafts=drafts,
        drawn=drawn,
        top_ids=ids,
        top_probs=probs,
        logits=logits,
        allowed=allowed,
        uniform=rng.random((batch, width)),
        generated=rng.integers(0, 20, batch),
        stops=stops,
    )
