"""Policies as values, the rules they name, and what they commit."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.acceptance import lossless, probabilistic
from deployments.chain.acceptance.evidence import Evidence
from deployments.chain.acceptance.policy import KNOBS, LOSSLESS, NAMES, Policy, PolicyError, policy_of, require_offered
from deployments.chain.acceptance.registry import RULES, decide
from deployments.chain.noise import splitmix64
from tests.unit.policy_cases import batches, evidence_of

VOCAB = 12


class TestPolicyOf:
    def test_names_and_rules_agree(self) -> None:
        assert set(RULES) == set(NAMES) - {"block"}

    @pytest.mark.parametrize("name", NAMES)
    def test_a_name_alone_has_defaults(self, name: str) -> None:
        assert policy_of({"name": name}) == Policy(name=name)

    def test_defaults_are_those_of_the_design(self) -> None:
        got = policy_of({"name": "nkl"})
        assert (got.delta, got.alpha, got.delta_max, got.mask) == (0.15, 0.08, 0.3, 0.9)
        assert policy_of({"name": "block"}).min_block_len == 3
        assert policy_of({"name": "semantic"}).similarity == 0.75

    def test_the_cap_follows_delta(self) -> None:
        assert policy_of({"name": "nkl", "delta": 0.4}).delta_max == 0.8
        assert policy_of({"name": "nkl", "delta": 0.7}).delta_max == 1.0
        assert policy_of({"name": "nkl", "delta": 0.4, "delta_max": 0.4}).delta_max == 0.4

    def test_what_can_change_answers(self) -> None:
        assert not LOSSLESS.lossy
        assert not policy_of({"name": "block", "base": "lossless"}).lossy
        assert not policy_of({"name": "nkl", "delta": 0}).lossy
        assert policy_of({"name": "nkl", "delta": 0.01}).lossy
        assert policy_of({"name": "block"}).lossy
        assert policy_of({"name": "semantic"}).lossy

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({}, "name: required; known: lossless, nkl, block, probabilistic, semantic"),
            ({"name": "nlk"}, "name: no policy 'nlk'; known: lossless, nkl, block, probabilistic, semantic"),
            ({"name": 5}, "name: no policy 5; known: lossless, nkl"),
            ({"name": "nkl", "delta": 1.01}, "delta: must be a number in [0.0, 1.0], got 1.01"),
            ({"name": "nkl", "delta": -0.01}, "delta: must be a number in [0.0, 1.0], got -0.01"),
            ({"name": "nkl", "delta": math.nan}, "delta: must be a number in [0.0, 1.0], got nan"),
            ({"name": "nkl", "delta": "0.1"}, "delta: must be a number in [0.0, 1.0], got '0.1'"),
            ({"name": "nkl", "delta": True}, "delta: must be a number in [0.0, 1.0], got True"),
            ({"name": "nkl", "delta": 0.3, "delta_max": 0.2}, "delta_max: must be in [delta, 1] = [0.3, 1], got 0.2"),
            ({"name": "nkl", "alpha": 2}, "alpha: must be a number in [0.0, 1.0], got 2"),
            ({"name": "nkl", "mask": 1.5}, "mask: must be a number in [0.0, 1.0], got 1.5"),
            ({"name": "nkl", "length_scale": 1.5}, "length_scale: must be an integer in [0, 1048576], got 1.5"),
            ({"name": "block", "min_block_len": 0}, "min_block_len: must be an integer in [1, 32], got 0"),
            ({"name": "block", "min_block_len": 33}, "min_block_len: must be an integer in [1, 32], got 33"),
            ({"name": "block", "base": "block"}, "base: block cannot stand on 'block'; known: lossless, nkl, probabilistic"),
            ({"name": "block", "base": []}, "base: block cannot stand on []; known: lossless, nkl, probabilistic"),
            ({"name": "nkl", "min_block_len": 3}, "min_block_len: not a parameter of nkl; its parameters: delta, alpha"),
            ({"name": "lossless", "delta": 0.1}, "delta: not a parameter of lossless; its parameters: none"),
            ({"name": "nkl", "dleta": 0.1}, "dleta: not a parameter of nkl; its parameters: delta, alpha, delta_max"),
            ({"name": "semantic", "similarity": 2}, "similarity: must be a number in [0.0, 1.0], got 2"),
        ],
    )  # fmt: skip
    def test_mistakes_are_named(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(PolicyError) as error:
            policy_of(given)
        assert str(error.value).startswith(message)
        assert str(error.value).startswith(error.value.param)

    @pytest.mark.parametrize(
        "raw", ['{"name": "nlk"}', '{"name": "nkl", "delta": 2}', '{"name": "block", "base": "x"}']
    )
    def test_no_decoded_one_is_out_of_range(self, raw: str) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(raw, type=Policy)

    def test_it_crosses_the_wire_whole(self) -> None:
        policy = policy_of({"name": "block", "delta": 0.2, "delta_max": 0.3, "min_block_len": 2})
        assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy

    def test_semantic_is_offered_where_there_is_a_sentence_model(self) -> None:
        require_offered(policy_of({"name": "block"}), semantic=False)
        require_offered(policy_of({"name": "semantic"}), semantic=True)
        with pytest.raises(PolicyError, match=r"chain\.semantic\); offered: lossless, nkl, block, probabilistic"):
            require_offered(policy_of({"name": "semantic"}), semantic=False)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    name = draw(st.sampled_from(NAMES))
    given: dict[str, Any] = {"name": name}
    if "delta" in KNOBS[name]:
        given |= {"delta": draw(st.sampled_from([0.0, 0.1, 0.4, 1.0])), "mask": draw(st.sampled_from([0.5, 0.9, 1.0]))}
        given["length_scale"] = draw(st.sampled_from([0, 5]))
    if name == "block":
        given |= {"min_block_len": draw(st.integers(1, 4)), "base": draw(st.sampled_from(["nkl", "probabilistic"]))}
    return policy_of(given)


@given(batches(VOCAB), policies())
def test_a_prefix_is_committed_and_differs_only_where_it_may(batch: Evidence, policy: Policy) -> None:
    found = decide(policy, batch)
    plain, agreed = lossless.verify(batch.drafts, batch.drawn)
    may = batch.mismatches()
    for row, accepted in enumerate(found.accepted):
        committed = found.committed[row]
        assert committed[:accepted].tolist() == batch.drafts[row, :accepted].tolist()
        assert committed[accepted] == batch.drawn[row, accepted]
        assert (committed[accepted + 1 :] == lossless.PAD).all()
        differs = committed[:accepted] != batch.drawn[row, :accepted]
        assert differs.tolist() == found.relaxed[row, :accepted].tolist()
        assert not found.relaxed[row, accepted:].any()
        assert (~differs | may[row, :accepted]).all()
        assert accepted >= agreed[row]
        if not policy.lossy:
            assert committed.tolist() == plain[row].tolist()


@given(batches(VOCAB), st.integers(1, 5))
def test_a_relaxed_run_of_a_block_is_long_enough(batch: Evidence, shortest: int) -> None:
    policy = policy_of({"name": "block", "min_block_len": shortest, "delta": 1.0, "mask": 1.0})
    found, base = decide(policy, batch), decide(policy_of({"name": "nkl", "delta": 1.0, "mask": 1.0}), batch)
    _, agreed = lossless.verify(batch.drafts, batch.drawn)
    expected = np.where(base.accepted >= shortest, base.accepted, agreed)
    assert found.accepted.tolist() == expected.tolist()


@given(batches(VOCAB))
def test_probabilistic_accepts_nothing_that_nkl_does_not(batch: Evidence) -> None:
    knobs = {"delta": 0.4, "mask": 0.95}
    found = decide(policy_of({"name": "probabilistic", **knobs}), batch)
    assert (found.accepted <= decide(policy_of({"name": "nkl", **knobs}), batch).accepted).all()


def near(**changes: Any) -> Evidence:
    """One draft token, 1, where the target drew 0; the distributions are nearly equal."""
    probs = [0.4, 0.35, 0.2]
    given: dict[str, Any] = {
        "drafts": [[1]],
        "drawn": [[0, 5]],
        "top_ids": [[[0, 1, 2]]],
        "top_probs": [[probs]],
        "logits": [[[*np.log([0.45, 0.3, 0.2]), *np.log([0.05 / 9] * 9)]]],
    }
    return evidence_of(**{**given, **changes})


class TestOneToken:
    def accepted(self, policy: dict[str, Any], **changes: Any) -> int:
        return int(decide(policy_of(policy), near(**changes)).accepted[0])

    def test_passes_where_nothing_objects(self) -> None:
        assert self.accepted({"name": "nkl"}) == 1
        assert self.accepted({"name": "lossless"}) == 0

    def test_not_where_the_target_is_certain(self) -> None:
        assert self.accepted({"name": "nkl", "mask": 0.4}) == 0

    def test_not_where_the_request_forbids_it(self) -> None:
        assert self.accepted({"name": "nkl", "delta": 1.0}, allowed=[[False]]) == 0

    def test_not_where_either_token_ends_the_answer(self) -> None:
        assert self.accepted({"name": "nkl"}, stops=[[1, lossless.PAD]]) == 0
        assert self.accepted({"name": "nkl"}, stops=[[0, lossless.PAD]]) == 0
        assert self.accepted({"name": "nkl"}, stops=[[2, lossless.PAD]]) == 1

    def test_not_where_the_draft_does_not_name_it(self) -> None:
        assert self.accepted({"name": "nkl"}, drafts=[[7]]) == 0

    def test_semantic_needs_a_similarity(self) -> None:
        assert self.accepted({"name": "semantic"}) == 0
        assert self.accepted({"name": "semantic"}, similarity=[[0.8]]) == 1
        assert self.accepted({"name": "semantic"}, similarity=[[0.7]]) == 0
        assert self.accepted({"name": "semantic", "mask": 0.4}, similarity=[[0.9]]) == 0

    def test_probabilistic_follows_its_coin(self) -> None:
        assert self.accepted({"name": "probabilistic"}, uniform=[[0.0]]) == 1
        assert self.accepted({"name": "probabilistic"}, uniform=[[0.999]]) == 0


class TestCoins:
    @given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=8))
    def test_they_depend_on_seed_and_position_alone(self, keys: list[tuple[int, int]]) -> None:
        seeds, positions = (np.asarray(values, np.uint64) for values in zip(*keys, strict=True))
        together = probabilistic.coins(seeds, positions)
        for (seed, position), coin in zip(keys, together.tolist(), strict=True):
            word = splitmix64(splitmix64(seed ^ probabilistic.COIN) ^ position)
            assert coin == (word >> 40) * 2.0**-24

    def test_they_are_uniform(self) -> None:
        found = np.sort(probabilistic.coins(np.asarray(3), np.arange(4096)))
        # Kolmogorov-Smirnov distance; 1.95 / sqrt(n) is exceeded once in a thousand times
        assert np.abs(found - (np.arange(4096) + 0.5) / 4096).max() < 1.95 / 64

    def test_a_nearer_draft_passes_more_often(self) -> None:
        policy, tries = policy_of({"name": "probabilistic"}), 400
        rates = []
        for shift in (0.05, 0.5, 0.9):
            logits = np.log([0.45, 0.3, 0.2] + [0.05 / 9] * 9) + np.asarray([0, -shift, shift, *[0] * 9])
            coins = probabilistic.coins(np.asarray(1), np.arange(tries))
            rates.append(sum(decide(policy, near(logits=[[logits]], uniform=[[coin]])).accepted[0] for coin in coins))
        assert rates[0] > rates[1] > rates[2] > 0
