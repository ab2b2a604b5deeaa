"""What the draft engine needs of a model; :class:`hw.onnx.session.OnnxModel` is one, tests bring a tiny one."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hw.onnx.costs import StepCosts

Logits = npt.NDArray[np.float32]


class StepModel(Protocol):
    """A decoder with ``slots`` independent KV slots of ``context`` positions each.

    Returned logits may be overwritten by the next call. A failed call leaves every slot's positions below the ones it was
    asked to compute as they were.
    """

    vocab_size: int
    context: int
    slots: int
    costs: StepCosts

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> Logits:
        """Compute ``tokens`` from position ``start`` on; logits after the last one, ``[vocab]``."""

    def decode(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> Sequence[Logits]:
        """Compute one token each for distinct slots at positions ``lengths``; one ``[vocab]`` row a slot."""

    def write_kv(self, slot: int, start: int, kv: npt.NDArray[Any]) -> None:
        """Put KV of the positions from ``start`` on into a slot: ``[2 * layers, kv_heads, positions, head_dim]``."""

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy positions ``[start, length)`` of one slot to another."""
