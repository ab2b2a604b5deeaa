"""Top-k/top-p from the head of the distribution keeps exactly what vLLM's full sort keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from deployments.target.truncation import HEAD, truncate

VOCAB = 1500


@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 1.0, 4.0, 12.0]),
    k=st.none() | st.lists(st.sampled_from([1, 2, 7, 40, HEAD - 1, HEAD, 700, VOCAB]), min_size=3, max_size=3),
    p=st.none() | st.lists(st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]), min_size=3, max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_keeps_what_the_full_sort_keeps(seed: int, spread: float, k: list[int] | None, p: list[float] | None) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    tk = None if k is None else torch.tensor(k, dtype=torch.int32)
    tp = None if p is None else torch.tensor(p)
    ours = truncate(logits.clone(), tk, tp)
    if k is not None or p is not None:
        before, apart = logits.clone(), torch.empty_like(logits)
        assert torch.equal(truncate(before, tk, tp, apart), ours)
        assert torch.equal(before, logits)
    theirs = apply_top_k_top_p_pytorch(logits.clone(), tk, tp, allow_cpu_sync=True)
    kept, expected = torch.isfinite(ours), torch.isfinite(theirs)
    # rounding of a cumulative sum may move the boundary by one token, never more
    assert ((kept != expected).sum(1) <= 1).all()
    assert torch.equal(ours[kept], logits[kept])
    assert kept.any(dim=1).all()


@pytest.mark.parametrize("value", [0.0, -5.0])
def test_all_tied_keeps_all(value: float) -> None:
    logits = torch.full((1, VOCAB), value)
    assert torch.isfinite(truncate(logits, torch.tensor([5], dtype=torch.int32), None)).all()


def test_masked_tokens_stay_masked() -> None:
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [3, 9]] = torch.tensor([1.0, 2.0])
    ours = truncate(logits.clone(), None, torch.tensor([0.9]))
    assert torch.isfinite(ours).nonzero()[:, 1].tolist() == [3, 9]
    assert torch.isfinite(truncate(logits, torch.tensor([1], dtype=torch.int32), None)).nonzero()[:, 1].tolist() == [9]
