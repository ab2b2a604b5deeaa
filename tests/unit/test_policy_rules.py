"""The rules over the engine's flat rows equal the pure ones, in batches of mixed policies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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
from deployments.target.policy_rules import Relaxation, pick, sums
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
    batch: Evidence, policies: list[Policy], seeds: list[int], truncating: bool, compiled: bool
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
    bonus = torch.zeros(1, VOCAB)
    logits = torch.cat([torch.cat([torch.from_numpy(batch.logits[i, :n]), bonus]) for i, n in enumerate(counts)])
    drawn = torch.from_numpy(np.concatenate([batch.drawn[i, : n + 1] for i, n in enumerate(counts)]))
    grid = _grid(counts)
    drafts = _pad(torch.from_numpy(np.concatenate([batch.drafts[i, :n] for i, n in enumerate(counts)])), counts)
    relaxation = Relaxation(lossy, drafts.numpy(), grid.numpy())
    if truncating:  # it must not look at what the sampler changes afterwards
        relaxation.before(logits)
        logits = torch.where(torch.isfinite(logits), 0.0, logits)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(policy_rules, "compiled", lambda logits: False)
        drawn = relaxation.after(drawn, logits)
    committed = verify(drafts, drawn[grid])
    passed = np.zeros(drafts.shape, bool) if relaxation.passed is None else relaxation.passed
    return committed.tolist(), (passed & (committed[:, :-1] == drafts).numpy()).tolist()


@pytest.mark.parametrize("compiled", [True, False])
@given(batch=batches(VOCAB), data=st.data(), truncating=st.booleans())
@settings(deadline=None)  # compiles
def test_mixed_batches_equal_the_pure_rules(
    batch: Evidence, data: st.DataObject, truncating: bool, compiled: bool
) -> None:
    size, width = batch.drafts.shape
    policies = data.draw(st.lists(st.sampled_from(POLICIES), min_size=size, max_size=size))
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=size, max_size=size))
    counts = (batch.drafts != NO_DRAFT).sum(axis=1)
    if not counts.max():
        return
    got, relaxed = on_device(batch, policies, seeds, truncating, compiled)
    for index, policy in enumerate(policies):
        expected = decide(policy, row(batch, index, seeds[index]))
        wide = got[index] + [PAD] * (width + 1 - len(got[index]))
        marks = relaxed[index] + [False] * (width - len(relaxed[index]))
        assert wide == expected.committed[0].tolist()
        assert marks == expected.relaxed[0].tolist()


@given(batches(VOCAB))
@settings(deadline=None)
def test_the_device_sums_what_the_pure_form_does(batch: Evidence) -> None:
    ids, probs = (array.reshape(-1, array.shape[-1]) for array in (batch.top_ids, batch.top_probs))
    logits = batch.logits.reshape(-1, VOCAB)
    rows = np.arange(len(logits))
    at = pick(torch.from_numpy(logits), rows, ids)
    value, top = nkl.from_logits(nkl.terms(probs, at), *sums(torch.from_numpy(logits), rows, at.max(axis=1)), VOCAB)
    expected, highest = nkl.nkl(ids, probs, logits)
    good = nkl.usable(ids, probs, VOCAB)
    assert value[good] == pytest.approx(expected[good], abs=2e-5)
    assert top == pytest.approx(highest, abs=2e-5)


@given(batches(VOCAB))
def test_the_bound_is_one(batch: Evidence) -> None:
    at = np.take_along_axis(batch.logits, batch.top_ids, axis=-1)
    bound = nkl.at_least(nkl.terms(batch.top_probs, at), batch.logits.max(axis=-1), VOCAB)
    value, _ = nkl.nkl(batch.top_ids, batch.top_probs, batch.logits)
    good = nkl.usable(batch.top_ids, batch.top_probs, VOCAB)
    assert (np.minimum(bound, 1.0)[good] <= value[good] + 1e-6).all()


@pytest.fixture(params=[True, False], ids=["compiled", "any device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways through the rules."""
    if not request.param:
        monkeypatch.setattr(policy_rules, "compiled", lambda logits: False)


DRAFTS, DRAWN, GRID = np.asarray([[1]]), np.asarray([[0, 3]]), np.asarray([[0, 1]])


