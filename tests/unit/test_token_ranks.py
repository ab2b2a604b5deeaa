"""Ranks counted without a compiler equal vLLM's."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.sample import sampler

from deployments.target.token_ranks import count_at_least, install

numbers = st.floats(-4, 0, width=32).map(lambda x: round(x, 1))  # coarse: ties happen


@given(st.integers(1, 5), st.integers(1, 30), st.data())
def test_rank_is_one_more_than_what_is_above_and_ties_count(rows: int, width: int, data: st.DataObject) -> None:
    table = data.draw(st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=rows, max_size=rows))
    chosen = data.draw(st.lists(st.integers(0, width - 1), min_size=rows, max_size=rows))
    values = torch.tensor(table)
    picked = values.gather(1, torch.tensor(chosen).unsqueeze(1))
    got = count_at_least(values, picked)
    assert got.dtype == torch.int64
    assert got.tolist() == [sum(x >= row[at] for x in row) for row, at in zip(values.tolist(), chosen, strict=True)]


def test_vllm_uses_it_and_gathers_the_same() -> None:
    install()
    assert sampler.batched_count_greater_than is count_at_least
    logprobs = torch.tensor([[-3.0, -0.5, -1.0, -2.0], [-0.1, -4.0, -2.5, -3.0]])
    found = sampler.Sampler.gather_logprobs(logprobs, 2, torch.tensor([3, 0]))
    assert found.logprob_token_ids.tolist() == [[3, 1, 2], [0, 0, 2]]
    assert found.selected_token_ranks.tolist() == [3, 1]
