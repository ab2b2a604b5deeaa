"""Payloads of block sets as arrays, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from hw.kv import codecs
from hw.kv.layouts import TOKEN_MAJOR, Array
from hw.kv.manifest import BITS, Geometry, Layout, Manifest, Numerics
from hw.kv.rows import Kind, Row, payload_nbytes


class ConvertError(ValueError):
    """A step that does not fit what it is applied to, or a payload that does not fit its manifest; nothing was changed."""


@dataclass(frozen=True)
class Held:
    """A block set as arrays. Steps never write into them: they may be views of somebody's buffer.

    ``k`` and ``v`` are ``[layers, blocks, heads, tokens, dim]`` (HND) or ``[layers, blocks, tokens, heads, dim]`` (NHD) when
    token-major, else ``[layers, blocks, heads, tokens * dim]`` in stored order; unblocked is one block. int4 is held as int8.
    Scales are the same without the last axis. Elements past ``tokens`` in the last block are zero.
    """

    tokens: int
    geometry: Geometry
    numerics: Numerics
    layout: Layout
    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None
    losses: tuple[codecs.Loss, ...] = ()

    @property
    def block(self) -> int:
        """Tokens in a block, also when unblocked."""
        return self.geometry.block_tokens or self.tokens


def load(manifest: Manifest, rows: Sequence[Row], payload: memoryview, start: int, tokens: int) -> Held:
    """Look at a payload as arrays; what no row holds is zero (``check_coverage`` says whether that matters).

    Raises ConvertError for a row that does not fit the manifest or the payload.
    """
    geometry, numerics = manifest.geometry, manifest.numerics
    if geometry.block_tokens == 0 and manifest.layout.packing != TOKEN_MAJOR and len({r.first_token for r in rows}) > 1:
        raise ConvertError(f"an unblocked {manifest.layout.packing} payload cannot be cut at tokens")
    held = Held(tokens, geometry, numerics, manifest.layout, np.empty(0), np.empty(0))
    parts: dict[str, list[tuple[Row, Array]]] = {"k": [], "v": [], "k_scale": [], "v_scale": []}
    for row in rows:
        data = payload[row.offset : row.offset + row.nbytes]
        if len(data) != row.nbytes or row.nbytes % row.layers:
            raise ConvertError(f"a row of {row.nbytes} bytes at {row.offset} in a payload of {len(payload)}")
        table = np.frombuffer(data, np.uint8).reshape(row.layers, -1)
        if row.kind in (Kind.KV, Kind.K, Kind.V):
            cut = 0 if row.kind is Kind.V else table.shape[1]
            if row.kind is Kind.KV:
                keys = geometry.head_dim * BITS[numerics.k]
                cut = table.shape[1] * keys // (keys + geometry.head_dim_v * BITS[numerics.v])
            for name, piece in (("k", table[:, :cut]), ("v", table[:, cut:])):
                if piece.size:
                    parts[name].append((row, piece))
        else:
            parts["k_scale" if row.kind is Kind.K_SCALE else "v_scale"].append((row, table))
    arrays: dict[str, Any] = {name: _assemble(held, name, found, start) for name, found in parts.items() if found}
    if "k" not in arrays or "v" not in arrays:
        raise ConvertError("no row holds keys, or none holds values")
    return replace(held, **arrays)


def store(held: Held, manifest: Manifest, rows: Sequence[Row], out: memoryview | None = None) -> memoryview:
    """Write the payload of ``rows``, which are as ``plan_rows`` gives them for ``manifest``; padding between rows is zero."""
    size = payload_nbytes(tuple(rows))
    if out is None:
        out = memoryview(bytearray(size))
    if out.readonly or out.nbytes < size:
        raise ConvertError(
            f"out holds {out.nbytes} bytes{' and is read-only' * out.readonly}; {size} writable ones are needed"
        )
    flat = np.frombuffer(out, np.uint8)[:size]
    end = 0
    for row in rows:
        layers = slice(
            row.first_layer - held.geometry.first_layer, row.first_layer - held.geometry.first_layer + row.layers
        )
        flat[end : row.offset] = 0
        end = row.offset + row.nbytes
        table = flat[row.offset : end].reshape(row.layers, -1)
        if row.kind is Kind.KV:
            pieces = [_raw(held.k[layers], manifest.numerics.k), _raw(held.v[layers], manifest.numerics.v)]
        else:
            scales = held.k_scale if row.kind is Kind.K_SCALE else held.v_scale
            if scales is None or row.kind in (Kind.K, Kind.V):
                raise ConvertError(f"nothing to write for a row of {row.kind.name}")
            pieces = [_raw(scales[layers], manifest.numerics.scale)]
        if sum(piece.shape[1] for piece in pieces) != table.shape[1]:
            raise ConvertError(f"a row of {row.kind.name} needs {table.shape[1]} bytes a layer")
        at = 0
        for piece in pieces:
            table[:, at : at + piece.shape[1]] = piece
            at += piece.shape[1]
    flat[end:] = 0
    return out[:size]


def _assemble(held: Held, name: str, parts: list[tuple[Row, Array]], start: int) -> Array:
    """The pieces of one tensor, ``[layers of the row, bytes]`` each, as one array."""
    geometry = held.geometry
    dtype = held.numerics.scale if name.endswith("scale") else getattr(held.numerics, name)
    dim = None if name.endswith("scale") else geometry.head_dim if name == "k" else geometry.head_dim_v
    pieces = []
    for row, raw in parts:
        block = geometry.block_tokens or row.tokens
        shape = (row.layers, *_shape(held.layout, -(-row.tokens // block), row.heads, block, dim))
        values = codecs.unpack_nibbles(raw) if dtype == "int4" else raw.view(codecs.STORAGE[dtype])
        if values.size != prod(shape):
            raise ConvertError(f"a row of {row.kind.name} has {values.size} elements of {name} for a shape of {shape}")
        pieces.append((row, values.reshape(shape)))
    blocks = -(-held.tokens // held.block)
    whole = (geometry.layers, *_shape(held.layout, blocks, geometry.heads, held.block, dim))
    if len(pieces) == 1 and pieces[0][1].shape == whole:
        return pieces[0][1]
    result = np.zeros(whole, pieces[0][1].dtype)
    heads_axis = 3 if held.layout.order == "NHD" else 2
    for row, values in pieces:
        place = [slice(None)] * result.ndim
        layer, head, token = (
            row.first_layer - geometry.first_layer,
            row.first_head - geometry.first_head,
            row.first_token - start,
        )
        place[0] = slice(layer, layer + row.layers)
        place[heads_axis] = slice(head, head + row.heads)
        if geometry.block_tokens:
            place[1] = slice(token // held.block, token // held.block + values.shape[1])
        elif held.layout.packing == TOKEN_MAJOR:
            place[5 - heads_axis] = slice(token, token + row.tokens)
        result[tuple(place)] = values
    return result


def _shape(layout: Layout, blocks: int, heads: int, block: int, dim: int | None) -> tuple[int, ...]:
    if dim is None:
        return (blocks, block, heads) if layout.order == "NHD" else (blocks, heads, block)
    if layout.order == "NHD":
        return (blocks, block, heads, dim)
    return (blocks, heads, block, dim) if layout.packing == TOKEN_MAJOR else (blocks, heads, block * dim)


def _raw(array: Array, dtype: str) -> Array:
    """Bytes as stored, ``[layers, bytes]``."""
    table = np.ascontiguousarray(array).reshape(array.shape[0], -1)
    return codecs.pack_nibbles(table) if dtype == "int4" else table.view(np.uint8)
