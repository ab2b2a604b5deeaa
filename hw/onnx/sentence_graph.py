"""The ONNX graph of a BERT sentence encoder: token ids in, unit vectors out, pooling included.

Built node by node from a checkpoint's tensors rather than traced: the result is a hundred nodes, uses ONNX Runtime's fused
operators from the start, and needs no exporter. Architecture: Devlin et al. 2018 (post-norm encoder), mean pooling and
normalisation as in sentence-transformers' ``all-MiniLM-L6-v2``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Weights = Mapping[str, npt.NDArray[np.float32]]

FUSED = "com.microsoft"  # ONNX Runtime's own operators
OPSET = 17


@dataclass(frozen=True)
class SentenceShape:
    """Sizes of an encoder, as its ``config.json`` has them."""

    layers: int
    heads: int
    hidden: int
    max_tokens: int
    epsilon: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "SentenceShape":
        """Raises ValueError for what the graph below is not."""
        if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
            raise ValueError(f"a BERT encoder with gelu is needed, not {config.get('model_type')!r}")
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(f"position embeddings of type {config['position_embedding_type']!r} are not built here")
        return cls(
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            hidden=int(config["hidden_size"]),
            max_tokens=int(config["max_position_embeddings"]),
            epsilon=float(config["layer_norm_eps"]),
        )


class _Graph:
    """Nodes in the order they are added; every name is the name of a value."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def add(self, kind: str, inputs: list[str], name: str, *, domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"{name}.{kind}", domain=domain, **attributes))
        return name


def sentence_graph(weights: Weights, shape: SentenceShape) -> onnx.ModelProto:
    """``input_ids [n, L]`` int64, ``attention_mask [n, L]`` int32 (1: a token, 0: padding) and ``pooled [n, L]`` int32 (1: counts
    in the mean) to ``embedding [n, hidden]`` float32 of length 1. ``L`` is at most ``shape.max_tokens``; at least one token of
    a row must count. With ``pooled`` equal to the mask that is the vector of a text, else that of some of its words in it.

    Raises KeyError for a tensor that ``weights`` lacks.
    """
    graph = _Graph()
    hidden = _embed(graph, weights, shape)
    for layer in range(shape.layers):
        hidden = _attend(graph, weights, shape, layer, hidden)
        hidden = _feed_forward(graph, weights, shape, layer, hidden)
    _pool(graph, hidden)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "sentence encoder",
            [
                helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "L"]),
                helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["n", "L"]),
                helper.make_tensor_value_info("pooled", TensorProto.INT32, ["n", "L"]),
            ],
            [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["n", shape.hidden])],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)],
    )
    model.ir_version = 10  # what the installed ONNX Runtime reads, however new the onnx package
    return model


def _embed(graph: _Graph, weights: Weights, shape: SentenceShape) -> str:
    """Sum of word, position and (always the first) segment vectors, normalised: ``[n, L, hidden]``."""
    words = graph.constant("words", weights["embeddings.word_embeddings.weight"])
    segment = weights["embeddings.token_type_embeddings.weight"][0]
    places = graph.constant("places", weights["embeddings.position_embeddings.weight"] + segment)
    graph.constant("zero", np.zeros(1, np.int64))
    graph.constant("one", np.ones(1, np.int64))
    size = graph.add("Shape", ["input_ids"], "size", start=1, end=2)
    here = graph.add("Slice", [places, "zero", size, "zero"], "here")
    word = graph.add("Gather", [words, "input_ids"], "word")
    total = graph.add("Add", [word, here], "embedded")
    return _norm(graph, weights, "embeddings.LayerNorm", total, "layer0", shape)


def _norm(graph: _Graph, weights: Weights, where: str, value: str, name: str, shape: SentenceShape) -> str:
    scale = graph.constant(f"{name}.scale", weights[f"{where}.weight"])
    shift = graph.constant(f"{name}.shift", weights[f"{where}.bias"])
    return graph.add("LayerNormalization", [value, scale, shift], name, axis=-1, epsilon=shape.epsilon)


def _skip_norm(
    graph: _Graph, weights: Weights, where: str, value: str, skip: str, name: str, shape: SentenceShape
) -> str:
    """``norm(value + bias + skip)``; ``where`` holds ``dense.bias`` and ``LayerNorm``."""
    scale = graph.constant(f"{name}.scale", weights[f"{where}.LayerNorm.weight"])
    shift = graph.constant(f"{name}.shift", weights[f"{where}.LayerNorm.bias"])
    bias = graph.constant(f"{name}.bias", weights[f"{where}.dense.bias"])
    inputs = [value, skip, scale, shift, bias]
    return graph.add("SkipLayerNormalization", inputs, name, domain=FUSED, epsilon=shape.epsilon)


def _attend(graph: _Graph, weights: Weights, shape: SentenceShape, layer: int, hidden: str) -> str:
    at, name = f"encoder.layer.{layer}.attention", f"attend{layer}"
    parts = [f"{at}.self.{part}" for part in ("query", "key", "value")]
    joined = np.concatenate([weights[f"{part}.weight"].T for part in parts], axis=1)
    bias = graph.constant(f"{name}.bias", np.concatenate([weights[f"{part}.bias"] for part in parts]))
    projected = graph.add("MatMul", [hidden, graph.constant(f"{name}.qkv", joined)], f"{name}.projected")
    thirds = [f"{name}.{part}" for part in "qkv"]
    graph.nodes.append(helper.make_node("Split", [projected], [f"{third}.part" for third in thirds], axis=-1))
    attended = graph.add(
        "MultiHeadAttention",
        [*(f"{third}.part" for third in thirds), bias, "attention_mask"],
        f"{name}.heads",
        domain=FUSED,
        num_heads=shape.heads,
    )
    dense = graph.constant(f"{name}.dense", weights[f"{at}.output.dense.weight"].T)
    mixed = graph.add("MatMul", [attended, dense], f"{name}.mixed")
    return _skip_norm(graph, weights, f"{at}.output", mixed, hidden, f"{name}.normed", shape)


def _feed_forward(graph: _Graph, weights: Weights, shape: SentenceShape, layer: int, hidden: str) -> str:
    at, name = f"encoder.layer.{layer}", f"forward{layer}"
    wide = graph.constant(f"{name}.wide", weights[f"{at}.intermediate.dense.weight"].T)
    bias = graph.constant(f"{name}.bias", weights[f"{at}.intermediate.dense.bias"])
    widened = graph.add("MatMul", [hidden, wide], f"{name}.widened")
    active = graph.add("BiasGelu", [widened, bias], f"{name}.active", domain=FUSED)
    narrow = graph.constant(f"{name}.narrow", weights[f"{at}.output.dense.weight"].T)
    narrowed = graph.add("MatMul", [active, narrow], f"{name}.narrowed")
    return _skip_norm(graph, weights, f"{at}.output", narrowed, hidden, f"{name}.normed", shape)


def _pool(graph: _Graph, hidden: str) -> None:
    """Mean over tokens that count, then length 1."""
    mask = graph.add("Cast", ["pooled"], "mask", to=TensorProto.FLOAT)
    column = graph.add("Unsqueeze", [mask, graph.constant("last", np.array([2], np.int64))], "mask column")
    masked = graph.add("Mul", [hidden, column], "masked")
    total = graph.add("ReduceSum", [masked, "one"], "total", keepdims=0)
    count = graph.add("ReduceSum", [mask, "one"], "count", keepdims=1)
    mean = graph.add("Div", [total, count], "mean")
    graph.add("LpNormalization", [mean], "embedding", axis=-1, p=2)
