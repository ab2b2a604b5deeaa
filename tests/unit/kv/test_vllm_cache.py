"""Reading and writing paged caches, against caches built element by element from the definitions in layouts.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hw.kv import kernels
from hw.kv.layouts import ARRANGEMENTS, pack
from hw.kv.vllm_cache import CacheError, PagedCache

LAYERS, BLOCKS, HEADS = 3, 7, 2
DTYPES = {np.float32: torch.float32, np.float16: torch.float16, np.uint16: torch.bfloat16}
CACHES = [name for name in ARRANGEMENTS if "S" in ARRANGEMENTS[name].axes or "C" in ARRANGEMENTS[name].axes]


def built(arrangement: str, block: int, dim: int, dtype: type, seed: int = 0) -> tuple[PagedCache, np.ndarray]:
    """A cache with all blocks full, and its tokens ``[2 * layers, heads, blocks * block, dim]``."""
    rng = np.random.default_rng(seed)
    both = rng.standard_normal((2, LAYERS, HEADS, BLOCKS * block, dim)).astype(np.float32)
    if dtype is np.uint16:
        both = torch.from_numpy(both).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    both = both.astype(dtype)
    known = ARRANGEMENTS[arrangement]
    flat = torch.from_numpy(pack(both[0], both[1], arrangement, block).view(np.int16 if dtype is np.uint16 else dtype))
    flat = flat.view(DTYPES[dtype])
    extent = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": block, "S": 2, "D": dim, "C": 2 * dim}
    if "P" in known.axes:
        tensor, order = flat.view(LAYERS, BLOCKS, HEADS, block, 2 * dim), "LBHNC"
    else:
        tensor, order = flat.view([extent[axis] for axis in known.axes]), known.axes
    logical = "LBHNC" if "C" in order else "LSBNHD" if order.index("S") < order.index("B") else "LBSNHD"
    tensor = tensor.permute([order.index(axis) for axis in logical])
    axis = None if "C" in order else logical.index("S") - 1
    cache = PagedCache({f"layer{i}": tensor[i] for i in range(LAYERS)}, packing=known.packing, kinds_axis=axis)
    return cache, both.swapaxes(0, 1).reshape(2 * LAYERS, HEADS, BLOCKS * block, dim)


def sequence(tokens: np.ndarray, ids: list[int], block: int) -> np.ndarray:
    """What positions 0.. of the sequence in blocks ``ids`` hold."""
    return np.concatenate([tokens[:, :, i * block : (i + 1) * block] for i in ids], axis=2)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return (
        tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    ).copy()


@settings(max_examples=60, deadline=None)
@given(
    arrangement=st.sampled_from(CACHES),
    block=st.sampled_from([16, 32, 64]),
    dim=st.sampled_from([16, 32, 48]),
    dtype=st.sampled_from(list(DTYPES)),
    ids=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True),
    data=st.data(),
)
def test_reads_and_writes_any_range(
    arrangement: str, block: int, dim: int, dtype: type, ids: list[int], data: st.DataObject
) -> None:
    cache, tokens = built(arrangement, block, dim, dtype)
    assert (cache.layers, cache.blocks, cache.heads, cache.block_tokens, cache.head_dim) == (3, BLOCKS, 2, block, dim)
    start = data.draw(st.integers(0, len(ids) * block - 1))
    stop = data.draw(st.integers(start + 1, len(ids) * block))
    want = sequence(tokens, ids, block)
    assert np.array_equal(bits(cache.read(ids, start, stop)), want[:, :, start:stop])

    new = np.random.default_rng(1).permuted(want[:, :, start:stop], axis=2)
    cache.write(ids, start, new)
    expected = tokens.copy()
    flat = want.copy()
    flat[:, :, start:stop] = new
    for at, i in enumerate(ids):
        expected[:, :, i * block : (i + 1) * block] = flat[:, :, at * block : (at + 1) * block]
    everything = list(range(BLOCKS))
    assert np.array_equal(bits(cache.read(everything, 0, BLOCKS * block)), expected)  # and nothing else changed


@pytest.mark.parametrize("arrangement", CACHES)
def test_raw_blocks_move_between_equal_caches(arrangement: str) -> None:
    cache, tokens = built(arrangement, 32, 32, np.uint16)
    other, _ = built(arrangement, 32, 32, np.uint16, seed=1)
    if arrangement.startswith("kinds_blocks") or arrangement in ("LHBNC", "BHLNC"):  # a block is in pieces there
        with pytest.raises(CacheError, match="one run of memory"):
            cache.read_raw([1])
        return
    other.write_raw([4, 0], cache.read_raw([1, 5]))
    assert np.array_equal(bits(other.read([4, 0], 0, 64)), sequence(tokens, [1, 5], 32))


def test_opaque_caches_move_whole_blocks_only() -> None:
    tensors = [torch.randint(0, 255, (4, 2, 16, 24), dtype=torch.uint8) for _ in range(2)]
    cache = PagedCache(tensors, packing="opaque:neon")
    with pytest.raises(CacheError, match="whole raw blocks"):
        cache.read([0], 0, 4)
    raw = cache.read_raw([3, 1])
    assert raw.shape == (2, 2, 2 * 16 * 24)
    assert np.array_equal(raw[1, 0], tensors[1][3].flatten().numpy())


def test_layers_in_separate_allocations_read_the_same() -> None:
    cache, tokens = built("cpu_amx", 32, 32, np.uint16)
    apart = PagedCache([tensor.clone() for tensor in cache._tensors], packing="amx_vnni")
    assert len(apart._runs) == LAYERS
    assert len(cache._runs) == 1
    assert np.array_equal(bits(apart.read([2, 1], 3, 60)), sequence(tokens, [2, 1], 32)[:, :, 3:60])


@pytest.mark.parametrize("arrangement", ["cpu_amx", "cpu_vec", "LBNHC"])
def test_other_float_types_and_strides_are_converted_on_the_way(arrangement: str) -> None:
    cache, tokens = built(arrangement, 32, 32, np.uint16)
    exact = torch.from_numpy(sequence(tokens, [3, 1], 32).view(np.int16)).view(torch.bfloat16).float()
    wide = torch.zeros(64, 2 * LAYERS, HEADS, 32).permute(1, 2, 0, 3)
    assert cache.read([3, 1], 0, 64, wide) is wide
    assert torch.equal(wide, exact)
    numpy_out = np.zeros(cache.shape(64), np.float32)
    cache.read([3, 1], 0, 64, numpy_out)
    assert np.array_equal(numpy_out, exact.numpy())
    cache.write([0, 2], 0, numpy_out + np.float32(2.0**-12))
    assert torch.equal(cache.read([0, 2], 0, 64).float(), (exact + 2.0**-12).to(torch.bfloat16).float())


@pytest.mark.filterwarnings("error")
def test_read_only_memory_can_be_written_from_but_not_read_into() -> None:
    cache, tokens = built("cpu_amx", 32, 32, np.uint16)
    frozen = np.frombuffer(sequence(tokens, [5], 32).tobytes(), np.uint16).reshape(cache.shape(32))
    cache.write([2], 0, frozen)
    assert np.array_equal(bits(cache.read([2], 0, 32)), frozen)
    raw = cache.read_raw([5])
    raw.flags.writeable = False
    cache.write_raw([3], raw)
    assert np.array_equal(bits(cache.read([3], 0, 32)), frozen)
    with pytest.raises(CacheError, match="read-only"):
        cache.read([1], 0, 32, frozen)
    with pytest.raises(CacheError, match="read-only"):
        cache.read_raw([1], raw)


def test_kernels_take_the_packed_kinds_and_leave_the_rest() -> None:
    """The compiled loops are really used where they should be: their absence would only be slow."""
    for arrangement, wanted in (("cpu_amx", [True, True]), ("cpu_vec", [True, False]), ("LBHNC", [False, False])):
        cache, _ = built(arrangement, 32, 32, np.uint16)
        rows = torch.zeros(cache.shape(32), dtype=torch.bfloat16)
        ids = np.array([1])
        kinds = cache._runs[0].kinds
        used = [
            kernels.move(cache.packing, kind, kinds[part], ids, rows[part::2], writing=False)
            for part, kind in ((0, "K"), (1, "V"))
        ]
        assert used == wanted, arrangement


def test_zeroed_blocks_are_zero_and_others_are_not() -> None:
    for arrangement in CACHES:
        cache, tokens = built(arrangement, 16, 32, np.float32)
        cache.zero([2, 3])
        assert not cache.read([2, 3], 0, 32).any()
        assert np.array_equal(bits(cache.read([1, 4], 0, 32)), sequence(tokens, [1, 4], 16))


def test_bad_requests_are_refused_and_change_nothing() -> None:
    cache, _ = built("cpu_vec", 16, 32, np.float32)
    before = cache.read_raw(range(BLOCKS))
    good = np.ones(cache.shape(4), np.float32)
    bad = [
        lambda: cache.read([0, BLOCKS], 0, 4),
        lambda: cache.read([-1], 0, 4),
        lambda: cache.read([], 0, 4),
        lambda: cache.read([1], 0, 17),
        lambda: cache.read([1], 4, 4),
        lambda: cache.read([1], 0, 4, np.zeros(cache.shape(5), np.float32)),
        lambda: cache.read([1], 0, 4, np.zeros(cache.shape(4), np.int32)),
        lambda: cache.write([1, 1], 14, good),
        lambda: cache.write([1], 13, good),
        lambda: cache.write([1], -1, good),
        lambda: cache.write([1], 0, good[:, :, :0]),
        lambda: cache.write([1], 0, good[0]),
        lambda: cache.write_raw([1, 1], before[:, :2]),
        lambda: cache.write_raw([1], before[:, :2]),
        lambda: cache.zero([BLOCKS]),
    ]
    for attempt in bad:
        with pytest.raises(CacheError):
            attempt()
    assert np.array_equal(cache.read_raw(range(BLOCKS)), before)


def test_caches_that_do_not_belong_together_are_refused() -> None:
    whole = torch.zeros(4, 2, 32, 64)
    for tensors, packing in (
        ([], "token_major"),
        ([whole, whole.half()], "token_major"),
        ([whole], "made_up"),
        ([whole.to(torch.uint8)], "k_transposed"),
        ([whole.transpose(1, 2)], "k_transposed"),
        ([torch.zeros(4, 2, 24, 64)], "amx_vnni"),
        ([torch.zeros(4, 2, 32, 63)], "token_major"),
        ([torch.zeros(2, 2, 32, 2, 64)], "token_major"),  # both axes could be the kinds
        ([torch.zeros(2, 4, 32, 2, 64)], "k_transposed"),
    ):
        with pytest.raises(CacheError):
            PagedCache(tensors, packing=packing)
