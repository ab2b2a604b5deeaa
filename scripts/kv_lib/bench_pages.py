"""The paged cache of an engine, by size of its blocks and by packing: in and out, K and V together and apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hw.kv import kernels
from hw.kv.layouts import AMX_VNNI, K_TRANSPOSED, Kind, Sizes, views
from hw.kv.manifest import Geometry
from hw.kv.vllm_cache import PagedCache
from scripts.kv_lib.turns import Tell, Work, speed, take_turns, timed

ARRANGEMENTS = {K_TRANSPOSED: "cpu_vec", AMX_VNNI: "cpu_amx"}
BLOCK_TOKENS = (16, 32, 64, 128, 256)
_SPARE = 2  # times as many blocks as the sequence fills, so that its own lie scattered


class Pages:
    """A bfloat16 cache as vLLM's CPU backend allocates it, and the scattered blocks of one sequence of ``tokens``."""

    def __init__(self, geometry: Geometry, tokens: int, block_tokens: int, packing: str) -> None:
        count = -(-tokens // block_tokens)
        self.sizes = Sizes(
            geometry.layers,
            _SPARE * count,
            geometry.heads,
            block_tokens,
            geometry.head_dim,
            geometry.head_dim_v,
        )
        s = self.sizes
        self.memory = torch.zeros(s.layers, s.blocks, s.heads, block_tokens, s.dim + s.dim_v, dtype=torch.bfloat16)
        self.cache = PagedCache(list(self.memory.unbind(0)), packing=packing)
        self.ids = [int(n) for n in np.random.default_rng(block_tokens).permutation(s.blocks)[:count]]

    def part(self, kind: Kind) -> torch.Tensor:
        """Keys or values as ``[layers, blocks, heads, t1, t2, d1, d2]`` over the same memory, as 16-bit integers."""
        flat = self.memory.view(torch.int16).numpy().reshape(-1)
        pair = views(flat, ARRANGEMENTS[self.cache.packing], self.sizes)
        return torch.from_numpy(pair[0] if kind == "K" else pair[1])


def measure(
    geometry: Geometry, tokens: int, block_sizes: Sequence[int], repetitions: int, calls: int, tell: Tell
) -> list[dict[str, Any]]:
    """One result for each packing and size of blocks. Copies to compare with are of the same bytes."""
    cells = [(packing, size) for packing in ARRANGEMENTS for size in block_sizes]
    found = []
    for index, (packing, size) in enumerate(cells):
        whole = -(-tokens // size) * size  # whole blocks only: a partial last one is another path

        def part(fraction: float, doing: str, index: int = index) -> None:
            tell((index + fraction) / len(cells), doing)

        found.append(_cell(Pages(geometry, whole, size, packing), whole, repetitions, calls, part))
    return found


def _cell(pages: Pages, tokens: int, repetitions: int, calls: int, tell: Tell) -> dict[str, Any]:
    cache = pages.cache
    shape = cache.shape(tokens)
    out = np.random.default_rng(1).integers(0x3C00, 0x4000, shape).astype(np.uint16)
    cache.write(pages.ids, 0, out)
    plain, copy = out.copy(), np.zeros_like(out)
    half, half_copy = (np.ascontiguousarray(array[::2]) for array in (plain, copy))
    works = [
        timed("memcpy", lambda: np.copyto(copy, plain)),
        timed("read", lambda: cache.read(pages.ids, 0, tokens, out)),
        timed("write", lambda: cache.write(pages.ids, 0, out)),
        timed("memcpy_half", lambda: np.copyto(half_copy, half)),
        _alone(pages, "K", half_copy),
        _alone(pages, "V", half_copy),
    ]
    taken = take_turns(works, repetitions, calls, tell, f"{cache.packing}, blocks of {cache.block_tokens}")
    if not np.array_equal(out, plain):
        raise RuntimeError(f"{cache.packing}, blocks of {cache.block_tokens}: what was read is not what was written")
    return {
        "packing": cache.packing,
        "block_tokens": cache.block_tokens,
        "tokens": tokens,
        "memcpy": speed(taken, "memcpy", out.nbytes),
        **{name: speed(taken, name, out.nbytes, "memcpy") for name in ("read", "write")},
        **{name: speed(taken, name, half.nbytes, "memcpy_half") for name in ("K", "V")},
    }


def _alone(pages: Pages, kind: Kind, out: npt.NDArray[np.uint16]) -> Work:
    """Reading keys, or values, alone into ``out`` ``[layers, heads, tokens, dim]``."""
    stored = pages.part(kind)
    rows = torch.from_numpy(out.view(np.int16))
    ids = np.asarray(pages.ids, np.int64)
    blocks = rows.unflatten(3, stored.shape[5:]).unflatten(2, (len(ids), *stored.shape[3:5])).movedim(2, 1)

    def read() -> None:
        if not kernels.move(pages.cache.packing, kind, stored, ids, rows, writing=False):
            for at, block in enumerate(pages.ids):  # one strided copy for each scattered block
                blocks[:, at].copy_(stored[:, block])

    return timed(kind, read)
