"""Which packing an engine's cache really has: sentinels through the engine's own operator, not guesses from shapes.

vLLM's CPU backend picks the packing from dtype, block size, head size and the host's instruction set, so two CPU replicas of
one model can differ. What the probe does not recognise is ``opaque:<isa>``: whole blocks only, between equal engines.
"""

import logging
from typing import Any

import torch

from hw.kv.layouts import AMX_VNNI, K_TRANSPOSED, OPAQUE, TOKEN_MAJOR, Kind, LayoutError, interior

logger = logging.getLogger(__name__)

_BLOCKS = 2  # the second block is written, so that a wrong block stride shows too
_CPU_BACKEND = "CPU_ATTN"
_SPLIT_IN_TOKEN = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})  # C = key then value


def attention_isa(dtype: torch.dtype, block_tokens: int, head_dim: int, kv_cache_dtype: str = "auto") -> str:
    """The instruction set that vLLM's CPU attention uses here for such a cache, such as ``amx``, ``vec`` or ``vec16``."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_tokens, head_dim, kv_cache_dtype))


def probe_packing(
    dtype: torch.dtype,
    block_tokens: int,
    head_dim: int,
    *,
    heads: int = 2,
    isa: str | None = None,
) -> str:
    """The packing of vLLM's CPU cache of this dtype and size on this host.

    Writes one block of distinct values through ``cpu_attn_reshape_and_cache`` into a scratch cache and compares every
    element with each known packing. ``isa`` is the layer's (``layer.isa``) where known. Anything unrecognised, and
    any dtype but float32, float16 and bfloat16, is ``opaque:<isa>``.
    """
    isa = isa or attention_isa(dtype, block_tokens, head_dim)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return OPAQUE + isa
    keys = _sentinels(block_tokens, heads, head_dim, dtype)
    values = keys.flip(0)
    cache = torch.zeros(_BLOCKS, heads, block_tokens, 2 * head_dim, dtype=dtype)
    _write(keys, values, cache, isa)
    for packing in (AMX_VNNI, K_TRANSPOSED):
        if _holds(cache, packing, keys, values):
            return packing
    if torch.equal(cache[1].transpose(0, 1), torch.cat((keys, values), dim=2)):
        return TOKEN_MAJOR
    logger.warning("unknown KV packing of instruction set %s: only whole blocks will be moved", isa)
    return OPAQUE + isa


def packing_of(tensor: torch.Tensor, backend: str, *, isa: str | None = None) -> str:
    """The packing of a registered cache of vLLM's attention backend ``backend`` (its ``get_name()``).

    CPU caches are probed. For GPU backends known to keep a token's key and value side by side, or any rank-5 cache with
    dense rows, it is ``token_major``; everything else, MLA and quantised caches included, is ``opaque:<backend>``.
    """
    if tensor.device.type == "cpu" and backend == _CPU_BACKEND:
        if tensor.ndim != 4 or tensor.shape[3] % 2 or not tensor[0].is_contiguous():
            return f"{OPAQUE}{backend.lower()}"
        _, _, block_tokens, content = tensor.shape
        return probe_packing(tensor.dtype, block_tokens, content // 2, isa=isa)
    floats = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    known = backend in _SPLIT_IN_TOKEN and tensor.ndim in (4, 5)
    if floats and known and tensor.stride(-1) == 1 and (tensor.ndim == 5 or tensor.shape[3] % 2 == 0):
        return TOKEN_MAJOR
    return f"{OPAQUE}{backend.lower()}"


def _sentinels(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """``[tokens, heads, dim]``, no two elements of a head alike as far as the dtype can tell; never zero.

    Sixteen-bit types cannot count that far in steps of one: the bit patterns of normal numbers are counted instead, which
    is enough for two heads of 128 x 224 elements.
    """
    count = torch.arange(tokens * heads * dim, dtype=torch.int32).view(tokens, heads, dim)
    if dtype == torch.float32:
        return (count + 1).to(dtype)
    lowest, normal = (0x0400, 0x7800) if dtype == torch.float16 else (0x0080, 0x7F00)
    negative = (count // normal % 2) << 15
    return (count % normal + lowest + negative).to(torch.int16).view(dtype)


def _write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, isa: str) -> None:
    """Fill block 1 of ``cache`` as vLLM's CPU backend does."""
    from vllm import _custom_ops as ops

    blocks, heads, tokens, content = cache.shape
    key_cache, value_cache = cache.view(blocks, heads, 2 * tokens, content // 2).chunk(2, dim=2)
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)


def _holds(cache: torch.Tensor, packing: str, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether block 1 holds these keys and values under ``packing``, and block 0 nothing."""
    if cache[0].any():
        return False
    tokens, heads, dim = keys.shape
    regions = cache[1].view(heads, 2, tokens * dim)
    wanted: list[tuple[Kind, Any]] = [("K", keys), ("V", values)]
    for part, (kind, array) in enumerate(wanted):
        try:
            inner = interior(packing, kind, tokens, dim)
        except LayoutError:
            return False
        region = regions[:, part]
        stored = region.as_strided(
            (heads, *inner.sizes), (region.stride(0), *inner.strides), region.storage_offset()
        ).reshape(heads, tokens, dim)
        if not torch.equal(stored, array.transpose(0, 1)):
            return False
    return True
