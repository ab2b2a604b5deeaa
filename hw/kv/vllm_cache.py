"""vLLM's paged caches, read and written as canonical keys and values.

vLLM 0.29 registers one tensor ``[blocks, heads, block_tokens, 2 * head_dim]`` a layer, in any stride order, usually all in
one allocation. On CPUs its shape lies: K and V are two packed regions of each (block, head). Which packing it is
must come from a probe (probe.py), never from the shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hw.kv import kernels
from hw.kv.layouts import OPAQUE, PACKINGS, TOKEN_MAJOR, Kind, LayoutError, interior

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}

Buffer: TypeAlias = torch.Tensor | npt.NDArray[Any]

_FEW_TOKENS = 8  # of a block, gathered one by one; for more, the whole block is unpacked and cut


class CacheError(ValueError):
    """A cache, block list or buffer that does not fit; nothing was read or written."""


@dataclass(frozen=True)
class _Run:
    """Layers that lie a constant stride apart. ``kinds``: K and V as ``[layers, blocks, heads, t1, t2, d1, d2]``."""

    first: int
    layers: int
    kinds: tuple[torch.Tensor, torch.Tensor]


class PagedCache:
    """The caches of several layers, in layer order.

    ``caches`` are the registered tensors, rank 4 as above or the older rank 5 ``[2, blocks, tokens, heads, dim]`` or
    ``[blocks, 2, tokens, heads, dim]`` (a head-major one is the same shape with other strides). ``packing`` is
    the probe's answer; with an ``opaque:`` packing only whole raw blocks can be moved. ``kinds_axis`` tells the two
    rank-5 forms apart where both would fit. Raises CacheError when the tensors do not belong together.

    Not thread-safe: use it from the thread that runs the engine's steps.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        *,
        packing: str,
        kinds_axis: int | None = None,
    ) -> None:
        named = caches if isinstance(caches, Mapping) else {str(i): tensor for i, tensor in enumerate(caches)}
        if not named:
            raise CacheError("no layer has a cache: register the KV caches before opening them")
        if packing not in PACKINGS and not packing.startswith(OPAQUE):
            raise CacheError(f"unknown packing {packing!r}: probe the engine first")
        self.layer_names = tuple(named)
        self.packing = packing
        self._tensors = list(named.values())
        first = self._tensors[0]
        for name, tensor in named.items():
            same = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if same != (first.shape, first.stride(), first.dtype, first.device):
                raise CacheError(f"the cache of {name} differs in shape, strides, dtype or device: open it by itself")
        if first.dtype not in _DTYPES and not packing.startswith(OPAQUE):
            raise CacheError(f"a cache of {first.dtype} can only be moved as opaque blocks")
        self._kinds_axis = _kinds_axis(first, kinds_axis)
        self.blocks, self.heads, self.block_tokens, self.head_dim = _extents(first, self._kinds_axis, packing)
        self.layers = len(self._tensors)
        self.torch_dtype = first.dtype
        self.device = first.device
        self._runs = [] if packing.startswith(OPAQUE) else self._open_runs()

    @property
    def dtype(self) -> str:
        """``float32``, ``float16`` or ``bfloat16`` (as the manifest names them); torch's name otherwise."""
        return _DTYPES.get(self.torch_dtype, str(self.torch_dtype).removeprefix("torch."))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, keys and values."""
        return 2 * self.layers * self.heads * self.head_dim * int(self.torch_dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block over all layers."""
        return self.block_tokens * self.token_bytes

    # --- tokens -----------------------------------------------------------------------------------------------------

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """The canonical shape of ``tokens``: ``[2 * layers, heads, tokens, dim]``, row 2l keys, row 2l+1 values of layer l."""
        return (2 * self.layers, self.heads, tokens, self.head_dim)

    def read(self, block_ids: Sequence[int], start: int, stop: int, out: Buffer | None = None) -> torch.Tensor:
        """Copy positions ``[start, stop)`` of the sequence held in ``block_ids`` into ``out`` and return it as a tensor.

        Position p lies in ``block_ids[p // block_tokens]``. ``out`` has :meth:`shape` in any strides, on any device, and
        may have another float dtype (the values are then rounded); a numpy uint16 array is bfloat16. Without ``out``, a new
        tensor of the cache's dtype on its device. Raises CacheError before anything is copied.
        """
        ids = self._checked(block_ids, start, stop)
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise CacheError("out is read-only")
        target = (
            torch.empty(self.shape(stop - start), dtype=self.torch_dtype, device=self.device)
            if out is None
            else self._buffer(out, stop - start)
        )
        self._move(ids, start, stop, target, writing=False)
        return target

    def write(self, block_ids: Sequence[int], start: int, array: Buffer) -> None:
        """Overwrite positions ``[start, start + tokens)`` with canonical ``array`` of :meth:`shape`; other tokens stay.

        A float dtype other than the cache's is rounded to it. Raises CacheError before anything is written.
        """
        tokens = array.shape[2] if len(array.shape) == 4 else 0
        source = self._buffer(array, tokens)
        ids = self._checked(block_ids, start, start + tokens)
        if len(set(ids.tolist())) != len(ids):
            raise CacheError("a block occurs twice among those to write")
        self._move(ids, start, start + tokens, source, writing=True)

    # --- raw blocks -------------------------------------------------------------------------------------------------

    def read_raw(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Whole blocks as they lie in the cache, ``[layers, len(block_ids), bytes]``: for a receiver with an equal cache.

        Raises CacheError, also when a block is not one run of memory.
        """
        ids = self._ids(block_ids)
        raw = self._raw()
        shape = (self.layers, len(ids), raw[0].shape[1])
        if out is None:
            out = np.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8 or not out.flags.writeable:
            access = "writable" if out.flags.writeable else "read-only"
            raise CacheError(f"out is {access} {out.dtype} {out.shape}; raw blocks need writable uint8 {shape}")
        index = torch.from_numpy(ids).to(self.device)
        for layer, tensor in enumerate(raw):
            if tensor.device.type == "cpu" and out[layer].flags.c_contiguous:
                torch.index_select(tensor, 0, index, out=torch.from_numpy(out[layer]))
            else:
                out[layer] = tensor.index_select(0, index).cpu().numpy()
        return out

    def write_raw(self, block_ids: Sequence[int], array: npt.NDArray[np.uint8]) -> None:
        """Overwrite whole blocks with what :meth:`read_raw` gave on a cache of the same layout. Raises CacheError."""
        ids = self._ids(block_ids)
        raw = self._raw()
        shape = (self.layers, len(ids), raw[0].shape[1])
        if array.shape != shape or array.dtype != np.uint8:
            raise CacheError(f"the array is {array.dtype} {array.shape}; these raw blocks are uint8 {shape}")
        if len(set(ids.tolist())) != len(ids):
            raise CacheError("a block occurs twice among those to write")
        index = torch.from_numpy(ids).to(self.device)
        for layer, tensor in enumerate(raw):
            tensor.index_copy_(0, index, _from_numpy(np.ascontiguousarray(array[layer])).to(self.device))

    def zero(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks: what a failed import leaves behind must not surface later. Raises CacheError."""
        index = torch.from_numpy(self._ids(block_ids)).to(self.device)
        for tensor in self._tensors:
            tensor.index_fill_(1 if self._kinds_axis == 0 else 0, index, 0)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _ids(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        ids = np.asarray(block_ids, np.int64)
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= self.blocks:
            raise CacheError(f"block ids must be a list of ids in 0..{self.blocks - 1}")
        return ids

    def _checked(self, block_ids: Sequence[int], start: int, stop: int) -> npt.NDArray[np.int64]:
        """The blocks that ``[start, stop)`` touches, or a refusal."""
        if not self._runs:
            raise CacheError(f"packing {self.packing}: only whole raw blocks can be moved")
        ids = self._ids(block_ids)
        if not 0 <= start < stop <= len(ids) * self.block_tokens:
            raise CacheError(f"positions [{start}, {stop}) are not in {len(ids)} blocks of {self.block_tokens} tokens")
        return ids[start // self.block_tokens : -(-stop // self.block_tokens)]

    def _buffer(self, buffer: Buffer, tokens: int) -> torch.Tensor:
        tensor = buffer if isinstance(buffer, torch.Tensor) else _from_numpy(buffer)
        if tensor.dtype not in _DTYPES or tuple(tensor.shape) != self.shape(tokens) or not tokens:
            raise CacheError(
                f"the buffer is {tensor.dtype} {tuple(tensor.shape)}; needed: a float type and {self.shape(tokens)}"
            )
        return tensor

    def _raw(self) -> list[torch.Tensor]:
        """Every layer as bytes ``[blocks, bytes]``."""
        try:
            if self._kinds_axis == 0:
                raise RuntimeError
            return [tensor.view(self.blocks, -1).view(torch.uint8) for tensor in self._canonical_strides()]
        except RuntimeError:
            raise CacheError("a block of this cache is not one run of memory: move tokens instead") from None

    def _canonical_strides(self) -> list[torch.Tensor]:
        """The tensors with axes sorted by stride, so that a dense block can be viewed as one run whatever its order."""
        first = self._tensors[0]
        inner = sorted(range(1, first.ndim), key=lambda axis: -first.stride(axis))
        return [tensor.permute(0, *inner) for tensor in self._tensors]

    def _open_runs(self) -> list[_Run]:
        runs = []
        first = 0
        while first < self.layers:
            count, step = _equally_spaced(self._tensors[first:])
            kinds = tuple(self._kind(self._tensors[first], kind, count, step) for kind in ("K", "V"))
            runs.append(_Run(first, count, (kinds[0], kinds[1])))
            first += count
        return runs

    def _kind(self, tensor: torch.Tensor, kind: Any, layers: int, step: int) -> torch.Tensor:
        """One kind of ``layers`` layers, ``step`` elements apart, as ``[layers, blocks, heads, t1, t2, d1, d2]``."""
        stride = tensor.stride()
        offset = tensor.storage_offset()
        if self._kinds_axis is not None:  # rank 5
            part = tensor.select(self._kinds_axis, 0 if kind == "K" else 1)
            block, token, head, last = part.stride()
            offset = part.storage_offset()
            inner = interior(TOKEN_MAJOR, kind, self.block_tokens, self.head_dim)
            strides = (block, head, token, token, last, last)
        elif self.packing == TOKEN_MAJOR:
            inner = interior(TOKEN_MAJOR, kind, self.block_tokens, self.head_dim)
            offset += 0 if kind == "K" else self.head_dim * stride[3]
            strides = (stride[0], stride[1], stride[2], stride[2], stride[3], stride[3])
        else:
            inner = interior(self.packing, kind, self.block_tokens, self.head_dim)
            offset += 0 if kind == "K" else self.block_tokens * self.head_dim
            strides = (stride[0], stride[1], *inner.strides)
        return tensor.as_strided((layers, self.blocks, self.heads, *inner.sizes), (step, *strides), offset)

    def _move(self, ids: npt.NDArray[np.int64], start: int, stop: int, array: torch.Tensor, *, writing: bool) -> None:
        """Copy between the cache and canonical ``array``: whole blocks at once, partial first and last ones by token."""
        size = self.block_tokens
        head = -start % size  # tokens before the first whole block
        first = start // size
        if first == (stop - 1) // size and (head or stop % size):  # within one block
            return self._move_tokens(ids, start - first * size, stop - first * size, array, writing=writing)
        whole = (stop - start - head) // size
        if head:
            self._move_tokens(ids[:1], size - head, size, array[:, :, :head], writing=writing)
        if whole:
            middle = ids[1:] if head else ids
            self._move_blocks(middle[:whole], array[:, :, head : head + whole * size], writing=writing)
        if tail := stop - start - head - whole * size:
            self._move_tokens(ids[-1:], 0, tail, array[:, :, -tail:], writing=writing)

    def _move_tokens(
        self, ids: npt.NDArray[np.int64], low: int, high: int, array: torch.Tensor, *, writing: bool
    ) -> None:
        """Tokens ``[low, high)`` of the one block in ``ids``."""
        if not writing and high - low > _FEW_TOKENS:
            whole = torch.empty(self.shape(self.block_tokens), dtype=self.torch_dtype)
            self._move_blocks(ids[:1], whole, writing=False)
            array.copy_(whole[:, :, low:high])
            return
        tokens = torch.arange(low, high, device=self.device)
        for run in self._runs:
            for part, stored in enumerate(run.kinds):
                inner = stored.shape[4]
                block = stored[:, int(ids[0])]  # [layers, heads, t1, t2, d1, d2]
                rows = array[2 * run.first + part : 2 * (run.first + run.layers) : 2]
                if writing:
                    split = rows.unflatten(3, stored.shape[5:]).to(block.device, block.dtype)
                    block[:, :, tokens // inner, tokens % inner] = split
                else:
                    rows.copy_(block[:, :, tokens // inner, tokens % inner].flatten(3))

    def _move_blocks(self, ids: npt.NDArray[np.int64], array: torch.Tensor, *, writing: bool) -> None:
        """Whole blocks; ``array`` is ``[2 * layers, heads, len(ids) * block_tokens, dim]``."""
        for run in self._runs:
            for part, stored in enumerate(run.kinds):
                kind: Kind = "K" if part == 0 else "V"
                rows = array[2 * run.first + part : 2 * (run.first + run.layers) : 2]
                if kernels.move(self.packing, kind, stored, ids, rows, writing=writing):
                    continue
                split = rows.unflatten(3, stored.shape[5:]).unflatten(2, (len(ids), *stored.shape[3:5]))
                canonical = split.movedim(2, 1)  # [layers, blocks, heads, t1, t2, d1, d2], over the rows' memory
                if self.device.type == "cpu":
                    at = 0
                    for low, high in _consecutive(ids):
                        source, target = stored[:, low:high], canonical[:, at : at + high - low]
                        (source if writing else target).copy_(target if writing else source)
                        at += high - low
                elif writing:
                    stored[:, torch.from_numpy(ids).to(self.device)] = canonical.to(self.device, self.torch_dtype)
                else:  # gather and order on the device, then one copy off it
                    index = torch.from_numpy(ids).to(self.device)
                    gathered = stored.index_select(1, index).movedim(1, 2).reshape(rows.shape)
                    rows.copy_(gathered)


def _from_numpy(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over an array's memory; uint16 is bfloat16. Only to be read when the array is read-only."""
    if not array.flags.writeable:  # a reader's view of shared memory; torch knows no read-only tensors and would warn
        array = np.asarray(_Alias(array))
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Alias:
    """Another array over the same memory, without the read-only mark."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive
        facts = array.__array_interface__
        self.__array_interface__ = {**facts, "data": (facts["data"][0], False)}


def _kinds_axis(tensor: torch.Tensor, given: int | None) -> int | None:
    """Which axis of a rank-5 tensor separates keys from values; None for rank 4."""
    if tensor.ndim == 4:
        return None
    fits = [axis for axis in (0, 1) if tensor.ndim == 5 and tensor.shape[axis] == 2]
    if given is not None and given in fits:
        return given
    if given is not None or len(fits) != 1:
        raise CacheError(f"cannot tell keys from values in a cache of shape {tuple(tensor.shape)}: name kinds_axis")
    return fits[0]


def _extents(tensor: torch.Tensor, kinds_axis: int | None, packing: str) -> tuple[int, int, int, int]:
    """Blocks, heads, tokens of a block, head dimension; refuses strides that the packing rules out."""
    shape = tensor.shape
    if kinds_axis is not None:
        if packing not in (TOKEN_MAJOR,) and not packing.startswith(OPAQUE):
            raise CacheError(f"a rank-5 cache is never {packing}")
        return shape[1 - kinds_axis], shape[3], shape[2], shape[4]
    blocks, heads, tokens, content = shape
    if content % 2:
        raise CacheError(f"a token's content of {content} elements is not a key and a value of one size")
    if packing in PACKINGS and packing != TOKEN_MAJOR:
        if tensor.stride()[2:] != (content, 1):
            raise CacheError(f"a {packing} cache has dense (block, head) regions; these strides are {tensor.stride()}")
        try:
            for kind in ("K", "V"):
                interior(packing, "K" if kind == "K" else "V", tokens, content // 2)
        except LayoutError as error:
            raise CacheError(str(error)) from None
    return blocks, heads, tokens, content // 2


def _equally_spaced(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """How many leading tensors lie a constant, positive number of elements apart in one allocation, and that number."""
    first = tensors[0]
    place = first.untyped_storage().data_ptr()
    count, step = 1, 0
    for tensor in tensors[1:]:
        if tensor.untyped_storage().data_ptr() != place:
            break
        gap = tensor.storage_offset() - first.storage_offset()
        if count == 1:
            step = gap
        if step <= 0 or gap != count * step:
            break
        count += 1
    return count, step if count > 1 else 0


def _consecutive(ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """``[low, high)`` runs of ids that follow one another."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(ids, cuts)]
