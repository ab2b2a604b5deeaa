"""Child process: a draft model that computes on command. Commands: ``load``, ``compute`` (until the next line), ``rest``."""

import time
from pathlib import Path
from typing import Any

from scripts.profile_lib.commands import serve, told

CONTEXT = 512
PROMPT = 64  # tokens read first
SPAN = 200  # tokens generated before it starts over behind the prompt
TOKEN = 5


class ComputingDraft:
    """Each public method is one command."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, folder: str, core: int, slots: int) -> dict[str, Any]:
        """Load the model and give ``slots`` sequences the same prompt."""
        from hw.onnx.session import OnnxModel
        from hw.providers import Tuning

        self._model = OnnxModel(Path(folder), slots=slots, context=CONTEXT, tuning=Tuning(1, (core,)))
        self._model.prefill(0, [100 + index for index in range(PROMPT)], 0)
        for slot in range(1, slots):
            self._model.move(0, slot, PROMPT)
        return {}

    def compute(self, rows: int) -> dict[str, Any]:
        """Draft one token for each of ``rows`` sequences, again and again: ``pieces`` are (start, duration) in seconds."""
        pieces: list[tuple[float, float]] = []
        while not told():
            position = PROMPT + len(pieces) % SPAN
            began = time.perf_counter()
            self._model.decode(range(rows), [TOKEN] * rows, [position] * rows)
            pieces.append((began, time.perf_counter() - began))
        return {"pieces": pieces}

    def rest(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(ComputingDraft())
