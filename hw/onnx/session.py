"""A decoder-only ONNX model with its own KV: prefill and single-token steps over preallocated slots.

Every tensor a step touches is preallocated and indexed by slot, so a step over slots ``[lo, hi)`` is one cached binding of
plain pointers: per step only token ids and mask bits are written. KV grows in place because past and present are bound to
the same memory; ``GroupQueryAttention`` then appends at ``sum(mask) - S``. Going back is passing a shorter length.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from hw.onnx.costs import StepCosts
from hw.onnx.slots import KVBuffer, runs
from hw.providers import ProviderProfile, Tuning, get_profile
from hw.providers.profile import CPU
from hw.providers.runtime import Placement, open_session, read_placement

Logits = npt.NDArray[np.float32]

_KV_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_BINDINGS = 64  # cached ranges; one holds about 2 names a layer, no tensors of its own
_WARMUP_ROUNDS = 3
_ATTENTION = "GroupQueryAttention"
FEATURES = "features"  # input of a conditioned draft


class UnsupportedModel(ValueError):
    """The ONNX file is not a decoder this module can run; the message says what it misses."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes of a model. ``vocab_size``: logits a position. ``context``: longest sequence its positions allow. ``last_only``: logits of the last position."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    kv_dtype: npt.DTypeLike
    last_only: bool


def read_geometry(session: ort.InferenceSession, folder: Path, beside: Collection[str] = ()) -> Geometry:
    """Read shapes from the graph's inputs, and what the graph does not say from the JSON files beside it.

    ``beside``: inputs there must be beyond a decoder's own. Raises :class:`UnsupportedModel`.
    """
    inputs = {node.name: node for node in session.get_inputs()}
    layers = sum(1 for name in inputs if re.fullmatch(r"past_key_values\.\d+\.key", name))
    wanted = {"input_ids", "attention_mask", *beside}
    wanted |= {f"past_key_values.{layer}.{part}" for layer in range(layers) for part in ("key", "value")}
    if FEATURES in inputs and FEATURES not in beside:
        raise UnsupportedModel(f"{folder}: this draft takes the target's hidden states, and there are none here")
    if not layers or wanted != set(inputs):
        raise UnsupportedModel(f"{folder}: inputs must be {sorted(wanted)[:4]}…, found {sorted(inputs)[:6]}…")
    settings: dict[str, Any] = {}
    for name in ("genai_config.json", "chain.json"):
        if (folder / name).is_file():
            settings |= json.loads((folder / name).read_text())
    described = settings.get("model", {})
    decoder = described.get("decoder", {})
    key = inputs["past_key_values.0.key"]
    if key.type not in _KV_TYPES:
        raise UnsupportedModel(f"{folder}: KV of type {key.type} is not supported")
    kv_heads, head_dim = (
        given if isinstance(given, int) else decoder.get(field)
        for given, field in ((key.shape[1], "num_key_value_heads"), (key.shape[3], "head_size"))
    )
    logits = session.get_outputs()[0]
    stated = settings.get("head_size") or described.get("vocab_size")
    vocab_size = logits.shape[2] if isinstance(logits.shape[2], int) else stated
    context = settings.get("max_context", described.get("context_length"))
    if not all(isinstance(value, int) for value in (kv_heads, head_dim, vocab_size, context)):
        raise UnsupportedModel(f"{folder}: kv heads, head size, vocabulary or context length are nowhere stated")
    if logits.type != "tensor(float)":
        raise UnsupportedModel(f"{folder}: logits of type {logits.type} are not supported")
    return Geometry(layers, kv_heads, head_dim, vocab_size, context, _KV_TYPES[key.type], logits.shape[1] == 1)


