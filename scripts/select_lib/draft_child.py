"""Child process: one candidate. It follows the target's answers, times its calls, and computes beside the target.

Commands: ``load``, ``follow``, ``time_calls``, ``time_reading``, ``compute`` (until the next line), ``rest``.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.chain.protocol import Sampling
from scripts.profile_lib.commands import serve, told
from scripts.select_lib.candidates import LOOKUP
from scripts.select_lib.followers import Follower, follower

TOKEN = 5  # computed where it does not matter which
WARM_UP = 2  # calls before those that count


class DraftChild:
    """Each public method is one command."""

    def __init__(self) -> None:
        self._follower: Follower | None = None
        self._model: Any = None

    def load(
        self, kind: str, folder: str, provider: str, core: int, slots: int, context: int, vocab_size: int
    ) -> dict[str, Any]:
        """``load_s``: seconds; ``memory_mib``: by how much this process grew, buffers for ``slots`` sequences as far as they are
        touched; ``kv_bytes``: of a token's KV."""
        before, began = _resident(), time.perf_counter()
        self._model = None if kind == LOOKUP else _open(kind, Path(folder), provider, core, slots, context)
        loaded = time.perf_counter() - began
        self._follower = follower(kind, self._model, vocab_size)
        geometry = getattr(self._model, "geometry", None)
        per_token = 0
        if geometry is not None:
            per_token = (
                2 * geometry.layers * geometry.kv_heads * geometry.head_dim * np.dtype(geometry.kv_dtype).itemsize
            )
        return {
            "load_s": loaded,
            "memory_mib": (_resident() - before) / 2**20,
            "kv_bytes": per_token,
            "context": getattr(self._model, "context", context),
        }

    def follow(
        self,
        prompt: list[int],
        answer: list[int],
        limit: int,
        seed: int,
        temperature: float,
        kv: str,
        kv_type: str,
        features: str,
    ) -> dict[str, Any]:
        """A :class:`~scripts.select_lib.acceptance.Trail` of this answer. ``kv``: file with the target's KV of the prompt;
        ``features``: file with its last hidden states; both may be empty."""
        assert self._follower is not None
        given = _load_kv(Path(kv), kv_type) if kv else None
        hidden = np.load(features, allow_pickle=False) if features else None
        trail = self._follower.follow(prompt, answer, limit, Sampling(temperature, seed), given, hidden)
        return {
            "limit": trail.limit,
            "offered": trail.offered,
            "right": trail.right,
            "misses": trail.misses,
            "runners": list(trail.runners),
        }

    def time_calls(self, context: int, batch: int, calls: int) -> dict[str, Any]:
        """Milliseconds of ``calls`` calls that compute a token for each of ``batch`` sequences with ``context`` tokens."""
        slots, tokens, lengths = list(range(batch)), [TOKEN] * batch, [context] * batch
        times = []
        for number in range(WARM_UP + calls):
            began = time.perf_counter()
            self._model.decode(slots, tokens, lengths)
            if number >= WARM_UP:
                times.append(1e3 * (time.perf_counter() - began))
        return {"ms": times}

    def time_reading(self, tokens: int, calls: int) -> dict[str, Any]:
        """Milliseconds of ``calls`` calls that read ``tokens`` tokens of one sequence."""
        times = []
        if hasattr(self._model, "open_hidden"):
            self._model.open_hidden(0, tokens)  # as for positions whose hidden states are there: all of it is one call
        for number in range(1 + calls):
            began = time.perf_counter()
            self._model.prefill(0, [TOKEN + number] * tokens, 0)
            if number:
                times.append(1e3 * (time.perf_counter() - began))
        return {"ms": times}

    def compute(self, batch: int, context: int) -> dict[str, Any]:
        """Draft for ``batch`` sequences again and again: ``pieces`` are (start, duration) in seconds of ``time.perf_counter``."""
        slots, tokens, lengths = list(range(batch)), [TOKEN] * batch, [context] * batch
        pieces: list[tuple[float, float]] = []
        while not told():
            began = time.perf_counter()
            self._model.decode(slots, tokens, lengths)
            pieces.append((began, time.perf_counter() - began))
        return {"pieces": pieces}

    def rest(self) -> dict[str, Any]:
        return {}


def _open(kind: str, folder: Path, provider: str, core: int, slots: int, context: int) -> Any:
    from hw.onnx.session import OnnxModel
    from hw.providers import Tuning
    from scripts.select_lib.candidates import MODEL

    tuning = Tuning(1, (core,))
    if kind == MODEL:
        return OnnxModel(folder, slots=slots, context=context, provider=provider, tuning=tuning)
    from hw.onnx.conditioned import ConditionedModel

    return ConditionedModel(folder, slots=slots, context=context, provider=provider, tuning=tuning)


def _load_kv(file: Path, kv_type: str) -> npt.NDArray[Any]:
    import ml_dtypes

    stored: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    return stored.view(ml_dtypes.bfloat16) if kv_type == "bfloat16" else stored


def _resident() -> int:
    """Bytes of memory this process has in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    serve(DraftChild())
