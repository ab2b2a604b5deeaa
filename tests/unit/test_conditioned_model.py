"""A conditioned draft over ONNX Runtime computes what the same weights give in numpy, whatever the order of calls."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hw.onnx.checkpoint import HEAD_IDS, CheckpointError
from hw.onnx.conditioned import ConditionedModel
from hw.onnx.session import OnnxModel, UnsupportedModel
from tests.conditioned import Random, Sizes

SIZES = Sizes(layers=2)
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def draft() -> Random:
    return Random(SIZES)


@pytest.fixture(scope="module")
def model(draft: Random, tmp_path_factory: pytest.TempPathFactory) -> ConditionedModel:
    return ConditionedModel(draft.write(tmp_path_factory.mktemp("draft")), slots=4, context=48)


def hidden(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, SIZES.hidden)).astype(np.float16)


def tokens(count: int, seed: int = 2) -> list[int]:
    return np.random.default_rng(seed).integers(0, SIZES.vocab, count).tolist()


def before(rows: np.ndarray) -> np.ndarray:
    """The feature before each of as many tokens as ``rows``: zeros, then all rows but the last."""
    return np.concatenate([np.zeros((1, SIZES.hidden), np.float32), rows[:-1].astype(np.float32)])


def test_sizes_and_ids(model: ConditionedModel, draft: Random) -> None:
    assert model.vocab_size == SIZES.vocab
    assert model.hidden_size == SIZES.hidden
    assert model.token_ids.tolist() == draft.head_ids.tolist()
    assert model.costs.decode(1) > 0.0


def test_prompts_are_measured_as_they_are_read(
    draft: Random, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their hidden states: in one call, not a token at a time."""
    calls: list[int] = []
    read = ConditionedModel._read
    monkeypatch.setattr(
        ConditionedModel, "_read", lambda self, slot, ids, start: calls.append(len(ids)) or read(self, slot, ids, start)
    )
    model = ConditionedModel(draft.write(tmp_path_factory.mktemp("measured")), slots=2, context=48)
    assert set(calls) == {4, 32}
    assert not model._given[:, 1:].any()


def test_a_prompt_with_hidden_states(model: ConditionedModel, draft: Random) -> None:
    ids, rows = tokens(20), hidden(20)
    expected, _ = draft.forward(ids, before(rows))
    model.open_hidden(1, 0)
    model.write_hidden(1, 0, rows)
    np.testing.assert_allclose(model.prefill(1, ids, 0), expected, atol=TOLERANCE)
    model.prefill(1, ids[:7], 0)  # read again, in slices
    np.testing.assert_allclose(model.prefill(1, ids[7:], 7), expected, atol=TOLERANCE)


def test_positions_without_have_zeros(model: ConditionedModel, draft: Random) -> None:
    ids, rows = tokens(12), hidden(12)
    rows[:5] = 0
    expected, _ = draft.forward(ids, before(rows))
    model.open_hidden(0, 5)
    model.write_hidden(0, 5, rows[5:])
    model.prefill(0, ids[:3], 0)
    np.testing.assert_allclose(model.prefill(0, ids[3:], 3), expected, atol=TOLERANCE)


