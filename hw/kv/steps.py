"""The steps of a conversion, as data: ``hw/kv/verdict.py`` plans them, ``hw/kv/convert.py`` executes them in order.

Steps come in this order, each at most as often as said: ``SelectLayers`` (once), ``SelectHeads`` (once), ``Repack`` to
``token_major``, ``Reblock``, ``Reorder`` (once each), then ``Dequantise``, ``Cast`` and ``Quantise`` (each at most once
for K and once for V, K first), and last ``Repack`` from ``token_major``. Every step says what it finds and what it leaves,
so a step can be checked against the manifest it is applied to. Layers and heads are global numbers. Only conversions that
need no interior order (``SelectLayers``) are planned for an opaque packing.
"""

from dataclasses import astuple, dataclass
from typing import ClassVar, Literal

from hw.kv.manifest import DType, Order, Scheme


@dataclass(frozen=True, slots=True)
class _Step:
    name: ClassVar[str]

    @property
    def lossy(self) -> bool:
        """Can values change? Lossy steps make the result ``approximate`` and enter its lineage."""
        return False

    def __str__(self) -> str:  # enters lineages, so its form is part of the format
        return f"{self.name}({','.join(map(str, astuple(self)))})"


@dataclass(frozen=True, slots=True)
class SelectLayers(_Step):
    """Keep layers ``[first, first + layers)``."""

    name = "select_layers"
    first: int
    layers: int


@dataclass(frozen=True, slots=True)
class SelectHeads(_Step):
    """Keep KV heads ``[first, first + heads)``."""

    name = "select_heads"
    first: int
    heads: int


@dataclass(frozen=True, slots=True)
class Repack(_Step):
    """Interior order of a (block, head), values of ``Layout.packing``; one side is ``token_major``."""

    name = "repack"
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Reblock(_Step):
    """Tokens in a block; 0 is unblocked. Interior order is ``token_major`` at this point."""

    name = "reblock"
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Reorder(_Step):
    """Order of tokens and heads in a block. Interior order is ``token_major`` at this point."""

    name = "reorder"
    source: Order
    target: Order


@dataclass(frozen=True, slots=True)
class Dequantise(_Step):
    """Integers times their scales, to a float dtype; the tensor's scales are gone afterwards."""

    name = "dequantise"
    tensor: Literal["k", "v"]
    source: DType
    target: DType
    scheme: Scheme

    @property
    def lossy(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Cast(_Step):
    """One float dtype to another, rounding to nearest even. To float32 it loses nothing."""

    name = "cast"
    tensor: Literal["k", "v"]
    source: DType
    target: DType

    @property
    def lossy(self) -> bool:
        return self.target != "float32"


@dataclass(frozen=True, slots=True)
class Quantise(_Step):
    """A float dtype to integers with scales of dtype ``scale``."""

    name = "quantise"
    tensor: Literal["k", "v"]
    source: DType
    target: DType
    scheme: Scheme
    scale: str

    @property
    def lossy(self) -> bool:
        return True


Step = SelectLayers | SelectHeads | Repack | Reblock | Reorder | Dequantise | Cast | Quantise
ALL_STEPS = frozenset(
    step.name for step in (SelectLayers, SelectHeads, Repack, Reblock, Reorder, Dequantise, Cast, Quantise)
)
