"""Codecs against definitions, and what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hw.kv.codecs import LIMIT, CodecError, cast, dequantise, loss, pack_nibbles, quantise, unpack_nibbles

FLOATS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 33)), elements=st.floats(-(2.0**100), 2.0**100, width=32)
)
SMALL = arrays.arrays(np.float32, (3, 16), elements=st.floats(-60000, 60000, width=32))


@settings(deadline=None)
@given(FLOATS)
def test_bfloat16_rounds_as_torch_does_and_widens_exactly(values: np.ndarray) -> None:
    words = cast(values, "float32", "bfloat16")
    want = torch.from_numpy(values).to(torch.bfloat16)
    assert words.tobytes() == want.view(torch.int16).numpy().tobytes()
    assert cast(words, "bfloat16", "float32").tobytes() == want.float().numpy().tobytes()


@settings(deadline=None)
@given(SMALL)
def test_float16_rounds_as_numpy_does(values: np.ndarray) -> None:
    assert cast(values, "float32", "float16").tobytes() == values.astype(np.float16).tobytes()


def test_every_finite_half_survives_float32_unchanged() -> None:
    words = np.arange(2**16, dtype=np.uint16)
    finite16 = words[np.isfinite(words.view(np.float16))].view(np.float16)
    assert cast(cast(finite16, "float16", "float32"), "float32", "float16").tobytes() == finite16.tobytes()
    finite_b = words[(words & 0x7F80) != 0x7F80]
    assert cast(cast(finite_b, "bfloat16", "float32"), "float32", "bfloat16").tobytes() == finite_b.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_everywhere(bad: float) -> None:
    values = np.array([[1.0, bad]], np.float32)
    for target in ("float16", "bfloat16"):
        with pytest.raises(CodecError, match="NaN or infinity"):
            cast(values, "float32", target)
    with pytest.raises(CodecError, match="NaN or infinity"):
        quantise(values, "float32", "int8", "float32")
    with pytest.raises(CodecError, match="scale is negative"):
        dequantise(np.ones((1, 2), np.int8), np.array([bad], np.float32), "int8", "float32")


def test_overflow_is_refused() -> None:
    with pytest.raises(CodecError, match="too large for float16"):
        cast(np.array([65520.0], np.float32), "float32", "float16")
    with pytest.raises(CodecError, match="too large for bfloat16"):
        cast(np.array([np.finfo(np.float32).max]), "float32", "bfloat16")
    with pytest.raises(CodecError, match="too large for float16"):
        quantise(np.full((1, 2), 1e7, np.float32), "float32", "int8", "float16")


@settings(deadline=None)
@given(SMALL, st.sampled_from(["int8", "int4"]), st.sampled_from(["float16", "float32"]))
def test_quantised_values_are_within_half_a_step(values: np.ndarray, target: str, scale: str) -> None:
    values = values / 8  # scales of int4 fit float16
    integers, scales = quantise(values, "float32", target, scale)
    limit = LIMIT[target]
    assert np.abs(integers.astype(int)).max() <= limit
    back = dequantise(integers, scales, target, "float32")
    step = np.maximum(scales.astype(np.float64), 0)[:, None]
    # Rounding the scale to float16 moves it by up to 2^-11 or half its smallest subnormal, which limit steps multiply.
    slack = limit * (step * 2.0**-10 + (2.0**-24 if scale == "float16" else 1e-42)) + 1e-6 * np.abs(values)
    assert (np.abs(back - values) <= step / 2 + slack).all()


def test_scales_are_one_a_token_and_head_and_zero_for_zeros() -> None:
    values = np.array([[[1.0, -2.0, 0.5, 2.0], [0, 0, 0, 0]]], np.float32)
    integers, scales = quantise(values, "float32", "int8", "float32")
    assert scales.shape == (1, 2)
    assert scales.tolist() == [[np.float32(2 / 127), 0.0]]
    assert integers.tolist() == [[[64, -127, 32, 127], [0, 0, 0, 0]]]  # 63.5 rounds to even
    assert not dequantise(integers, scales, "int8", "float16")[0, 1].any()


def test_a_tiny_value_does_not_vanish_into_a_zero_scale() -> None:
    integers, scales = quantise(np.full((1, 4), 1e-7, np.float32), "float32", "int8", "float16")
    assert scales[0] > 0
    assert dequantise(integers, scales, "int8", "float32")[0, 0] == pytest.approx(1e-7, rel=0.5)


def test_nibbles_put_the_even_element_low() -> None:
    assert pack_nibbles(np.array([1, -1, -7, 7], np.int8)).tolist() == [0xF1, 0x79]


@settings(deadline=None)
@given(
    arrays.arrays(
        np.int8, st.tuples(st.integers(1, 4), st.integers(1, 8).map(lambda n: 2 * n)), elements=st.integers(-8, 7)
    )
)
def test_nibbles_come_back(integers: np.ndarray) -> None:
    packed = pack_nibbles(integers)
    assert packed.shape[-1] * 2 == integers.shape[-1]
    assert np.array_equal(unpack_nibbles(packed), integers)


def test_integers_that_no_encoder_writes_are_refused() -> None:
    one = np.ones(1, np.float32)
    with pytest.raises(CodecError, match="outside -127"):
        dequantise(np.array([[-128]], np.int8), one, "int8", "float32")
    with pytest.raises(CodecError, match="outside -7"):
        dequantise(np.array([[-8]], np.int8), one, "int4", "float32")
    with pytest.raises(CodecError, match="scales"):
        dequantise(np.array([[1]], np.int8), np.ones(2, np.float32), "int8", "float32")
    with pytest.raises(CodecError, match="odd number"):
        pack_nibbles(np.zeros((1, 3), np.int8))
    with pytest.raises(CodecError, match="carried as uint16"):
        cast(np.zeros(2, np.float16), "bfloat16", "float32")
    with pytest.raises(CodecError, match="quantise or dequantise"):
        cast(np.zeros(2, np.int8), "int8", "float32")


def test_loss_is_the_largest_difference_and_the_relative_rms() -> None:
    found = loss("a step", np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    assert (found.step, found.elements, found.max_abs) == ("a step", 2, 0.5)
    assert found.relative_rms == pytest.approx(0.1)
    assert loss("", np.zeros(3), np.zeros(3)).relative_rms == 0.0


@pytest.mark.parametrize(
    ("target", "bound"), [("int8", 0.012), ("int4", 0.2), ("bfloat16", 0.003), ("float16", 0.0004)]
)
def test_loss_on_normal_values_is_what_the_bits_allow(target: str, bound: float) -> None:
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    if target in LIMIT:
        after = dequantise(*quantise(values, "float32", target, "float16"), target, "float32")
    else:
        after = cast(cast(values, "float32", target), target, "float32")
    assert 0 < loss(target, values, after).relative_rms < bound
