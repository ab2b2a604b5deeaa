"""The rules on the device equal the pure ones, in batches of mixed policies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.acceptance import nkl
from deployments.chain.acceptance.candidates import Lossy, Proposal, candidates
from deployments.chain.acceptance.evidence import Evidence
from deployments.chain.acceptance.lossless import NO_DRAFT, PAD
from deployments.chain.acceptance.policy import LOSSLESS, Policy, policy_of
from deployments.chain.acceptance.probabilistic import coins
from deployments.chain.acceptance.registry import decide
from deployments.target import policy_rules
from deployments.target.acceptance import _grid, _pad, verify
from tests.unit.policy_cases import batches

VOCAB = 12
POLICIES = [
    LOSSLESS,
    *(
        policy_of(given)
        for given in (
            {"name": "nkl"},
            {"name": "nkl", "delta": 0.5, "mask": 0.6, "length_scale": 6},
            {"name": "nkl", "delta": 1.0, "mask": 1.0},
            {"name": "probabilistic", "delta": 0.5},
            {"name": "block", "delta": 0.5, "mask": 1.0},
            {"name": "block", "base": "probabilistic", "delta": 1.0, "min_block_len": 2},
            {"name": "block", "base": "lossless"},
        )
    ),
]


def row(batch: Evidence, index: int, seed: int) -> Evidence:
    """One request of a batch, with the coins of its seed."""
    names = ("drafts", "drawn", "top_ids", "top_probs", "logits", "allowed", "generated", "stops", "similarity")
    parts: dict[str, Any] = {name: getattr(batch, name)[index : index + 1] for name in names}
    base = 100 + int(batch.generated[index])
    uniform = coins(np.asarray(seed), base + np.arange(batch.drafts.shape[1]))[None]
    return Evidence(uniform=uniform, **parts)


def on_device(
    batch: Evidence, policies: list[Policy], seeds: list[int], truncating: bool
) -> tuple[list[list[int]], list[list[bool]]]:
    """Committed tokens and which of them are relaxed, by the engine's way through flat rows."""
    counts = (batch.drafts != NO_DRAFT).sum(axis=1).tolist()
    lossy = [
        Lossy(
            policy,
            seed,
            int(batch.generated[index]),
            frozenset(batch.stops[index].tolist()) - {PAD},
            Proposal(
                100 + int(batch.generated[index]),
                batch.drafts[index, : counts[index]].tolist(),
                batch.top_ids[index, : counts[index]].astype(np.int32),
                batch.top_probs[index, : counts[index]].astype(np.float32),
            ),
        )
        if policy.lossy
        else None
        for index, (policy, seed) in enumerate(zip(policies, seeds, strict=True))
    ]
    logits = torch.cat(
        [
            torch.cat(
                [torch.from_numpy(batch.logits[i, :n]), torch.zeros(1, VOCAB)]
            )  # drafts' rows, then the bonus one
            for i, n in enumerate(counts)
        ]
    )
    drawn = torch.from_numpy(np.concatenate([batch.drawn[i, : n + 1] for i, n in enumerate(counts)]))
    grid = _grid(counts, torch.device("cpu"))
    flat = np.concatenate([batch.drafts[i, :n] for i, n in enumerate(counts)])
    drafts = _pad(torch.from_numpy(flat), counts) if max(counts) else torch.zeros(len(counts), 0, dtype=torch.int64)
    relaxed = torch.zeros(drafts.shape, dtype=torch.bool)
    found = candidates(lossy, counts, VOCAB)
    if found is not None:
        relaxation = policy_rules.Relaxation(found, drafts, grid.numpy())
        if truncating:
            relaxation.before(logits)
        drawn = relaxation.after(drawn, logits)
        assert relaxation.passed is not None
        relaxed = relaxation.passed
    committed = verify(drafts, drawn[grid])
    return committed.tolist(), (relaxed & (committed[:, :-1] == drafts)).tolist()


