"""Packings and arrangements: golden positions, and every pair there and back with identical bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hw.kv.layouts import ARRANGEMENTS, PACKINGS, LayoutError, Sizes, interior, pack, unpack, views

DTYPES = [np.float32, np.float16, np.uint16]


def random_kv(seed: int, shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Any bit pattern at all: layouts move bytes and look at none."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    keys, values = (np.frombuffer(rng.bytes(count), dtype).reshape(shape) for _ in range(2))
    return keys, values


def sizes_of(keys: np.ndarray, block: int) -> Sizes:
    layers, heads, tokens, dim = keys.shape
    return Sizes(layers, -(-tokens // block), heads, block, dim, dim)


def element(flat: np.ndarray, arrangement: str, sizes: Sizes, kind: int, place: tuple[int, ...]) -> int:
    """What lies at (layer, block, head, token, dim), read through the views."""
    layer, block, head, token, dim = place
    stored = views(flat, arrangement, sizes)[kind]
    t2, d2 = stored.shape[4], stored.shape[6]
    return int(stored[layer, block, head, token // t2, token % t2, dim // d2, dim % d2])


GOLDEN = {  # positions in a cache of 2 layers, 3 blocks, 2 heads, 32 tokens, 32 + 32 dims, of layer 1, block 2, head 1, token 5, dim 3
    "NHD": lambda kv: kv * 12288 + (((1 * 3 + 2) * 32 + 5) * 2 + 1) * 32 + 3,
    "HND": lambda kv: kv * 12288 + (((1 * 3 + 2) * 2 + 1) * 32 + 5) * 32 + 3,
    "kinds_blocks_NHD": lambda kv: ((((1 * 2 + kv) * 3 + 2) * 32 + 5) * 2 + 1) * 32 + 3,
    "kinds_blocks_HND": lambda kv: ((((1 * 2 + kv) * 3 + 2) * 2 + 1) * 32 + 5) * 32 + 3,
    "blocks_kinds_NHD": lambda kv: ((((1 * 3 + 2) * 2 + kv) * 32 + 5) * 2 + 1) * 32 + 3,
    "blocks_kinds_HND": lambda kv: ((((1 * 3 + 2) * 2 + kv) * 2 + 1) * 32 + 5) * 32 + 3,
    "LBNHC": lambda kv: (((1 * 3 + 2) * 32 + 5) * 2 + 1) * 64 + kv * 32 + 3,
    "LBHNC": lambda kv: (((1 * 3 + 2) * 2 + 1) * 32 + 5) * 64 + kv * 32 + 3,
    "LHBNC": lambda kv: (((1 * 2 + 1) * 3 + 2) * 32 + 5) * 64 + kv * 32 + 3,
    "BLHNC": lambda kv: (((2 * 2 + 1) * 2 + 1) * 32 + 5) * 64 + kv * 32 + 3,
    "BLNHC": lambda kv: (((2 * 2 + 1) * 32 + 5) * 2 + 1) * 64 + kv * 32 + 3,
    "BHLNC": lambda kv: (((2 * 2 + 1) * 2 + 1) * 32 + 5) * 64 + kv * 32 + 3,
    "cpu_vec": lambda kv: ((((1 * 3 + 2) * 2 + 1) * 2 + kv) * 1024) + (5 * 32 + 3 if kv else 3 * 32 + 5),
    # K [2, 16, 16, 2]: group 0, pair 1, token 5, odd. V [2, 16, 16, 2]: group 0, pair of tokens 2, dim 3, odd token.
    "cpu_amx": lambda kv: (
        ((((1 * 3 + 2) * 2 + 1) * 2 + kv) * 1024) + ((2 * 16 + 3) * 2 + 1 if kv else (16 + 5) * 2 + 1)
    ),
}


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("arrangement", GOLDEN)
def test_elements_lie_where_the_definition_says(arrangement: str, kind: int) -> None:
    sizes = Sizes(layers=2, blocks=3, heads=2, tokens=32, dim=32, dim_v=32)
    flat = np.arange(sizes.elements, dtype=np.uint32)
    assert element(flat, arrangement, sizes, kind, (1, 2, 1, 5, 3)) == GOLDEN[arrangement](kind)


def test_the_golden_positions_cover_every_arrangement() -> None:
    assert set(GOLDEN) == set(ARRANGEMENTS) - {"BNSH"}


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 100),
    dim=st.sampled_from([16, 32, 48]),
    block=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_every_pair_of_arrangements_comes_back_with_identical_bytes(
    seed: int, layers: int, heads: int, tokens: int, dim: int, block: int, dtype: type
) -> None:
    keys, values = random_kv(seed, (layers, heads, tokens, dim), dtype)
    width = {name: tokens if name == "BNSH" else block for name in ARRANGEMENTS}
    stored = {name: pack(keys, values, name, width[name]).tobytes() for name in ARRANGEMENTS}
    for source in ARRANGEMENTS:
        flat = np.frombuffer(stored[source], dtype)
        canonical = unpack(flat, source, sizes_of(keys, width[source]), tokens)
        assert (canonical[0].tobytes(), canonical[1].tobytes()) == (keys.tobytes(), values.tobytes()), source
        for target in ARRANGEMENTS:
            assert pack(*canonical, target, width[target]).tobytes() == stored[target], (source, target)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PACKINGS), st.sampled_from(["K", "V"]), st.integers(1, 6), st.integers(1, 6))
def test_a_packing_is_a_permutation(packing: str, kind: str, tokens16: int, dim16: int) -> None:
    tokens, dim = 16 * tokens16, 16 * dim16
    inner = interior(packing, "K" if kind == "K" else "V", tokens, dim)
    flat = np.arange(tokens * dim)
    seen = np.lib.stride_tricks.as_strided(flat, inner.sizes, [8 * stride for stride in inner.strides])
    assert inner.sizes[0] * inner.sizes[1] == tokens
    assert inner.sizes[2] * inner.sizes[3] == dim
    assert np.array_equal(np.sort(seen, axis=None), flat)


def test_the_unused_tail_of_the_last_block_is_zero() -> None:
    keys, values = random_kv(1, (2, 2, 37, 32), np.uint16)
    for arrangement in ARRANGEMENTS:
        if arrangement == "BNSH":
            continue
        dirty = np.full(sizes_of(keys, 32).elements, 7, np.uint16)
        flat = pack(keys, values, arrangement, 32, out=dirty)
        for array in unpack(flat, arrangement, sizes_of(keys, 32)):
            assert not array[:, :, 37:].any()


def test_keys_and_values_may_differ_in_size_where_they_lie_apart() -> None:
    keys, values = random_kv(2, (2, 2, 32, 32), np.float32)
    values = values[..., :16].copy()
    sizes = Sizes(2, 2, 2, 16, 32, 16)
    for arrangement in ("NHD", "HND", "LBNHC", "BHLNC"):
        got = unpack(pack(keys, values, arrangement, 16), arrangement, sizes)
        assert got[0].tobytes() == keys.tobytes()
        assert got[1].tobytes() == values.tobytes()
    with pytest.raises(LayoutError, match="one size"):
        pack(keys, values, "cpu_vec", 16)


@pytest.mark.parametrize(
    ("packing", "tokens", "dim", "says"),
    [
        ("opaque:neon", 32, 64, "whole blocks"),
        ("nonsense", 32, 64, "token_major"),
        ("amx_vnni", 24, 64, "multiple of 16 tokens"),
        ("amx_vnni", 32, 33, "multiple of 16 tokens"),
    ],
)
def test_what_cannot_be_packed_is_refused(packing: str, tokens: int, dim: int, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        interior(packing, "K", tokens, dim)


def test_arrays_that_do_not_fit_are_refused() -> None:
    keys, values = random_kv(3, (1, 1, 16, 16), np.float32)
    sizes = sizes_of(keys, 16)
    with pytest.raises(LayoutError, match="contiguous"):
        views(np.zeros(sizes.elements + 1, np.float32), "HND", sizes)
    with pytest.raises(LayoutError, match="contiguous"):
        views(np.zeros(2 * sizes.elements, np.float32)[::2], "HND", sizes)
    with pytest.raises(LayoutError, match="unknown arrangement"):
        pack(keys, values, "NDH", 16)
    with pytest.raises(LayoutError, match="one block"):
        pack(keys, values, "BNSH", 8)
    with pytest.raises(LayoutError, match="not \\[layers"):
        pack(keys, values[:, :, :8], "HND", 16)
    with pytest.raises(LayoutError, match="store them apart"):
        pack(keys, values.view(np.uint32), "HND", 16)
    with pytest.raises(LayoutError, match="that holds 16"):
        unpack(pack(keys, values, "HND", 16), "HND", sizes, 17)
    with pytest.raises(LayoutError, match="out is"):
        pack(keys, values, "HND", 16, out=np.zeros(sizes.elements, np.float16))
