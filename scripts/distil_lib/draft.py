"""The conditioned draft: a decoder layer or two over a token and the target's last hidden state before it.

At position t it takes token t and the *feature* of position t - 1 and guesses token t + 1. A feature is the target's last
hidden state where the target has been, else the draft's own output there, else zeros. Its output is a feature too: what the
target's head, cut to the tokens that matter, turns into logits. Follows EAGLE (Li et al. 2024) in what it takes in and
HASS (Zhang et al. 2024) in being trained on its own outputs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from hw.onnx.conditioned_weights import ConditionedShape
from scripts.distil_lib.target import Target

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids [B, S], features [B, S, hidden], bool [B, S]: no padding
KV = tuple[torch.Tensor, torch.Tensor]  # keys and values, [B, kv_heads, S, head_dim]


class Norm(nn.Module):
    """Root mean square normalisation, computed in float32; of zeros it is zeros."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> KV:
    """Cosines and sines of positions ``[S]``: two ``[S, head_dim]``, halves alike (as llama has them)."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] / theta ** (steps / head_dim)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, turn: KV) -> torch.Tensor:
    """``x`` ``[B, heads, S, head_dim]`` turned by its positions."""
    half = x.shape[-1] // 2
    other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * turn[0].to(x.dtype) + other * turn[1].to(x.dtype)


class Layer(nn.Module):
    """One llama decoder layer without biases."""

    def __init__(self, shape: ConditionedShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.input_norm, self.post_norm = (Norm(shape.hidden, shape.epsilon) for _ in range(2))
        self.query = nn.Linear(shape.hidden, width, bias=False)
        self.key = nn.Linear(shape.hidden, kv_width, bias=False)
        self.value = nn.Linear(shape.hidden, kv_width, bias=False)
        self.out = nn.Linear(width, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: KV, past: list[KV]) -> tuple[torch.Tensor, KV]:
        """``x`` ``[B, S, hidden]`` at positions 0…S-1, as step ``len(past)`` of an unrolled pass; ``past``: of the steps before.

        In step s, position t stands in a chain that left the target's features at t - s: it sees what step 0 has of positions
        up to t - s, and of each later position what the step that reached it has. Returns the output and this step's KV.
        """
        mixed, kv = self.attend(x, turn, past)
        x = x + self.out(mixed)
        return x + self.down(self.activate(x)), kv

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """What the MLP takes together, ``[B, S, intermediate]``."""
        normed = self.post_norm(x)
        return F.silu(self.gate(normed)) * self.up(normed)

    def attend(self, x: torch.Tensor, turn: KV, past: list[KV]) -> tuple[torch.Tensor, KV]:
        """What the heads read, ``[B, S, heads * head_dim]``, and this step's KV."""
        batch, length, _ = x.shape
        normed = self.input_norm(x)
        query, key, value = (
            part(normed).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = rotate(query, turn), rotate(key, turn)
        steps = [*past, (key, value)]
        if not past:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            mixed = self._unrolled(query, steps)
        return mixed.transpose(1, 2).reshape(batch, length, -1), (key, value)

    def _unrolled(self, query: torch.Tensor, steps: list[KV]) -> torch.Tensor:
        step, group = len(steps) - 1, self.shape.heads // self.shape.kv_heads
        length = query.shape[2]
        scale = 1 / math.sqrt(self.shape.head_dim)
        first_key, first_value = (part.repeat_interleave(group, 1) for part in steps[0])
        places = torch.arange(length, device=query.device)
        hidden = places[None, :] > places[:, None] - step
        scores = [(query @ first_key.transpose(2, 3)).masked_fill(hidden, -math.inf) * scale]
        values = []
        for number, (key, value) in enumerate(steps[1:], start=1):
            # Step `number` reached position t - (step - number); what wraps around belongs to chains that begin before 0.
            key, value = (part.roll(step - number, 2).repeat_interleave(group, 1) for part in (key, value))
            scores.append((query * key).sum(-1, keepdim=True) * scale)
            values.append(value)
        shares = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)
        mixed = shares[..., :length] @ first_value
        for number, value in enumerate(values):
            mixed = mixed + shares[..., length + number, None] * value
        return mixed


