"""The cut model: the first layers of the target and its last one, trained to say what the target says.

It is an ordinary draft: it sees tokens only, keeps the whole vocabulary and runs wherever drafts of the same weights do.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scripts.distil_lib.draft import Draft
from scripts.distil_lib.target import Target

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class CutDraft(Draft):
    """``layers`` decoder layers of a target, in float32; embedding, head and final norm come with them."""

    def __init__(self, target: Target, layers: int, head_ids: torch.Tensor) -> None:
        """``head_ids``: tokens whose logits are compared in training; the model itself keeps them all.

        Raises ValueError unless the target has more layers.
        """
        super().__init__()
        if not 2 <= layers < target.shape.layers:
            raise ValueError(f"a cut model has 2 to {target.shape.layers - 1} layers of this target, not {layers}")
        whole = target.model.model
        kept = [*range(layers - 1), target.shape.layers - 1]
        self.layers = nn.ModuleList(copy.deepcopy(whole.layers[index]).float() for index in kept)
        for place, layer in enumerate(self.layers):
            layer.self_attn.layer_idx = place
        self.norm = copy.deepcopy(whole.norm).float()
        self.requires_grad_(True)
        self.kept = kept
        self._frame = (whole.embed_tokens, copy.deepcopy(whole.rotary_emb))  # a tuple: no parameters of ours
        self.register_buffer("head_ids", head_ids.to(target.device), persistent=False)
        self.register_buffer("head", target.head.detach()[self.head_ids].contiguous(), persistent=False)

    def unroll(self, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """All steps are alike: it takes no features, so nothing is lost where the target's end."""
        embed, rotary = self._frame
        x = embed(ids).float()
        places = torch.arange(ids.shape[1], device=ids.device)
        turn = rotary(x, places[None])
        mask = torch.full((1, 1, len(places), len(places)), float("-inf"), device=ids.device).triu(1)
        for layer in self.layers:
            out: Any = layer(x, attention_mask=mask.to(x.dtype), position_embeddings=turn, position_ids=places[None])
            x = out[0] if isinstance(out, tuple) else out
        return [self.norm(x)] * steps


def save_cut(draft: CutDraft, target: Target, folder: Path) -> None:
    """Write it as a Hugging Face checkpoint: what builds ordinary drafts takes it from there."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = target.model.dtype
    whole = target.model.state_dict()
    state = {name: value for name, value in whole.items() if not name.startswith(("model.layers.", "model.norm."))}
    state |= {f"model.{name}": value for name, value in draft.state_dict().items()}
    if target.model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    tensors = {name: value.detach().to(dtype).cpu().contiguous().clone() for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target.folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = len(draft.layers)
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = [config["layer_types"][index] for index in draft.kept]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER:
        if (target.folder / name).is_file():
            shutil.copy(target.folder / name, folder / name)