@given(batches(VOCAB), st.data(), st.booleans())
def test_mixed_batches_equal_the_pure_rules(batch: Evidence, data: st.DataObject, truncating: bool) -> None:
    size, width = batch.drafts.shape
    policies = data.draw(st.lists(st.sampled_from(POLICIES), min_size=size, max_size=size))
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=size, max_size=size))
    counts = (batch.drafts != NO_DRAFT).sum(axis=1)
    if not counts.max():
        return
    got, relaxed = on_device(batch, policies, seeds, truncating)
    for index, policy in enumerate(policies):
        expected = decide(policy, row(batch, index, seeds[index]))
        wide = got[index] + [PAD] * (width + 1 - len(got[index]))
        marks = relaxed[index] + [False] * (width - len(relaxed[index]))
        assert wide == expected.committed[0].tolist()
        assert marks == expected.relaxed[0].tolist()


@given(batches(VOCAB))
def test_the_value_is_that_of_the_pure_form(batch: Evidence) -> None:
    ids, probs = (
        batch.top_ids.reshape(-1, batch.top_ids.shape[-1]),
        batch.top_probs.reshape(-1, batch.top_ids.shape[-1]),
    )
    logits = batch.logits.reshape(-1, VOCAB)
    good = nkl.usable(ids, probs, VOCAB)
    value, top = nkl.nkl(ids, probs, logits)
    log_q, highest = policy_rules.look(torch.from_numpy(logits), torch.from_numpy(ids))
    found = policy_rules.nkl(torch.from_numpy(probs), log_q, VOCAB).numpy()
    assert found[good] == pytest.approx(value[good], abs=2e-5)
    assert highest.numpy() == pytest.approx(top, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_passes_nothing(bad: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = bad
    proposal = Proposal(3, [1], np.asarray([[0, 1]], np.int32), np.asarray([[0.3, 0.3]], np.float32))
    policy = policy_of({"name": "nkl", "delta": 1.0, "mask": 1.0})
    found = candidates([Lossy(policy, 0, 0, frozenset(), proposal)], [1], VOCAB)
    assert found is not None
    relaxation = policy_rules.Relaxation(found, torch.tensor([[1]]), np.asarray([[0, 1]]))
    assert relaxation.after(torch.tensor([0, 0]), logits).tolist() == [0, 0]
    assert relaxation.after(torch.tensor([0, 0]), torch.zeros(2, VOCAB)).tolist() == [1, 0]


def test_what_cannot_pass_is_no_candidate() -> None:
    ids, probs = np.asarray([[0, 1]], np.int32), np.asarray([[0.5, 0.3]], np.float32)
    good = Lossy(policy_of({"name": "nkl"}), 0, 0, frozenset(), Proposal(3, [1], ids, probs))
    assert candidates([good], [1], VOCAB) is not None
    assert good.proposal is not None
    for bad in (
        None,
        replace(good, proposal=None),
        replace(good, stops=frozenset({1})),
        replace(good, policy=policy_of({"name": "nkl", "delta": 0})),
        replace(good, proposal=replace(good.proposal, tokens=[7])),
        replace(good, proposal=replace(good.proposal, probs=np.zeros_like(probs))),
        replace(good, proposal=replace(good.proposal, ids=ids[:, :0], probs=probs[:, :0])),
    ):
        assert candidates([bad], [1], VOCAB) is None
    assert candidates([good], [0], VOCAB) is None
    assert candidates([good], [1], 1) is None


def test_drafts_with_fewer_probabilities_stand_beside_others() -> None:
    """A request's result does not depend on how many probabilities another's draft sends."""
    policy = policy_of({"name": "nkl"})
    one = Proposal(3, [1], np.asarray([[0, 1]], np.int32), np.asarray([[0.5, 0.3]], np.float32))
    two = Proposal(3, [1], np.asarray([[0, 1, 2]], np.int32), np.asarray([[0.5, 0.3, 0.1]], np.float32))
    found = candidates([Lossy(policy, 0, 0, frozenset(), p) for p in (one, two)], [1, 1], VOCAB)
    assert found is not None
    logits = np.random.default_rng(0).normal(size=(1, VOCAB))
    alone = nkl.nkl(one.ids, one.probs, logits)[0]
    assert nkl.nkl(found.ids[:1], found.probs[:1], logits)[0] == alone