def committed(lossy: Lossy | None, logits: torch.Tensor, drafts: np.ndarray = DRAFTS) -> list[int]:
    """What counts as drawn, where the target drew ``DRAWN``."""
    return Relaxation([lossy], drafts, GRID).after(torch.from_numpy(DRAWN[0]), logits).tolist()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_a_broken_row_passes_nothing(bad: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = bad
    proposal = Proposal(3, [1], np.asarray([[0, 1]], np.int32), np.asarray([[0.3, 0.3]], np.float32))
    lossy = Lossy(policy_of({"name": "nkl", "delta": 1.0, "mask": 1.0}), 0, 0, frozenset(), proposal)
    assert committed(lossy, logits) == [0, 3]
    assert committed(lossy, torch.zeros(2, VOCAB)) == [1, 3]


@pytest.mark.usefixtures("way")
def test_a_row_of_very_different_logits_is_summed_as_any() -> None:
    """The target all but certain of a token that nobody named: far away, unless a policy takes everything."""
    logits = torch.full((2, VOCAB), -200.0)
    logits[0, :2] = torch.tensor([-100.0, -100.5])
    near = torch.tensor([[0.0, -0.5, *[-20.0] * (VOCAB - 2)]] * 2)
    proposal = Proposal(3, [1], np.asarray([[0, 1]], np.int32), np.asarray([[0.6, 0.35]], np.float32))
    lossy = Lossy(policy_of({"name": "nkl", "delta": 0.3, "mask": 1.0}), 0, 0, frozenset(), proposal)
    assert committed(lossy, logits) == committed(lossy, near) == [1, 3]
    logits[0, 7] = 100.0
    assert committed(lossy, logits) == [0, 3]


@pytest.mark.usefixtures("way")
def test_a_mask_of_one_is_off_whatever_sums_are_rounded_to() -> None:
    logits = torch.tensor([[0.0, -9.0, *[-60.0] * (VOCAB - 2)]] * 2)
    proposal = Proposal(3, [1], np.asarray([[0, 1]], np.int32), np.asarray([[0.8, 0.1999]], np.float32))
    lossy = Lossy(policy_of({"name": "nkl", "delta": 1.0, "mask": 1.0}), 0, 0, frozenset(), proposal)
    assert committed(lossy, logits) == [1, 3]


@pytest.mark.usefixtures("way")
def test_what_cannot_pass_does_not() -> None:
    ids, probs = np.asarray([[0, 1]], np.int32), np.asarray([[0.5, 0.3]], np.float32)
    good = Lossy(policy_of({"name": "nkl", "delta": 1.0}), 0, 0, frozenset(), Proposal(3, [1], ids, probs))
    logits = torch.zeros(2, VOCAB)
    assert committed(good, logits) == [1, 3]
    assert good.proposal is not None
    for bad in (
        None,
        replace(good, proposal=None),
        replace(good, stops=frozenset({0})),
        replace(good, stops=frozenset({1})),
        replace(good, policy=policy_of({"name": "nkl", "delta": 0})),
        *(
            replace(good, proposal=replace(good.proposal, ids=of, probs=told))
            for of, told in (
                (ids, np.zeros_like(probs)),
                (ids, -probs),
                (ids, probs * np.nan),
                (ids, probs * 2),
                (ids, np.asarray([[0.0, 0.9999]], np.float32)),
                (ids + 2, probs),
                (ids + VOCAB - 1, probs),
                (ids - 1, probs),
                (np.asarray([[1, 1]], np.int32), probs),
                (ids[:, :0], probs[:, :0]),
            )
        ),
    ):
        assert committed(bad, logits) == [0, 3]
    assert committed(good, logits, np.asarray([[NO_DRAFT]])) == [0, 3]
    assert committed(good, logits, np.asarray([[0]])) == [0, 3]
    logits[0, 1] = -torch.inf
    assert committed(good, logits) == [0, 3]


def test_behind_what_ends_an_answer_there_are_no_candidates() -> None:
    ids, probs = np.asarray([[0, 1]] * 3, np.int32), np.asarray([[0.5, 0.3]] * 3, np.float32)
    lossy = Lossy(policy_of({"name": "nkl"}), 0, 0, frozenset({9}), Proposal(3, [1, 9, 1], ids, probs))
    found = candidates([lossy], np.asarray([[1, 9, 1]]), np.asarray([[0, 0, 0, 0]]))
    assert found is not None
    assert found.offset.tolist() == [0]


def test_drafts_with_fewer_probabilities_stand_beside_others() -> None:
    """A request's result does not depend on how many probabilities another's draft sends."""
    policy = policy_of({"name": "nkl"})
    one = Proposal(3, [1], np.asarray([[0, 1]], np.int32), np.asarray([[0.5, 0.3]], np.float32))
    two = Proposal(3, [1], np.asarray([[0, 1, 2]], np.int32), np.asarray([[0.5, 0.3, 0.1]], np.float32))
    lossy = [Lossy(policy, 0, 0, frozenset(), p) for p in (one, two)]
    found = candidates(lossy, np.repeat(DRAFTS, 2, 0), np.repeat(DRAWN, 2, 0))
    assert found is not None
    logits = np.random.default_rng(0).normal(size=(1, VOCAB))
    alone = nkl.nkl(one.ids, one.probs, logits)[0]
    assert nkl.nkl(found.ids[:1], found.probs[:1], logits)[0] == alone
