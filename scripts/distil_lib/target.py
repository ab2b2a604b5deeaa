"""The target as a teacher: its sizes, its last hidden states, and what of it a draft starts from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from hw.onnx.cache import source_fingerprints
from hw.onnx.checkpoint import CheckpointError, read_json

# One decoder stack, features before the head are what the head multiplies, no scaling of either.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a llama-like target; a draft has the same except for its layers and its head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    epsilon: float
    theta: float
    context: int
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From ``config.json``. Raises CheckpointError, in a sentence, for a target of another kind."""
        config = read_json(folder / "config.json")
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise CheckpointError(
                f"{folder} is a {kind} model: drafts are trained for llama-like targets only ({', '.join(FAMILIES)})"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{folder}: a draft computes with silu, this target with {config['hidden_act']}")
        try:
            heads = int(config["num_attention_heads"])
            rope = config.get("rope_parameters") or {}
            return cls(
                hidden=int(config["hidden_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                intermediate=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                epsilon=float(config.get("rms_norm_eps", 1e-6)),
                theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                context=int(config["max_position_embeddings"]),
                vocabulary=int(config["vocab_size"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}/config.json does not describe a llama-like model: {error!r}") from error


class Target:
    """A loaded target that only computes."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> None:
        """Raises CheckpointError for a folder that holds no llama-like checkpoint."""
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.shape = TargetShape.read(folder)
        self.weights = fingerprint(folder)
        self.device = torch.device(device)
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        self.model: Any = model.to(self.device).eval().requires_grad_(False)

    @property
    def embedding(self) -> torch.Tensor:
        """``[vocabulary, hidden]``."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight[: self.shape.vocabulary]

    @property
    def head(self) -> torch.Tensor:
        """``[vocabulary, hidden]``: logits are a last hidden state times this, transposed."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight[: self.shape.vocabulary]

    @property
    def final_norm(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.model.norm.weight
        return weight

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Weights of one decoder layer under a draft's names; its biases and norms of queries and keys are left out."""
        layer = self.model.model.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        return {
            "input_norm.weight": layer.input_layernorm.weight,
            "post_norm.weight": layer.post_attention_layernorm.weight,
            "query.weight": attention.q_proj.weight,
            "key.weight": attention.k_proj.weight,
            "value.weight": attention.v_proj.weight,
            "out.weight": attention.o_proj.weight,
            "gate.weight": mlp.gate_proj.weight,
            "up.weight": mlp.up_proj.weight,
            "down.weight": mlp.down_proj.weight,
        }

    @torch.inference_mode()
    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states, after the final norm, of ``ids`` int64 ``[B, S]`` (padded at the end): ``[B, S, hidden]``."""
        found: torch.Tensor = self.model.model(ids.to(self.device), use_cache=False).last_hidden_state
        return found


def fingerprint(folder: Path) -> str:
    """Of a checkpoint's weights, kept beside it as preparing models does where that can be written."""
    out = folder.resolve().parent
    try:
        return source_fingerprints(folder, out)["weights"]
    except PermissionError:
        from hw.onnx.checkpoint import weights_fingerprint

        return weights_fingerprint(folder)