class OnnxModel:
    """One ONNX Runtime session and the KV slots it works on. Use from one thread.

    ``prefill`` and ``decode`` return views of a logits buffer that the next call overwrites.
    """

    beside: ClassVar[Collection[str]] = ()  # inputs of the graph beyond a decoder's own

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
        """Load ``folder/model.onnx``. ``context`` is cut to what the model allows.

        Raises FileNotFoundError, :class:`UnsupportedModel` (also for a provider that cannot hold the model),
        :class:`hw.providers.UnknownProvider`, or :class:`hw.providers.ProviderMissing`.
        """
        path = Path(folder) / "model.onnx"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: run scripts/prepare_models")
        self.profile = provider if isinstance(provider, ProviderProfile) else get_profile(provider)
        if self.profile.obstacle:
            raise UnsupportedModel(self.profile.obstacle)
        self.tuning = tuning or Tuning()
        self.tuning.pin()
        self._session = open_session(str(path), self.profile, self.tuning)
        self.placement = self._placed()
        self.geometry = geometry = read_geometry(self._session, Path(folder), self.beside)
        self.slots = slots
        self.context = min(context, geometry.context)
        self.vocab_size = geometry.vocab_size
        self.kv = KVBuffer(
            geometry.layers, slots, geometry.kv_heads, self.context, geometry.head_dim, geometry.kv_dtype
        )
        self.costs = StepCosts()
        self._ids = np.zeros((slots, 1), np.int64)
        self._mask = np.zeros((slots, self.context), np.int64)
        self._ones = [0] * slots  # how many leading entries of each mask row are 1
        self._logits = np.zeros((slots, 1, self.vocab_size), np.float32)
        self._bindings: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._prefills: dict[int, Any] = {}
        self._largest_gap = 0
        if warm_up:
            self.measure()

    def _placed(self) -> Placement | None:
        """Where the nodes are; None on the CPU provider alone. Refuses a provider that took attention away from the host."""
        if self.profile.execution_provider == CPU:
            return None
        placement = read_placement(self._session)
        if placement is None:
            raise UnsupportedModel(
                f"provider {self.profile.name}: this ONNX Runtime does not tell where attention runs"
            )
        elsewhere = placement.providers_of(_ATTENTION) - {CPU}
        if elsewhere:
            raise UnsupportedModel(
                f"provider {self.profile.name}: {', '.join(sorted(elsewhere))} took attention, so KV cannot grow in place"
            )
        return placement

    # --- steps ----------------------------------------------------------------------------------------------------

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> Logits:
        """Compute ``tokens`` at positions ``start…`` of one slot, whose first ``start`` positions hold valid KV.

        Returns the logits after the last token, ``[vocab]``. Raises ValueError when it would pass the context or a
        token is outside the vocabulary.
        """
        count = len(tokens)
        if not count or start < 0 or start + count > self.context:
            raise ValueError(f"{count} tokens at {start} do not fit a context of {self.context}")
        binding = self._prefills.get(slot)
        if binding is None:
            binding = self._prefills[slot] = self._bind(slot, slot + 1)
        ids = np.array([tokens], np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"token ids must be below {self.vocab_size}")
        logits = self._logits[slot : slot + 1]
        if not self.geometry.last_only:
            logits = np.empty((1, count, self.vocab_size), np.float32)
            binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._see(slot, start + count)
        self._bind_ids(binding, ids, slot, slot + 1)
        self._session.run_with_iobinding(binding)
        last: Logits = logits[0, -1]
        return last

    def decode(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> list[Logits]:
        """Compute one token for each of several distinct slots, at position ``lengths[i]`` of slot ``slots[i]``.

        Returns one ``[vocab]`` row a slot, in the order given. Raises ValueError when one would pass
        the context or is outside the vocabulary.
        """
        for slot, token, length in zip(slots, tokens, lengths, strict=True):
            if not 0 <= length < self.context:
                raise ValueError(f"position {length} is outside a context of {self.context}")
            if not 0 <= token < self.vocab_size:  # a quantised embedding reads past its end without a word
                raise ValueError(f"token id {token} is not below {self.vocab_size}")
            self._ids[slot, 0] = token
            self._see(slot, length + 1)
        for low, high in runs(sorted(slots), self._largest_gap):
            idle = [] if high - low == len(slots) else [slot for slot in range(low, high) if slot not in slots]
            self._run(low, high, idle)
        return [self._logits[slot, 0] for slot in slots]

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Make slot ``target`` hold what slot ``source`` holds at positions ``[start, length)``."""
        self.kv.move(source, target, length, start)

    def write_kv(self, slot: int, start: int, kv: npt.NDArray[Any]) -> None:
        """Put KV of the positions from ``start`` on into a slot.

        ``kv``: ``[2 * layers, kv_heads, positions, head_dim]``, row ``2 * l`` layer ``l``'s keys with their rotary embedding
        applied, ``2 * l + 1`` its values; any floating type, converted on the way. Raises ValueError when it does not fit.
        """
        self.kv.write(slot, start, kv)

    def read_kv(self, slot: int, start: int, stop: int) -> npt.NDArray[Any]:
        """A view of a slot's KV at positions ``[start, stop)``, in the form :meth:`write_kv` takes."""
        return self.kv.array[:, slot, :, start:stop]

    def _run(self, low: int, high: int, idle: list[int]) -> None:
        """Run slots ``[low, high)``. Idle ones among them compute a throw-away token over a past of nothing.

        That is the cheapest row there is, but it writes at position 0: what a live sequence has there is put back.
        """
        saved = [self.kv.first(slot) for slot in idle]
        for slot in idle:
            self._ids[slot, 0] = 0
            self._see(slot, 1)
        binding = self._binding(low, high)
        if self.profile.copies_inputs:
            self._bind_ids(binding, self._ids[low:high], low, high)
        try:
            self._session.run_with_iobinding(binding)
        finally:
            for slot, first in zip(idle, saved, strict=True):
                self.kv.restore_first(slot, first)

    def _see(self, slot: int, length: int) -> None:
        """Set a slot's mask to ``length`` ones by writing only what differs."""
        before = self._ones[slot]
        if length > before:
            self._mask[slot, before:length] = 1
        elif length < before:
            self._mask[slot, length:before] = 0
        self._ones[slot] = length

    # --- bindings -------------------------------------------------------------------------------------------------

    def _binding(self, low: int, high: int) -> Any:
        binding = self._bindings.get((low, high))
        if binding is None:
            binding = self._bindings[low, high] = self._bind(low, high)
            if len(self._bindings) > _BINDINGS:
                self._bindings.popitem(last=False)
        else:
            self._bindings.move_to_end((low, high))
        return binding

    def _bind(self, low: int, high: int) -> Any:
        """Bind rows ``[low, high)`` of every buffer. All buffers live as long as this object, so pointers stay good."""
        binding = self._session.io_binding()
        for name, rows in (("input_ids", self._ids[low:high]), ("attention_mask", self._mask[low:high])):
            binding.bind_input(name, "cpu", 0, np.int64, rows.shape, rows.ctypes.data)
        logits = self._logits[low:high]
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        dtype = self.geometry.kv_dtype
        for layer in range(self.geometry.layers):
            for part, name in enumerate(("key", "value")):
                kv = self.kv.array[2 * layer + part, low:high]
                place = ("cpu", 0, dtype, kv.shape, kv.ctypes.data)
                binding.bind_input(f"past_key_values.{layer}.{name}", *place)
                binding.bind_output(f"present.{layer}.{name}", *place)
        return binding

    def _bind_ids(self, binding: Any, ids: npt.NDArray[np.int64], low: int, high: int) -> None:
        """Bind token ids; and the mask again where binding copies what is bound, so that it is today's."""
        binding.bind_input("input_ids", "cpu", 0, np.int64, ids.shape, ids.ctypes.data)
        if self.profile.copies_inputs:
            mask = self._mask[low:high]
            binding.bind_input("attention_mask", "cpu", 0, np.int64, mask.shape, mask.ctypes.data)

    # --- costs ----------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Warm up and fit :attr:`costs`. Overwrites the first positions of the lowest slots: only before any is used."""
        rows = min(4, self.slots)
        few, many = 4, min(32, self.context)
        one = _fastest(lambda: self.decode([0], [0], [0]))
        several = _fastest(lambda: self.decode(range(rows), [0] * rows, [0] * rows))
        short = _fastest(lambda: self.prefill(0, [0] * few, 0))
        long = _fastest(lambda: self.prefill(0, [0] * many, 0))
        row = max(several - one, 0.0) / max(rows - 1, 1)
        token = max(long - short, 0.0) / max(many - few, 1)
        self.costs = StepCosts(max(one - row, 0.0), row, max(short - few * token, 0.0), token)
        self._largest_gap = self.costs.bridged_gap(self.slots)


def _fastest(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_WARMUP_ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
