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


class HiddenModel(StepModel, Protocol):
    """A decoder over each token and the *feature* of the position before it; :class:`hw.onnx.conditioned.ConditionedModel` is one.

    A position's feature is the target's last hidden state there where it was written, else what this model's own layers gave
    when the position was computed. Copies of KV take the features along. Logits are those of ``token_ids``.
    """

    hidden_size: int
    token_ids: npt.NDArray[np.int32]

    def open_hidden(self, slot: int, stop: int) -> None:
        """A sequence begins in a slot: positions below ``stop`` have zeros for a feature, and of none anything is known."""

    def skip_hidden(self, slot: int, start: int, stop: int) -> None:
        """Positions ``[start, stop)``, which are not computed yet, have zeros for a feature where nothing was written."""

    def write_hidden(self, slot: int, start: int, rows: npt.NDArray[Any]) -> None:
        """The target's hidden states ``[n, hidden_size]`` of the positions from ``start`` on."""
