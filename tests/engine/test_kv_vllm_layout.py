"""Our reading of vLLM's CPU cache against vLLM's own writes, for every packing that this host uses."""

import pytest
import torch

from hw.kv.probe import attention_isa, packing_of, probe_packing
from hw.kv.vllm_cache import PagedCache

pytestmark = pytest.mark.engine

LAYERS, BLOCKS, HEADS, DIM = 3, 9, 2, 64
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def caches(dtype: torch.dtype, block_tokens: int) -> dict[str, torch.Tensor]:
    """One allocation for all layers, as vLLM makes it."""
    flat = torch.zeros(LAYERS, BLOCKS, HEADS, block_tokens, 2 * DIM, dtype=dtype)
    return {f"layers.{i}": flat[i] for i in range(LAYERS)}


def write_with_vllm(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """``keys`` and ``values`` are ``[tokens, heads, dim]``; this is what CPUAttentionBackendImpl does."""
    from vllm import _custom_ops as ops

    blocks, heads, tokens, _ = cache.shape
    key_cache, value_cache = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    isa = attention_isa(cache.dtype, tokens, DIM)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)


def filled(dtype: torch.dtype, block_tokens: int, blocks: list[int], tokens: int) -> tuple[PagedCache, torch.Tensor]:
    """A cache that vLLM's operator filled with random tokens, and those tokens in canonical form."""
    tensors = caches(dtype, block_tokens)
    want = torch.randn(2 * LAYERS, HEADS, tokens, DIM).to(dtype)
    slots = torch.tensor([blocks[t // block_tokens] * block_tokens + t % block_tokens for t in range(tokens)])
    for layer, cache in enumerate(tensors.values()):
        keys, values = (want[2 * layer + part].transpose(0, 1).contiguous() for part in (0, 1))
        write_with_vllm(cache, keys, values, slots)
    return PagedCache(tensors, packing=probe_packing(dtype, block_tokens, DIM)), want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_reads_what_vllm_wrote_and_writes_the_same_bytes(dtype: torch.dtype, block_tokens: int) -> None:
    blocks = [5, 2, 3, 7]
    tokens = 3 * block_tokens + 5
    cache, want = filled(dtype, block_tokens, blocks, tokens)
    assert torch.equal(cache.read(blocks, 0, tokens), want)
    assert torch.equal(cache.read(blocks, 3, block_tokens + 7), want[:, :, 3 : block_tokens + 7])
    assert torch.equal(cache.read(blocks, 1, 4), want[:, :, 1:4])

    copy = PagedCache(caches(dtype, block_tokens), packing=cache.packing)
    for start, stop in ((0, 3), (3, block_tokens + 7), (block_tokens + 7, tokens)):
        copy.write(blocks, start, want[:, :, start:stop])
    everything = range(BLOCKS)
    assert (copy.read_raw(everything) == cache.read_raw(everything)).all()


def test_the_packing_is_the_one_expected_of_the_instruction_set() -> None:
    expected = {"amx": "amx_vnni", "vec": "k_transposed", "vec16": "k_transposed"}
    for dtype in DTYPES:
        for block_tokens in (16, 32, 128):
            isa = attention_isa(dtype, block_tokens, DIM)
            assert probe_packing(dtype, block_tokens, DIM) == expected.get(isa, f"opaque:{isa}")


def test_a_packing_that_nobody_knows_is_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    from hw.kv import probe

    def scrambled(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, isa: str) -> None:
        cache[1] = torch.cat((keys, values), dim=2).transpose(0, 1).flip(1)

    monkeypatch.setattr(probe, "_write", scrambled)
    assert probe_packing(torch.float32, 32, DIM, isa="neon") == "opaque:neon"


def test_registered_tensors_are_classified_by_backend() -> None:
    cpu = next(iter(caches(torch.float32, 32).values()))
    assert packing_of(cpu, "CPU_ATTN") == probe_packing(torch.float32, 32, DIM)
    head_major = torch.zeros(4, 2, 16, 128, device="meta")
    assert packing_of(head_major, "FLASH_ATTN") == "token_major"
    assert packing_of(head_major.transpose(1, 2), "TRITON_ATTN") == "token_major"
    assert packing_of(head_major.to(torch.uint8), "FLASH_ATTN") == "opaque:flash_attn"
    assert packing_of(head_major, "SOMETHING_NEW") == "opaque:something_new"
    assert packing_of(torch.zeros(4, 16, 576, device="meta"), "FLASH_ATTN") == "opaque:flash_attn"


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_views_that_vllm_makes_for_gpu_backends_are_read_in_one_run(name: str) -> None:
    """GPU backends split a token's content into key and value; the allocation and its strides are vLLM's own."""
    from vllm.v1 import kv_cache_interface as vllm_cache
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout[name]
    spec = vllm_cache.FullAttentionSpec(block_size=32, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    layer, block, *_ = vllm_cache.compute_layout_strides(spec, BLOCKS, LAYERS, layout, None)
    names = [f"layers.{i}" for i in range(LAYERS)]
    size = LAYERS * BLOCKS * spec.page_size_bytes
    place = vllm_cache.KVCacheTensor(size=size, layers=names, layer_stride=layer, block_stride=block)
    raw = torch.zeros(size, dtype=torch.int8)
    tensors = vllm_cache.create_kv_cache_views(raw, spec, BLOCKS, layout, place)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    cache = PagedCache(dict(zip(names, tensors, strict=True)), packing="token_major")
    halves = [tensor[..., part * DIM : (part + 1) * DIM] for tensor in tensors for part in (0, 1)]
    want = torch.stack([torch.cat((half[4], half[1]), dim=1)[:, 5:50] for half in halves])
    assert torch.equal(cache.read([4, 1], 5, 50), want)
    cache.write([4, 1], 5, want.flip(2))
    assert torch.equal(torch.stack([torch.cat((h[4], h[1]), dim=1)[:, 5:50] for h in halves]), want.flip(2))
    assert len(cache._runs) == 1
