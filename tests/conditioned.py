"""A conditioned draft of random weights as an ONNX folder, and the same function in numpy, step by step."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from hw.onnx.checkpoint import CONDITIONED, HEAD_IDS, Manifest

Array = npt.NDArray[np.float32]
EPSILON = 1e-5
THETA = 10000.0
TARGET = "a" * 64  # fingerprint of the target it is taken to be trained on


@dataclass(frozen=True)
class Sizes:
    """Of a random draft. ``layers`` may be more than one, so that errors in KV would spread."""

    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16  # the rotary embedding wants a multiple of 16
    inner: int = 24
    layers: int = 1
    vocab: int = 96
    head: int = 40
    context: int = 64


class Random:
    """The weights, and what they compute: :meth:`forward` over a whole sequence in float32."""

    def __init__(
        self, sizes: Sizes = Sizes(), seed: int = 0, head_ids: Sequence[int] | None = None, embed: Array | None = None
    ) -> None:
        self.sizes = s = sizes
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> Array:
            return (rng.normal(size=(rows, columns)) / np.sqrt(rows)).astype(np.float32)

        def scale() -> Array:
            return rng.uniform(0.5, 1.5, s.hidden).astype(np.float32)

        ids = np.sort(rng.choice(s.vocab, s.head, replace=False)) if head_ids is None else np.sort(np.array(head_ids))
        self.head_ids = ids.astype(np.int32)
        self.embed = matrix(s.vocab, s.hidden) * np.float32(np.sqrt(s.vocab)) if embed is None else embed
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.w: dict[str, Array] = {"ne": scale(), "nf": scale(), "fc": matrix(2 * s.hidden, s.hidden)}
        for layer in range(s.layers):
            self.w |= {
                f"n1.{layer}": scale(),
                f"n2.{layer}": scale(),
                f"qkv.{layer}": matrix(s.hidden, width),
                f"o.{layer}": matrix(s.heads * s.head_dim, s.hidden),
                f"gate.{layer}": matrix(s.hidden, s.inner),
                f"up.{layer}": matrix(s.hidden, s.inner),
                f"down.{layer}": matrix(s.inner, s.hidden),
            }
        self.w |= {"norm": scale(), "head": matrix(s.hidden, len(self.head_ids)) * np.float32(4.0)}
        angles = np.arange(s.context)[:, None] / THETA ** (np.arange(0, s.head_dim, 2) / s.head_dim)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def forward(self, tokens: Sequence[int], features: Array) -> tuple[Array, Array]:
        """``tokens [S]`` from position 0 on and the feature before each, ``[S, H]``: logits ``[head]`` of the last, own features ``[S, H]``."""
        s, w = self.sizes, self.w
        x = np.concatenate([_norm(self.embed[list(tokens)], w["ne"]), _norm(features, w["nf"])], -1) @ w["fc"]
        for layer in range(s.layers):
            x = x + self._attention(_norm(x, w[f"n1.{layer}"]) @ w[f"qkv.{layer}"]) @ w[f"o.{layer}"]
            y = _norm(x, w[f"n2.{layer}"])
            gate = y @ w[f"gate.{layer}"]
            x = x + (gate / (1.0 + np.exp(-gate)) * (y @ w[f"up.{layer}"])) @ w[f"down.{layer}"]
        return _norm(x[-1], w["norm"]) @ w["head"], x

    def _attention(self, qkv: Array) -> Array:
        s, count = self.sizes, len(qkv)
        q, k, v = np.split(qkv, [s.heads * s.head_dim, (s.heads + s.kv_heads) * s.head_dim], axis=-1)
        q = self._rotated(q.reshape(count, s.heads, s.head_dim))
        k = self._rotated(k.reshape(count, s.kv_heads, s.head_dim)).repeat(s.heads // s.kv_heads, 1)
        v = v.reshape(count, s.kv_heads, s.head_dim).repeat(s.heads // s.kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(s.head_dim)
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return mixed.reshape(count, -1).astype(np.float32)

    def _rotated(self, x: Array) -> Array:
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    # --- as an ONNX folder ----------------------------------------------------------------------------------------

    def write(
        self, folder: Path, *, target_weights: str = TARGET, tokenizer: str = "", source: Path | None = None
    ) -> Path:
        """Write the folder of a draft; ``source``: a model folder whose tokenizer files are copied."""
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(self._model(), str(folder / "model.onnx"))
        np.save(folder / HEAD_IDS, self.head_ids)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if source is not None:
                shutil.copy(source / name, folder / name)
        s = self.sizes
        Manifest(
            kind=CONDITIONED,
            key="0" * 64,
            weights=target_weights,
            tokenizer=tokenizer,
            architecture="Random",
            layers=s.layers,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            vocab_size=s.vocab,
            max_context=s.context,
            rope_theta=THETA,
            created_by={},
            rope_scaling="",
            kv_dtype="float32",
            last_logits_only=True,
            hidden_size=s.hidden,
            head_size=len(self.head_ids),
            target_weights=target_weights,
            trained={"recipe": "none: random weights"},
        ).write(folder)
        return folder

    def _model(self) -> onnx.ModelProto:
        s = self.sizes
        graph = _Graph(self.w | {"embed": self.embed, "cos_cache": self.cos, "sin_cache": self.sin})
        one, last = graph.constant("one", np.array([1], np.int64)), graph.constant("last", np.array(-1, np.int64))
        position = graph.constant("position", np.array(1, np.int64))
        past = graph.add("Cast", graph.add("Sub", graph.add("ReduceSum", "attention_mask", one, keepdims=0), one), to=6)
        whole = graph.add("Cast", graph.add("Gather", graph.add("Shape", "attention_mask"), position, axis=0), to=6)
        norm = {"epsilon": EPSILON, "axis": -1, "stash_type": 1}
        token = graph.add("SimplifiedLayerNormalization", graph.add("Gather", "embed", "input_ids"), "ne", **norm)
        feature = graph.add("SimplifiedLayerNormalization", "features", "nf", **norm)
        x = graph.add("MatMul", graph.add("Concat", token, feature, axis=-1), "fc")
        for layer in range(s.layers):
            y = graph.add("SimplifiedLayerNormalization", x, f"n1.{layer}", **norm)
            past_kv = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
            attention = graph.node(
                "GroupQueryAttention",
                [graph.add("MatMul", y, f"qkv.{layer}"), "", "", *past_kv, past, whole, "cos_cache", "sin_cache"],
                [f"attention.{layer}", f"present.{layer}.key", f"present.{layer}.value"],
                domain="com.microsoft",
                num_heads=s.heads,
                kv_num_heads=s.kv_heads,
                scale=float(1.0 / np.sqrt(s.head_dim)),
                do_rotary=1,
                rotary_interleaved=0,
            )
            x = graph.add("Add", x, graph.add("MatMul", attention, f"o.{layer}"))
            y = graph.add("SimplifiedLayerNormalization", x, f"n2.{layer}", **norm)
            gate = graph.add("MatMul", y, f"gate.{layer}")
            act = graph.add("Mul", gate, graph.add("Sigmoid", gate))
            inner = graph.add("Mul", act, graph.add("MatMul", y, f"up.{layer}"))
            x = graph.add("Add", x, graph.add("MatMul", inner, f"down.{layer}"))
        graph.node("Identity", [x], ["features_out"])
        y = graph.add("SimplifiedLayerNormalization", x, "norm", **norm)
        graph.node("MatMul", [graph.add("Unsqueeze", graph.add("Gather", y, last, axis=1), one), "head"], ["logits"])
        kv = ["batch", s.kv_heads, None, s.head_dim]
        names = [f"{layer}.{part}" for layer in range(s.layers) for part in ("key", "value")]
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "sequence", s.hidden]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
            *(
                helper.make_tensor_value_info(f"past_key_values.{n}", TensorProto.FLOAT, [*kv[:2], "past", kv[3]])
                for n in names
            ),
        ]
        outputs = [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1, len(self.head_ids)]),
            helper.make_tensor_value_info("features_out", TensorProto.FLOAT, ["batch", "sequence", s.hidden]),
            *(
                helper.make_tensor_value_info(f"present.{n}", TensorProto.FLOAT, [*kv[:2], "total", kv[3]])
                for n in names
            ),
        ]
        made = helper.make_graph(graph.nodes, "draft", inputs, outputs, graph.tensors)
        opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(made, opset_imports=opsets, ir_version=10)


class _Graph:
    def __init__(self, weights: dict[str, Array]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors = [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in weights.items()]

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        self.tensors.append(numpy_helper.from_array(value, name))
        return name

    def node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.node(kind, list(inputs), [f"{kind}.{len(self.nodes)}"], **attributes)


def _norm(x: Array, scale: Array) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPSILON)) * scale
    return normed


def facts(folder: Path) -> dict[str, Any]:
    """``chain.json`` as it is written."""
    value: dict[str, Any] = json.loads((folder / "chain.json").read_text())
    return value