def own_features(draft: Random, ids: list[int], features: np.ndarray, given: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits after the last token, and the features used: the first ``given`` as they are, the others the draft's own, one by one."""
    used = features.astype(np.float32).copy()
    for position in range(given, len(ids)):
        used[position] = draft.forward(ids[:position], used[:position])[1][-1]
    return draft.forward(ids, used)[0], used


@pytest.mark.parametrize("by", ["decode", "prefill", "both"])
def test_own_features_go_on_where_the_targets_end(model: ConditionedModel, draft: Random, by: str) -> None:
    ids, rows = tokens(16), hidden(16)
    expected, used = own_features(draft, ids, before(rows), 11)
    model.open_hidden(2, 0)
    model.write_hidden(2, 0, rows[:10])
    model.prefill(2, ids[:11], 0)
    if by == "prefill":  # several tokens with features that are only known one after the other
        logits = model.prefill(2, ids[11:], 11)
    else:
        for position in range(11, 14 if by == "both" else 16):
            (logits,) = model.decode([2], [ids[position]], [position])
        if by == "both":
            logits = model.prefill(2, ids[14:], 14)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
    np.testing.assert_allclose(model.feature(2, 13), used[14], atol=TOLERANCE)
    # The target's come: what was computed with own ones is computed again, and they are not replaced by own ones.
    model.write_hidden(2, 10, rows[10:15])
    expected, _ = draft.forward(ids, before(rows))
    np.testing.assert_allclose(model.prefill(2, ids[11:], 11), expected, atol=TOLERANCE)
    np.testing.assert_array_equal(model.feature(2, 12), rows[12].astype(np.float32))


def test_slots_do_not_mix(model: ConditionedModel, draft: Random) -> None:
    """Rows of one call have positions and features of their own; a slot between them is computed for nothing."""
    sequences = {slot: (tokens(5 + 3 * slot, slot), hidden(5 + 3 * slot, slot + 9)) for slot in (0, 1, 3)}
    for slot, (ids, rows) in sequences.items():
        model.open_hidden(slot, 0)
        model.write_hidden(slot, 0, rows[:-1])
        model.prefill(slot, ids[:-1], 0)
    model._largest_gap = 3
    order = [3, 0, 1]
    for asked in (order, [3, 0]):
        logits = model.decode(
            asked, [sequences[slot][0][-1] for slot in asked], [len(sequences[slot][0]) - 1 for slot in asked]
        )
        for slot, row in zip(asked, logits, strict=True):
            ids, rows = sequences[slot]
            np.testing.assert_allclose(row, draft.forward(ids, before(rows))[0], atol=TOLERANCE)


def test_a_copy_takes_features_along(model: ConditionedModel, draft: Random) -> None:
    ids, rows = tokens(14), hidden(14)
    model.open_hidden(0, 0)
    model.write_hidden(0, 0, rows[:13])
    model.prefill(0, ids[:6], 0)
    model.open_hidden(3, 0)
    model.write_hidden(3, 0, hidden(40, 5))  # of whoever had the slot before
    model.move(0, 3, 6)
    expected, _ = draft.forward(ids, before(rows))
    np.testing.assert_allclose(model.prefill(3, ids[6:], 6), expected, atol=TOLERANCE)
    (logits,) = model.decode([3], [4], [14])  # behind what the target sent: own features, not those of before
    expected, _ = own_features(draft, [*ids, 4], before(np.concatenate([rows, rows[:1]])), 14)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
    # a part of what is missing, behind a position whose feature came after it was copied
    model.write_hidden(0, 13, rows[13:])
    model.prefill(0, ids[6:], 6)
    model.move(0, 3, 14, 14)
    np.testing.assert_array_equal(model.feature(3, 13), rows[13].astype(np.float32))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_way_of_reading_gives_the_same(draft: Random, model: ConditionedModel, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 24))
    known = data.draw(st.integers(0, count - 1))  # hidden states of so many positions
    absent = data.draw(st.integers(0, known))  # the first of them have none
    ids, rows = tokens(count, count), hidden(count, known)
    rows[:absent] = 0
    expected, _ = own_features(draft, ids, before(rows), known + 1)
    model.open_hidden(1, absent)
    model.write_hidden(1, absent, rows[absent:known])
    at = 0
    while at < count:
        take = data.draw(st.integers(1, count - at))
        logits = (
            model.decode([1], ids[at : at + 1], [at])[0] if take == 1 else model.prefill(1, ids[at : at + take], at)
        )
        at += take
    np.testing.assert_allclose(logits, expected, atol=5 * TOLERANCE)


def test_what_does_not_fit_is_refused(model: ConditionedModel) -> None:
    for start, rows in ((-1, hidden(2)), (47, hidden(2)), (0, hidden(2)[:, :-1]), (0, hidden(2)[0])):
        with pytest.raises(ValueError, match="do not fit"):
            model.write_hidden(0, start, rows)
    with pytest.raises(ValueError, match="do not fit"):
        model.prefill(0, [1, 2], 47)
    with pytest.raises(ValueError, match="outside a context"):
        model.decode([0], [1], [48])
    with pytest.raises(ValueError, match="below"):
        model.decode([0], [SIZES.vocab], [0])


def test_folders_that_are_not_what_they_say(draft: Random, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = draft.write(tmp_path_factory.mktemp("draft"))
    with pytest.raises(UnsupportedModel, match="takes the target's hidden states"):
        OnnxModel(folder)
    np.save(folder / HEAD_IDS, draft.head_ids[::-1])
    with pytest.raises(CheckpointError, match="ascend"):
        ConditionedModel(folder)
    np.save(folder / HEAD_IDS, draft.head_ids[:-1])
    with pytest.raises(CheckpointError, match="belongs"):
        ConditionedModel(folder)
    (folder / HEAD_IDS).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        ConditionedModel(folder)
