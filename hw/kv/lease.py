"""What a store holds: bytes being written, blocks, and the promises made to their readers."""

import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from hw.kv.memory import GRANULE, granules
from hw.kv.transports.base import BlockKey, Bytes, Kind, Ref


class Discards(Protocol):
    """Takes staged bytes back."""

    def discard(self, staged: "Staged") -> None:
        """Zero and free them."""
        ...


@dataclass(slots=True, eq=False)
class Staged:
    """Bytes being written, seen by nobody else. Fill ``array`` or ``view``, then publish or discard; as a context manager it
    is discarded at the end unless it was published."""

    store: Discards
    salt: bytes
    offset: int
    nbytes: int
    generation: int  # which they will have once published; a header written into them can say so
    memory: memoryview | None  # None once published or discarded
    discarded: bool = False
    _root: "weakref.ref[Bytes] | None" = None  # every array and view over the bytes keeps this one array alive

    @property
    def array(self) -> Bytes:
        """The bytes as an array, no copy. Publishing wants every reference to it (and to views of it) gone."""
        array = self._root() if self._root is not None else None
        if array is None:
            if self.memory is None:
                raise ValueError("these bytes were published or discarded already")
            array = np.frombuffer(self.memory, np.uint8, self.nbytes, self.offset)
            self._root = weakref.ref(array)
        return array

    @property
    def view(self) -> memoryview:
        """The bytes as a writable memoryview; the same holds."""
        return self.array.data

    @property
    def writable(self) -> bool:
        """Does anybody still hold a view of the bytes?"""
        return self._root is not None and self._root() is not None

    @property
    def granules(self) -> range:
        """Where it lies."""
        return range(self.offset // GRANULE, self.offset // GRANULE + granules(self.nbytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.discard(self)


@dataclass(slots=True, eq=False)
class Block:
    """A published block set."""

    key: BlockKey
    offset: int
    nbytes: int
    generation: int
    leases: dict[int, int] = field(default_factory=dict)  # number -> deadline, ns of the store's clock

    @property
    def granules(self) -> range:
        """Where it lies."""
        return range(self.offset // GRANULE, self.offset // GRANULE + granules(self.nbytes))


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise that a block stays where it is until ``until_ns`` of the store's clock."""

    key: BlockKey
    number: int
    offset: int
    nbytes: int
    generation: int
    until_ns: int

    def ref(self, kind: Kind, handle: str) -> Ref:
        """The lease as it travels in messages."""
        return Ref(
            kind, handle, self.offset, self.nbytes, self.generation, self.number, self.until_ns,
            self.key.manifest, self.key.prefix,
        )  # fmt: skip
