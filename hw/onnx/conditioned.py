"""A draft that sees the target's hidden states: one small decoder over [token, feature of the position before].

The feature of a position is the target's last hidden state there, where the target sent it; else what this draft's own layers gave
there; else zeros. With the feature of position ``t - 1`` and the token at ``t`` it guesses the token at ``t + 1``. The graph's
logits are those of a trimmed vocabulary (``head_ids.npy``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hw.onnx.checkpoint import CONDITIONED, HEAD_IDS, CheckpointError, Manifest
from hw.onnx.session import FEATURES, Logits, OnnxModel, UnsupportedModel
from hw.providers import ProviderProfile, Tuning


def read_head(folder: Path, facts: Manifest) -> npt.NDArray[np.int32]:
    """The vocabulary id of each logit, int32 ``[head_size]``, ascending. Raises CheckpointError."""
    path = folder / HEAD_IDS
    try:
        ids: npt.NDArray[np.int32] = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if ids.dtype != np.int32 or ids.shape != (facts.head_size,):
        raise CheckpointError(f"{path} holds {ids.dtype} {ids.shape} where int32 ({facts.head_size},) belongs")
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= facts.vocab_size or (np.diff(ids) <= 0).any():
        raise CheckpointError(f"{path}: ids must ascend within a vocabulary of {facts.vocab_size}")
    return ids


class ConditionedModel(OnnxModel):
    """As :class:`OnnxModel`, with a feature for each position of each slot. Use from one thread.

    Logits are ``[head]``; ``token_ids`` says which tokens they are of.
    """

    beside: ClassVar[tuple[str, ...]] = (FEATURES,)

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 8,
        context: int = 2048,
        provider: str | ProviderProfile = "cpu",
        tuning: Tuning | None = None,
        warm_up: bool = True,
    ) -> None:
        """As :class:`OnnxModel`; also raises :class:`~hw.onnx.checkpoint.CheckpointError` for a folder that is not such a draft."""
        folder = Path(folder)
        facts = Manifest.read(folder)
        if facts.kind != CONDITIONED:
            raise CheckpointError(f"{folder} is a {facts.kind}, not a draft that takes hidden states")
        self.token_ids = read_head(folder, facts)
        super().__init__(folder, slots=slots, context=context, provider=provider, tuning=tuning, warm_up=False)
        if self.geometry.vocab_size != facts.head_size or not self.geometry.last_only:
            raise UnsupportedModel(f"{folder}: logits must be [batch, 1, {facts.head_size}], of the last position only")
        self.vocab_size = facts.vocab_size
        self.hidden_size = facts.hidden_size
        # Row t is the feature of position t - 1: what the token at t goes with. Committed by the system as it is touched.
        self._features = np.zeros((slots, self.context + 1, self.hidden_size), np.float32)
        self._given = np.zeros((slots, self.context + 1), bool)  # rows that the draft's own outputs must not replace
        self._given[:, 0] = True
        self._last_given = [0] * slots
        self._step_features = np.zeros((slots, 1, self.hidden_size), np.float32)
        self._step_outputs = np.zeros((slots, 1, self.hidden_size), np.float32)
        self._outputs = np.empty((self.context, self.hidden_size), np.float32)
        if warm_up:
            self.measure()

    def measure(self) -> None:
        """As the base class; of prompts whose hidden states are there, which are read in one call."""
        self.open_hidden(0, self.context)
        super().measure()
        self.open_hidden(0, 0)

    # --- features -------------------------------------------------------------------------------------------------

    def open_hidden(self, slot: int, stop: int) -> None:
        """A sequence begins in a slot: nothing is known of it, and positions below ``stop`` have zeros for a feature."""
        self._features[slot, : stop + 1] = 0.0
        self._given[slot, : stop + 1] = True
        self._given[slot, stop + 1 :] = False
        self._last_given[slot] = stop

    def skip_hidden(self, slot: int, start: int, stop: int) -> None:
        """Positions ``[start, stop)``, which are not computed yet, have zeros for a feature where nothing was written."""
        absent = ~self._given[slot, start + 1 : stop + 1]
        self._features[slot, start + 1 : stop + 1][absent] = 0.0
        self._given[slot, start + 1 : stop + 1] = True
        self._last_given[slot] = max(self._last_given[slot], stop)

    def write_hidden(self, slot: int, start: int, rows: npt.NDArray[Any]) -> None:
        """The target's hidden states ``[n, hidden_size]``, of any float type, of the positions from ``start`` on.

        What was computed behind ``start`` is not what it would be now: compute it again. Raises ValueError when it does not fit.
        """
        stop = start + len(rows)
        if rows.ndim != 2 or rows.shape[1] != self.hidden_size or start < 0 or stop > self.context:
            raise ValueError(f"hidden states {rows.shape} at {start} do not fit {self._features.shape}")
        self._features[slot, start + 1 : stop + 1] = rows
        self._given[slot, start + 1 : stop + 1] = True
        self._last_given[slot] = max(self._last_given[slot], stop)

    def feature(self, slot: int, position: int) -> npt.NDArray[np.float32]:
        """A view of a position's feature, ``[hidden_size]``."""
        row: npt.NDArray[np.float32] = self._features[slot, position + 1]
        return row

    # --- steps ----------------------------------------------------------------------------------------------------

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> Logits:
        """As the base class. A token that goes with the draft's own feature of a position computed here begins a call of its own."""
        count = len(tokens)
        if not count or start < 0 or start + count > self.context:
            raise ValueError(f"{count} tokens at {start} do not fit a context of {self.context}")
        cuts = (np.flatnonzero(~self._given[slot, start + 1 : start + count]) + 1).tolist()
        for begin, end in zip([0, *cuts], [*cuts, count], strict=True):
            logits = self._read(slot, tokens[begin:end], start + begin)
        return logits

    def _read(self, slot: int, tokens: Sequence[int], start: int) -> Logits:
        """One call. The features of all its tokens are there."""
        count = len(tokens)
        binding = self._prefills.get(slot)
        if binding is None:
            binding = self._prefills[slot] = self._bind(slot, slot + 1)
        features = self._features[slot : slot + 1, start : start + count]
        outputs = self._outputs[None, :count]
        binding.bind_input(FEATURES, "cpu", 0, np.float32, features.shape, features.ctypes.data)
        binding.bind_output("features_out", "cpu", 0, np.float32, outputs.shape, outputs.ctypes.data)
        logits = super().prefill(slot, tokens, start)
        own = ~self._given[slot, start + 1 : start + 1 + count]
        if own.any():
            self._features[slot, start + 1 : start + 1 + count][own] = outputs[0, own]
        return logits

    def decode(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> list[Logits]:
        """As the base class."""
        for slot, length in zip(slots, lengths, strict=True):
            if 0 <= length < self.context:  # else the base class says what is wrong
                self._step_features[slot, 0] = self._features[slot, length]
        logits = super().decode(slots, tokens, lengths)
        for slot, length in zip(slots, lengths, strict=True):
            if not self._given[slot, length + 1]:
                self._features[slot, length + 1] = self._step_outputs[slot, 0]
        return logits

    def _run(self, low: int, high: int, idle: list[int]) -> None:
        if self.profile.copies_inputs:
            self._bind_features(self._binding(low, high), low, high)
        super()._run(low, high, idle)

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """As the base class, features included: also those the target sent of positions that are not computed yet."""
        super().move(source, target, length, start)
        # The feature before ``start`` may have come after the KV there was copied.
        stop = max(length, self._last_given[source]) + 1
        self._features[target, start:stop] = self._features[source, start:stop]
        self._given[target, start:stop] = self._given[source, start:stop]
        self._given[target, stop:] = False
        self._last_given[target] = self._last_given[source]

    def _bind(self, low: int, high: int) -> Any:
        binding = super()._bind(low, high)
        self._bind_features(binding, low, high)
        return binding

    def _bind_features(self, binding: Any, low: int, high: int) -> None:
        features, outputs = self._step_features[low:high], self._step_outputs[low:high]
        binding.bind_input(FEATURES, "cpu", 0, np.float32, features.shape, features.ctypes.data)
        binding.bind_output("features_out", "cpu", 0, np.float32, outputs.shape, outputs.ctypes.data)