class Draft(nn.Module, ABC):
    """What training and measuring need of a draft: output features, and a head that makes logits of them.

    ``head`` ``[head_size, hidden]`` is the target's, cut to the tokens ``head_ids`` int64 ``[head_size]``, ascending; it is not
    trained.
    """

    head: torch.Tensor
    head_ids: torch.Tensor

    @abstractmethod
    def unroll(self, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Output features ``[B, S, hidden]`` of each step of a multi-step pass over ``ids`` int64 ``[B, S]``; ``features`` are the
        target's of these positions. Step s has at t what a chain that left the target's features at t - s gives there."""

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Over the cut head: ``[..., head_size]``."""
        return F.linear(outputs, self.head.to(outputs.dtype))


class ConditionedDraft(Draft):
    """The draft that takes features. ``embedding`` is the target's; like the head it is no parameter and not saved."""

    embedding: torch.Tensor

    def __init__(
        self, shape: ConditionedShape, embedding: torch.Tensor, head: torch.Tensor, head_ids: torch.Tensor
    ) -> None:
        """``embedding`` ``[vocabulary, hidden]``, ``head`` ``[vocabulary, hidden]``, ``head_ids`` int64 ``[head_size]`` ascending."""
        super().__init__()
        self.shape = shape
        self.embedding_norm, self.feature_norm, self.norm = (Norm(shape.hidden, shape.epsilon) for _ in range(3))
        self.fuse = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.register_buffer("head_ids", head_ids, persistent=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("head", head.detach()[head_ids].contiguous(), persistent=False)

    @classmethod
    def begin(cls, target: Target, layers: int, head_ids: torch.Tensor, sample: Sequence[Sample]) -> Self:
        """Before training: the best linear guess of the target's feature from the token and the feature before, by least squares
        over ``sample``; on top of it the target's last layers, whose contributions begin at zero.

        What the norm of the features takes in is what the target had before its own: a feature divided by that norm's weights.
        """
        shape = ConditionedShape(**asdict(target.shape) | {"layers": layers, "head_size": len(head_ids)})
        draft = cls(shape, target.embedding, target.head, head_ids.to(target.device)).to(target.device)
        norm = target.final_norm.detach().float()
        inverse = (1 / norm).nan_to_num(0.0, 0.0, 0.0)
        state = {
            "norm.weight": norm,
            "embedding_norm.weight": torch.ones_like(norm),
            "feature_norm.weight": (inverse / inverse.abs().median()).clamp(-4, 4),
            "fuse.weight": torch.zeros(shape.hidden, 2 * shape.hidden),
        }
        for index in range(layers):
            for name, weight in target.layer(target.shape.layers - layers + index).items():
                value = weight.detach().float()
                state[f"layers.{index}.{name}"] = value * 0 if name in ("out.weight", "down.weight") else value
        draft.load_state_dict(state)
        draft._fit(sample, inverse)
        return draft

    @torch.no_grad()
    def _fit(self, sample: Sequence[Sample], inverse: torch.Tensor) -> None:
        """Set, one after the other, what fuses, what attention adds and what the MLP adds, each to come closest to what is left
        of the target's normalised stream.

        A guess is shorter than what it guesses, the more so the worse it is, but the final norm would stretch it as long:
        its weights shrink to what is right on average. Else the first logits are far too sure of themselves.
        """
        kept = [(features.float(), real) for _, features, real in sample]
        wanted = [features * inverse for features, _ in kept]
        places = [real.clone() for _, real in kept]
        for real in places:
            real[:, 0] = False  # the first has no feature before it
        given = [self.inputs(ids, before(features)) for (ids, _, _), (features, _) in zip(sample, kept, strict=True)]
        self.fuse.weight.data = _best(given, wanted, places)
        streams = [self.fuse(each) for each in given]
        turns = [
            rotary(torch.arange(ids.shape[1], device=ids.device), self.shape.head_dim, self.shape.theta)
            for ids, _, _ in sample
        ]
        for layer in self.layers:
            assert isinstance(layer, Layer)
            given = [layer.attend(stream, turn, [])[0] for stream, turn in zip(streams, turns, strict=True)]
            left = [goal - stream for goal, stream in zip(wanted, streams, strict=True)]
            layer.out.weight.data = _best(given, left, places)
            streams = [stream + layer.out(each) for stream, each in zip(streams, given, strict=True)]
            given = [layer.activate(stream) for stream in streams]
            left = [goal - stream for goal, stream in zip(wanted, streams, strict=True)]
            layer.down.weight.data = _best(given, left, places)
            streams = [stream + layer.down(each) for stream, each in zip(streams, given, strict=True)]
        square = sum(float(stream[real].square().sum()) for stream, real in zip(streams, places, strict=True))
        length = math.sqrt(square / (sum(int(real.sum()) for real in places) * self.shape.hidden))
        self.norm.weight.mul_(min(max(length, 0.05), 1.0))

    def inputs(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What is fused: the token and the feature before it, both normalised, ``[B, S, 2 * hidden]``."""
        token = self.embedding_norm(F.embedding(ids, self.embedding).to(features.dtype))
        return torch.cat([token, self.feature_norm(features)], -1)

    def step(self, ids: torch.Tensor, features: torch.Tensor, past: list[list[KV]]) -> torch.Tensor:
        """One step of an unrolled pass over ``ids`` ``[B, S]``; ``features`` ``[B, S, hidden]`` is of the position before each.

        ``past``: by layer, the KV of the steps before; this step's is appended. Returns output features ``[B, S, hidden]``.
        """
        turn = rotary(torch.arange(ids.shape[1], device=ids.device), self.shape.head_dim, self.shape.theta)
        x = self.fuse(self.inputs(ids, features))
        for layer, kept in zip(self.layers, past, strict=True):
            x, kv = layer(x, turn, kept)
            kept.append(kv)
        return self.norm(x)

    def unroll(self, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The first step takes the target's ``features``, each other one the outputs of the step before. In step s, positions
        below s mean nothing."""
        past: list[list[KV]] = [[] for _ in self.layers]
        outputs: list[torch.Tensor] = []
        known = features
        for _ in range(steps):
            outputs.append(self.step(ids, before(known), past))
            known = outputs[-1]
        return outputs


def _best(
    given: list[torch.Tensor], wanted: list[torch.Tensor], places: list[torch.Tensor], ridge: float = 2e-3
) -> torch.Tensor:
    """Weights ``[outputs, inputs]`` with the least squares over ``places``; ``ridge`` as a share of the inputs' mean square."""
    inputs, outputs = given[0].shape[-1], wanted[0].shape[-1]
    square = torch.zeros(inputs, inputs, dtype=torch.float64)
    cross = torch.zeros(inputs, outputs, dtype=torch.float64)
    for one, goal, real in zip(given, wanted, places, strict=True):
        rows = one[real].float()
        square += (rows.T @ rows).double().cpu()
        cross += (rows.T @ goal[real]).double().cpu()
    square += ridge * square.diagonal().mean() * torch.eye(inputs, dtype=torch.float64)
    found = torch.linalg.solve(square, cross).T
    return found.float().to(given[0].device)


def before(features: torch.Tensor) -> torch.Tensor:
    """Features of the position before each: ``[B, S, hidden]``, zeros at the first."""
    return F.pad(features[:, :-1], (0, 0, 1, 0))
