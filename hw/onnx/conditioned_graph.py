"""The ONNX graph of a conditioned draft, node by node, with the fused operators that the other drafts' graphs have.

The token's half of what is fused depends on nothing but the token, so it is a table over the vocabulary, made here; a step
reads one row of it.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from hw.onnx.blockwise import quantise
from hw.onnx.conditioned_weights import Trained

FUSED = "com.microsoft"  # ONNX Runtime's own operators
OPSET, IR_VERSION = 22, 10  # as the other drafts' graphs
EXACT = 32  # bits: not quantised

Matrix = npt.NDArray[np.float32]


def conditioned_graph(
    trained: Trained, embedding: Matrix, head: Matrix, *, bits: int, head_bits: int, block: int
) -> onnx.ModelProto:
    """The model of ``trained`` with the target's ``embedding`` and ``head`` ``[vocabulary, hidden]``.

    Inputs: ``input_ids`` int64 ``[B, S]``, ``features`` float32 ``[B, S, hidden]`` (of the position before each token),
    ``attention_mask`` int64 ``[B, total]``, ``past_key_values.{l}.{key,value}`` float32 ``[B, kv_heads, past, head_dim]``.
    Outputs: ``logits`` float32 ``[B, 1, head_size]`` of the last position, ``features_out`` float32 ``[B, S, hidden]`` (after
    the draft's final norm: where the target's own last hidden states are), ``present.{l}.{key,value}``.

    ``bits``, ``head_bits`` 4, 8 or 32 (not quantised). Raises ValueError for sizes that blocks do not fill.
    """
    return _Graph(trained, bits, head_bits, block).build(embedding, head)


class _Graph:
    def __init__(self, trained: Trained, bits: int, head_bits: int, block: int) -> None:
        self._trained, self._shape = trained, trained.shape
        self._bits, self._head_bits, self._block = bits, head_bits, block
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def build(self, embedding: Matrix, head: Matrix) -> onnx.ModelProto:
        shape, tensors = self._shape, self._trained.tensors
        self._constant("one", np.array([1], np.int64))
        counted = self._add("ReduceSum", ["attention_mask", "one"], "counted", keepdims=0)
        last = self._add("Sub", [counted, "one"], "last")
        seen = self._add("Cast", [last], "seen", to=TensorProto.INT32)
        size = self._add("Shape", ["attention_mask"], "size", start=1, end=2)
        flat = self._add("Squeeze", [size], "flat")
        total = self._add("Cast", [flat], "total", to=TensorProto.INT32)
        self._rotary()

        token, feature = np.split(tensors["fuse.weight"], 2, axis=1)
        normed = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True) + shape.epsilon)
        table = (normed * tensors["embedding_norm.weight"]) @ token.T
        self._constant("tokens", table.astype(np.float16 if self._bits < EXACT else np.float32))
        row = self._add("Gather", ["tokens", "input_ids"], "row")
        said = self._add("Cast", [row], "said", to=TensorProto.FLOAT)
        known = self._norm("features", tensors["feature_norm.weight"], "known")
        stream = self._add("Add", [said, self._product(known, feature, "fused", self._bits)], "stream")
        normed_stream = self._norm(stream, tensors["layers.0.input_norm.weight"], "layer0.normed")
        for layer in range(shape.layers):
            final = layer == shape.layers - 1
            after = tensors["norm.weight" if final else f"layers.{layer + 1}.input_norm.weight"]
            normed_stream, stream = self._layer(layer, stream, normed_stream, seen, total, after, final)
        self._constant("end", np.array([-1], np.int64))
        ending = self._add("Gather", ["features_out", "end"], "ending", axis=1)
        self._product(ending, head[self._trained.head_ids], "logits", self._head_bits)
        return self._model()

    def _layer(
        self, layer: int, stream: str, normed: str, seen: str, total: str, after: Matrix, final: bool
    ) -> tuple[str, str]:
        """One decoder layer; ``after``: weights of the norm that follows. Returns what that gives, and the stream."""
        shape, tensors, name = self._shape, self._trained.tensors, f"layer{layer}"
        parts = [tensors[f"layers.{layer}.{part}.weight"] for part in ("query", "key", "value")]
        joined = self._product(normed, np.concatenate(parts), f"{name}.joined", self._bits)
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        attended = f"{name}.attended"
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [joined, "", "", *past, seen, total, "cosines", "sines"],
                [attended, f"present.{layer}.key", f"present.{layer}.value"],
                name=f"{name}.GroupQueryAttention",
                domain=FUSED,
                num_heads=shape.heads,
                kv_num_heads=shape.kv_heads,
                scale=1 / math.sqrt(shape.head_dim),
                do_rotary=1,
                rotary_interleaved=0,
            )
        )
        mixed = self._product(attended, tensors[f"layers.{layer}.out.weight"], f"{name}.mixed", self._bits)
        post = tensors[f"layers.{layer}.post_norm.weight"]
        normed, stream = self._skip_norm(stream, mixed, post, f"{name}.post")
        gate = self._product(normed, tensors[f"layers.{layer}.gate.weight"], f"{name}.gate", self._bits)
        up = self._product(normed, tensors[f"layers.{layer}.up.weight"], f"{name}.up", self._bits)
        open_ = self._add("Sigmoid", [gate], f"{name}.open")
        active = self._add("Mul", [gate, open_], f"{name}.active")
        wide = self._add("Mul", [active, up], f"{name}.wide")
        down = self._product(wide, tensors[f"layers.{layer}.down.weight"], f"{name}.down", self._bits)
        return self._skip_norm(stream, down, after, f"{name}.after", "features_out" if final else "")

    # --- nodes ----------------------------------------------------------------------------------------------------

    def _product(self, value: str, weight: Matrix, name: str, bits: int) -> str:
        """``value`` times ``weight`` ``[N, K]``, transposed."""
        if bits == EXACT:
            return self._add("MatMul", [value, self._constant(f"{name}.weight", weight.T)], name)
        blocks = quantise(weight, bits, self._block)
        inputs = [
            value,
            self._constant(f"{name}.weight", blocks.packed),
            self._constant(f"{name}.scales", blocks.scales),
        ]
        if blocks.zeros is not None:
            inputs.append(self._constant(f"{name}.zeros", blocks.zeros))
        rows, columns = weight.shape
        return self._add(
            "MatMulNBits", inputs, name, domain=FUSED, K=columns, N=rows, bits=bits, block_size=self._block, accuracy_level=4
        )  # fmt: skip

    def _norm(self, value: str, weight: Matrix, name: str) -> str:
        scale = self._constant(f"{name}.scale", weight)
        return self._add(
            "SimplifiedLayerNormalization", [value, scale], name, axis=-1, epsilon=self._shape.epsilon, stash_type=1
        )

    def _skip_norm(self, stream: str, more: str, weight: Matrix, name: str, out: str = "") -> tuple[str, str]:
        """The norm of ``stream + more``, and that sum."""
        scale = self._constant(f"{name}.scale", weight)
        normed, total = out or f"{name}.normed", f"{name}.stream"
        self._nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization", [stream, more, scale], [normed, "", "", total],
                name=f"{name}.SkipSimplifiedLayerNormalization", domain=FUSED, epsilon=self._shape.epsilon,
            )
        )  # fmt: skip
        return normed, total

    def _rotary(self) -> None:
        shape = self._shape
        steps = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
        angles = np.arange(shape.context)[:, None] / shape.theta**steps
        self._constant("cosines", np.cos(angles).astype(np.float32))
        self._constant("sines", np.sin(angles).astype(np.float32))

    def _constant(self, name: str, value: npt.NDArray[Any]) -> str:
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def _add(self, kind: str, inputs: list[str], name: str, *, domain: str = "", **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [name], name=f"{name}.{kind}", domain=domain, **attributes))
        return name

    def _model(self) -> onnx.ModelProto:
        shape = self._shape
        value = helper.make_tensor_value_info
        inputs = [
            value("input_ids", TensorProto.INT64, ["batch", "tokens"]),
            value("features", TensorProto.FLOAT, ["batch", "tokens", shape.hidden]),
            value("attention_mask", TensorProto.INT64, ["batch", "total"]),
        ]
        outputs = [
            value("logits", TensorProto.FLOAT, ["batch", 1, shape.head_size]),
            value("features_out", TensorProto.FLOAT, ["batch", "tokens", shape.hidden]),
        ]
        for layer in range(shape.layers):
            for part in ("key", "value"):
                kv = ["batch", shape.kv_heads, "past", shape.head_dim]
                inputs.append(value(f"past_key_values.{layer}.{part}", TensorProto.FLOAT, kv))
                kv = ["batch", shape.kv_heads, "total", shape.head_dim]
                outputs.append(value(f"present.{layer}.{part}", TensorProto.FLOAT, kv))
        model = helper.make_model(
            helper.make_graph(self._nodes, "conditioned draft", inputs, outputs, self._constants),
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)],
        )
        model.ir_version = IR_VERSION
        return model
