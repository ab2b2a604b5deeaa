"""Verification by agreement, as a pure function and on the device."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deployments.chain.acceptance import lossless
from deployments.target.acceptance import _grid, _pad, verify
from deployments.target.sampler import Rows

tokens = st.integers(0, 3)  # few, so that agreement happens


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    batch, width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    drafts = draw(hnp.arrays(np.int64, (batch, width), elements=tokens))
    for row in range(batch):
        drafts[row, draw(st.integers(0, width)) :] = lossless.NO_DRAFT
    return drafts, draw(hnp.arrays(np.int64, (batch, width + 1), elements=tokens))


@given(batches())
def test_commits_the_agreeing_prefix_and_one_own_token(batch: tuple[np.ndarray, np.ndarray]) -> None:
    drafts, drawn = batch
    committed, accepted = lossless.verify(drafts, drawn)
    for row in range(len(drafts)):
        expected = []
        for draft, own in zip([*drafts[row], lossless.NO_DRAFT], drawn[row], strict=True):
            expected.append(own)
            if draft != own:
                break
        assert committed[row][committed[row] != lossless.PAD].tolist() == expected
        assert accepted[row] == len(expected) - 1
        assert (committed[row][len(expected) :] == lossless.PAD).all()


@given(batches())
def test_device_form_equals_pure_form(batch: tuple[np.ndarray, np.ndarray]) -> None:
    drafts, drawn = batch
    committed, _ = lossless.verify(drafts, drawn)
    on_device = verify(torch.from_numpy(drafts), torch.from_numpy(drawn))
    assert on_device.tolist() == committed.tolist()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_rows_and_grid_follow_vllms_flattening(counts: list[int]) -> None:
    rows = Rows.verifying(counts)
    assert len(rows) == sum(counts) + len(counts)
    grid = _grid(counts)
    flat = torch.arange(sum(counts), dtype=torch.int32)
    padded = _pad(flat, counts) if sum(counts) else None
    start, draft = 0, 0
    for request, count in enumerate(counts):
        assert rows.request[start : start + count + 1].tolist() == [request] * (count + 1)
        assert rows.offset[start : start + count + 1].tolist() == list(range(count + 1))
        assert grid[request, : count + 1].tolist() == list(range(start, start + count + 1))
        if padded is not None:
            assert padded[request, :count].tolist() == list(range(draft, draft + count))
            assert (padded[request, count:] == lossless.NO_DRAFT).all()
        start += count + 1
        draft += count
