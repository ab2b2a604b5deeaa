"""Where a key or value lies inside a block, and inside a cache.

The form everything is converted through is *canonical*: keys ``[layers, heads, tokens, head_dim]``, values
``[layers, heads, tokens, head_dim_v]``. A *packing* says how the tokens and dimensions of one (block, head) are
interleaved; an *arrangement* says how layers, blocks, heads and the two kinds follow one another in memory. Both are
only strides: every packing used here splits tokens and dimensions into two factors each, so a stored cache is one strided
view ``[layers, blocks, heads, t1, t2, d1, d2]`` with ``token = t1 * len(t2) + t2`` and ``dim = d1 * len(d2) + d2``.

Read in vLLM 0.29: ``v1/kv_cache_layout.py`` (the six arrangements of ``[L, B, H, N, C]``), ``v1/attention/backends``
(a GPU backend splits C into keys and values; CPU_ATTN splits ``[2 N, D]``), ``csrc/cpu`` (the packings; see probe.py).
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["K", "V"]
Array = npt.NDArray[Any]

TOKEN_MAJOR = "token_major"  # noqa: S105 - a layout name
K_TRANSPOSED = "k_transposed"
AMX_VNNI = "amx_vnni"
OPAQUE = "opaque:"
PACKINGS = (TOKEN_MAJOR, K_TRANSPOSED, AMX_VNNI)

_TILE = 16  # tokens of AMX keys, dimensions of AMX values


class LayoutError(ValueError):
    """A layout that is unknown, or that does not fit the array."""


@dataclass(frozen=True)
class Interior:
    """Sizes and strides, in elements, of one (block, head) region of one kind."""

    sizes: tuple[int, int, int, int]  # t1, t2, d1, d2
    strides: tuple[int, int, int, int]


def interior(packing: str, kind: Kind, tokens: int, dim: int) -> Interior:
    """How ``tokens * dim`` elements of one (block, head) are interleaved under ``packing``.

    Raises LayoutError when the packing is unknown or opaque, or cannot hold these sizes.
    """
    if packing == TOKEN_MAJOR or (packing == K_TRANSPOSED and kind == "V"):
        return Interior((tokens, 1, dim, 1), (dim, dim, 1, 1))
    if packing == K_TRANSPOSED:
        return Interior((tokens, 1, dim, 1), (1, 1, tokens, tokens))
    if packing == AMX_VNNI:
        if tokens % _TILE or dim % (2 if kind == "K" else _TILE):
            raise LayoutError(
                f"{AMX_VNNI} needs blocks of a multiple of 16 tokens, keys of an even and values of a multiple of 16 "
                f"dimensions, not {kind} {tokens} x {dim}"
            )
        if kind == "K":  # stored [tokens/16, dim/2, 16, 2]
            return Interior((tokens // 16, 16, dim // 2, 2), (16 * dim, 2, 32, 1))
        return Interior((tokens // 2, 2, dim // 16, 16), (32, 1, 16 * tokens, 2))  # stored [dim/16, tokens/2, 16, 2]
    if packing.startswith(OPAQUE):
        raise LayoutError(f"{packing} is opaque: move whole blocks between equal caches instead of reading tokens")
    raise LayoutError(f"unknown packing {packing!r}; known: {', '.join(PACKINGS)} and {OPAQUE}<name>")


@dataclass(frozen=True)
class Arrangement:
    """How a whole cache is laid out: its axes from the outermost in, and the packing of its innermost part.

    Axes: L layers, S the two kinds, B blocks, H heads, N the tokens of a block, C one token's key followed by its value,
    D one token's key or value, P a packed (tokens x dim) region. Without S or C, keys and values are two arrays.
    """

    axes: str
    packing: str = TOKEN_MAJOR


ARRANGEMENTS: dict[str, Arrangement] = {
    # Keys and values apart.
    "NHD": Arrangement("LBNHD"),
    "HND": Arrangement("LBHND"),
    "BNSH": Arrangement("LBHND"),  # ONNX past_key_values: one block, the whole sequence
    # vLLM up to 0.2x: the two kinds as an axis of a rank-5 tensor.
    "kinds_blocks_NHD": Arrangement("LSBNHD"),
    "kinds_blocks_HND": Arrangement("LSBHND"),
    "blocks_kinds_NHD": Arrangement("LBSNHD"),
    "blocks_kinds_HND": Arrangement("LBSHND"),
    # vLLM 0.29 on GPUs: keys and values side by side within a token; named as in vLLM.
    "LBNHC": Arrangement("LBNHC"),
    "LBHNC": Arrangement("LBHNC"),
    "LHBNC": Arrangement("LHBNC"),
    "BLHNC": Arrangement("BLHNC"),
    "BLNHC": Arrangement("BLNHC"),
    "BHLNC": Arrangement("BHLNC"),
    # vLLM 0.29 on CPUs.
    "cpu_vec": Arrangement("LBHSP", K_TRANSPOSED),
    "cpu_amx": Arrangement("LBHSP", AMX_VNNI),
}


@dataclass(frozen=True)
class Sizes:
    """The extents of a cache. ``tokens`` are those of one block."""

    layers: int
    blocks: int
    heads: int
    tokens: int
    dim: int
    dim_v: int

    @property
    def elements(self) -> int:
        """Elements of keys and values together."""
        return self.layers * self.blocks * self.heads * self.tokens * (self.dim + self.dim_v)


def views(flat: Array, arrangement: str, sizes: Sizes) -> tuple[Array, Array]:
    """Keys and values of a stored cache as two views ``[layers, blocks, heads, t1, t2, d1, d2]`` of ``flat``.

    ``flat`` is one-dimensional, contiguous and holds exactly ``sizes.elements``; where keys and values are apart, all keys
    come before all values. Raises LayoutError when it does not fit.
    """
    known = ARRANGEMENTS.get(arrangement)
    if known is None:
        raise LayoutError(f"unknown arrangement {arrangement!r}; known: {', '.join(ARRANGEMENTS)}")
    if flat.ndim != 1 or not flat.flags.c_contiguous or flat.size != sizes.elements:
        raise LayoutError(
            f"{arrangement} of {sizes} needs {sizes.elements} contiguous elements, not an array of shape {flat.shape}"
        )
    if arrangement == "BNSH" and sizes.blocks != 1:
        raise LayoutError(f"BNSH holds the whole sequence as one block, not {sizes.blocks}")
    joined = known.axes.replace("S", "") != known.axes
    if joined and sizes.dim != sizes.dim_v:
        raise LayoutError(f"{arrangement} needs keys and values of one size, not {sizes.dim} and {sizes.dim_v}")
    pair: list[Array] = []
    for kind, dim, offset in (("K", sizes.dim, 0), ("V", sizes.dim_v, sizes.dim)):
        extent = {"L": sizes.layers, "B": sizes.blocks, "H": sizes.heads, "N": sizes.tokens, "S": 2, "D": dim}
        extent |= {"C": sizes.dim + sizes.dim_v, "P": sizes.tokens * dim}
        strides: dict[str, int] = {}
        step = 1
        for axis in reversed(known.axes):
            strides[axis] = step
            step *= extent[axis]
        if "S" in strides:
            base = strides["S"] if kind == "V" else 0
        elif "C" in strides:
            base = offset if kind == "V" else 0
        else:
            base = sizes.elements - step if kind == "V" else 0
        if "P" in strides:
            inner = interior(known.packing, "K" if kind == "K" else "V", sizes.tokens, dim)
        else:
            inner = Interior((sizes.tokens, 1, dim, 1), (strides["N"], strides["N"], 1, 1))
        shape = (sizes.layers, sizes.blocks, sizes.heads, *inner.sizes)
        element_strides = (strides["L"], strides["B"], strides["H"], *inner.strides)
        pair.append(
            np.lib.stride_tricks.as_strided(
                flat[base:], shape, tuple(s * flat.itemsize for s in element_strides), writeable=flat.flags.writeable
            )
        )
    return pair[0], pair[1]


def pack(keys: Array, values: Array, arrangement: str, block_tokens: int, out: Array | None = None) -> Array:
    """Store canonical ``keys`` and ``values`` as a flat array in ``arrangement``; what a partial last block lacks is zero.

    ``out``, if given, is a flat array of the right size and dtype whose tail is zeroed too. Raises LayoutError.
    """
    sizes = _sizes(keys, values, block_tokens)
    if out is None:
        out = np.empty(sizes.elements, keys.dtype)
    elif out.dtype != keys.dtype:
        raise LayoutError(f"out is {out.dtype}, the keys are {keys.dtype}")
    for array, stored in zip((keys, values), views(out, arrangement, sizes), strict=True):
        stored[...] = _padded(array, sizes.blocks, block_tokens, stored.shape)
    return out


def unpack(flat: Array, arrangement: str, sizes: Sizes, tokens: int | None = None) -> tuple[Array, Array]:
    """The first ``tokens`` (all by default) of a stored cache as canonical keys and values (new arrays)."""
    held = sizes.blocks * sizes.tokens
    count = held if tokens is None else tokens
    if not 0 <= count <= held:
        raise LayoutError(f"{count} tokens of a cache that holds {held}")
    pair = [
        np.moveaxis(stored, 1, 2).reshape(sizes.layers, sizes.heads, held, dim)[:, :, :count]
        for stored, dim in zip(views(flat, arrangement, sizes), (sizes.dim, sizes.dim_v), strict=True)
    ]
    keys, values = (np.array(array, order="C") for array in pair)
    return keys, values


def _sizes(keys: Array, values: Array, block_tokens: int) -> Sizes:
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise LayoutError(
            f"keys {keys.shape} and values {values.shape} are not [layers, heads, tokens, dim] of one cache"
        )
    if keys.dtype != values.dtype:
        raise LayoutError(f"keys are {keys.dtype} and values {values.dtype}: store them apart")
    layers, heads, tokens, dim = keys.shape
    if block_tokens < 1 or not tokens:
        raise LayoutError(f"{tokens} tokens in blocks of {block_tokens}")
    return Sizes(layers, -(-tokens // block_tokens), heads, block_tokens, dim, values.shape[3])


def _padded(array: Array, blocks: int, block_tokens: int, shape: tuple[int, ...]) -> Array:
    """``[layers, heads, tokens, dim]`` as ``[layers, blocks, heads, t1, t2, d1, d2]``, zeros after the last token."""
    layers, heads, tokens, dim = array.shape
    if tokens != blocks * block_tokens:
        whole = np.zeros((layers, heads, blocks * block_tokens, dim), array.dtype)
        whole[:, :, :tokens] = array
        array = whole
    assert prod(shape[3:]) == block_tokens * dim
    return np.moveaxis(array.reshape(layers, heads, blocks, *shape[3:]), 2, 1)
