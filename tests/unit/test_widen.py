"""Long writes into slots take another way, and leave exactly what the plain one leaves."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hw.onnx import slots, widen
from hw.onnx.slots import KVBuffer


def halves(*shape: int, seed: int = 0) -> npt.NDArray[Any]:
    """Every kind of bfloat16: normal, subnormal, zeros of both signs, infinite."""
    words = np.random.default_rng(seed).integers(0, 2**16, shape).astype(np.uint16)
    words[(words & 0x7F80) == 0x7F80] &= 0xFF80  # no NaN: they compare with nothing
    return words.view(ml_dtypes.bfloat16)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([16, 32, 48, 80, 128]),
    st.integers(0, 4),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_what_is_streamed_is_what_is_copied(
    layers: int, heads: int, positions: int, dim: int, start: int, part: bool, seed: int
) -> None:
    kv = KVBuffer(layers, 3, heads, 16, dim)
    kv.array[...] = np.random.default_rng(seed).normal(size=kv.array.shape)
    wanted = kv.array.copy()
    source = halves(2 * layers + 2, heads + 1, positions, dim, seed=seed)
    source = source[2:, 1:] if part else np.ascontiguousarray(source[:-2, :-1])
    source.flags.writeable = False
    place = kv.array[:, 1, :, start : start + positions]
    assert widen.fits(source, place)
    widen.widen(source, place)
    wanted[:, 1, :, start : start + positions] = source.astype(np.float32)
    assert np.array_equal(kv.array, wanted)


def test_what_does_not_fit_is_known() -> None:
    kv = KVBuffer(1, 2, 2, 8, 32)
    place = kv.array[:, 0, :, :4]
    good = halves(2, 2, 4, 32)
    assert widen.fits(good, place)
    assert not widen.fits(good.astype(np.float16), place)
    assert not widen.fits(good.view(np.uint16), place)
    assert not widen.fits(good[:, :, :3], place)
    assert not widen.fits(halves(2, 2, 8, 32)[:, :, ::2], place)  # not dense
    assert not widen.fits(halves(2, 2, 4, 24), KVBuffer(1, 2, 2, 8, 24).array[:, 0, :, :4])  # not whole stores
    flat = np.zeros(2 * 2 * 4 * 32 + 1, np.float32)
    assert not widen.fits(good, flat[1:].reshape(2, 2, 4, 32)) or not widen.fits(good, flat[:-1].reshape(2, 2, 4, 32))
    still = np.zeros((2, 2, 4, 32), np.float32)
    still.flags.writeable = False
    assert not widen.fits(good, still)


@pytest.mark.parametrize("streaming", [True, False])
def test_long_writes_are_streamed_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr(slots, "_STREAM_BYTES", 4 * 2 * 32 * 64 * 4 if streaming else 4 * 2 * 32 * 64 * 4 + 1)
    kv = KVBuffer(2, 2, 2, 64, 64)
    seen: list[int] = []
    run = widen.widen

    def noting(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        seen.append(source.shape[2])
        run(source, target)

    monkeypatch.setattr(widen, "widen", noting)
    source = halves(4, 2, 32, 64)
    kv.write(1, 5, source)
    kv.write(0, 0, source[:, :, :31])  # shorter than is worth it
    assert seen == ([32] if streaming else [])
    assert np.array_equal(kv.array[:, 1, :, 5:37], source.astype(np.float32))
    assert np.array_equal(kv.array[:, 0, :, :31], source[:, :, :31].astype(np.float32))
    assert not kv.array[:, 1, :, :5].any()
    assert not kv.array[:, 1, :, 37:].any()


def test_other_types_and_wrong_shapes_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_STREAM_BYTES", 1)
    kv = KVBuffer(1, 2, 2, 8, 32)
    source = halves(2, 2, 4, 32)
    for same in (source.astype(np.float16), source.astype(np.float32), source):
        kv.write(0, 2, same)
        assert np.array_equal(kv.array[:, 0, :, 2:6], same.astype(np.float32))
    before = kv.array.copy()
    for start, wrong in ((5, source), (-1, source), (0, source[:1]), (0, source[0])):
        with pytest.raises(ValueError, match="does not fit"):
            kv.write(0, start, wrong)
    assert np.array_equal(kv.array, before)
    small = KVBuffer(1, 2, 2, 8, 32, np.float16)
    small.write(0, 0, source)
    assert np.array_equal(small.array[:, 0, :, :4], source.astype(np.float16))
