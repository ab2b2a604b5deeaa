"""Child process: the target's last hidden states of given texts, from its checkpoint by transformers.

A draft that takes them gets those of vLLM in service, which are the same but for rounding. Commands: ``load``, ``hidden``.
"""

from typing import Any

import numpy as np

from scripts.profile_lib.commands import serve


class FeaturesChild:
    """Each public method is one command."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, folder: str, dtype: str) -> dict[str, Any]:
        """The decoder without its head."""
        import torch
        from transformers import AutoModel

        self._model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        return {"hidden_size": int(self._model.config.hidden_size)}

    def hidden(self, tokens: list[int], file: str) -> dict[str, Any]:
        """Write ``[positions, hidden_size]`` float16, after the final norm: what the head multiplies."""
        import torch

        with torch.inference_mode():
            rows = self._model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        np.save(file, rows.to(torch.float16).numpy())
        return {}


if __name__ == "__main__":
    serve(FeaturesChild())
