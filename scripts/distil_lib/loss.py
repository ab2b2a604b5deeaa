"""What a draft is trained on: to say what the target says (KL over the cut head) and to be where it is (its features).

Logits over some ten thousand tokens for every position would be most of the memory and much of the time of a step, so they
are made a few rows at a time, their gradient at once, and only that of the features is kept: the head itself stays the target's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

ROWS = 128  # of logits in memory at a time: 8 MB in float32 over 16 k tokens


@dataclass(frozen=True)
class Weights:
    """``step``: a later step counts this much of the one before; ``feature``: of the distance of features beside KL;
    ``share``: of the positions whose logits are compared (drawn anew each batch; features of all are)."""

    step: float = 0.8
    feature: float = 0.5
    share: float = 0.5
    sharpen: float = 1.0


class _Agreement(torch.autograd.Function):
    """KL of the target's distribution and each step's, summed over rows and steps with weights."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        weights: torch.Tensor,
        features: torch.Tensor,
        head: torch.Tensor,
        sharpen: float,
    ) -> torch.Tensor:
        """``outputs`` ``[K, n, H]``, ``weights`` ``[K, n]``, ``features`` ``[n, H]``, ``head`` ``[V, H]``: a float32 scalar."""
        total = torch.zeros((), device=outputs.device)
        gradient = torch.empty_like(outputs)
        dtype = head.dtype
        for low in range(0, features.shape[0], ROWS):
            rows = slice(low, low + ROWS)
            wanted = (F.linear(features[rows].to(dtype), head).float() * sharpen).log_softmax(-1)
            chance = wanted.exp()
            own = (chance * wanted).sum(-1)
            for step in range(outputs.shape[0]):
                given = F.linear(outputs[step, rows].to(dtype), head).float().log_softmax(-1)
                weight = weights[step, rows]
                total += (weight * (own - (chance * given).sum(-1))).sum()
                slope = given.exp_().sub_(chance).mul_(weight[:, None])
                gradient[step, rows] = (slope.to(dtype) @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * slopes[0].to(gradient.dtype), None, None, None, None


def agreement(
    outputs: torch.Tensor, weights: torch.Tensor, features: torch.Tensor, head: torch.Tensor, sharpen: float = 1.0
) -> torch.Tensor:
    """Weighted sum of KL(target ‖ draft) over ``K`` steps and ``n`` rows; shapes as :meth:`_Agreement.forward`.

    The gradient goes to ``outputs`` alone. ``sharpen``: 1 / temperature of the target's side.
    """
    found: torch.Tensor = _Agreement.apply(outputs, weights, features, head, sharpen)
    return found


def unrolled_loss(
    outputs: list[torch.Tensor],
    features: torch.Tensor,
    prompts: torch.Tensor,
    lengths: torch.Tensor,
    head: torch.Tensor,
    weights: Weights,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of an unrolled pass, and its parts.

    ``outputs``: of each step ``[B, S, H]``; ``features``: the target's, ``[B, S, H]``; ``prompts``, ``lengths`` int ``[B]``.
    The draft at position t is held to the target's distribution at t and to its feature there. KL is taken where the target
    wrote the next token; a step counts only at positions its chain can have reached from there.
    """
    batch, length = features.shape[:2]
    places = torch.arange(length, device=features.device)[None]
    real = places < lengths[:, None]
    answers = (places >= prompts[:, None] - 1) & (places < lengths[:, None] - 1)
    chosen = answers
    if weights.share < 1:
        chosen = answers & (torch.rand(batch, length, generator=generator).to(features.device) < weights.share)
    rows = chosen.nonzero(as_tuple=True)
    counts = torch.stack(
        [
            (places >= prompts[:, None] - 1 + step).expand(batch, length)[rows].float() * weights.step**step
            for step in range(len(outputs))
        ]
    )
    counts = counts / max(float(counts[0].sum()), 1.0)
    together = torch.stack([output[rows] for output in outputs])
    kl = agreement(together, counts, features[rows], head, weights.sharpen)
    distance = torch.zeros((), device=features.device)
    if weights.feature:
        wanted = features.float()
        spread = wanted[real].var(0).clamp_min(1e-6)
        for step, output in enumerate(outputs):
            there = real & (places >= step)
            apart = ((output.float() - wanted) ** 2 / spread).mean(-1)
            distance = distance + weights.step**step * (apart * there).sum() / there.sum()
    return kl + weights.feature * distance, {"kl": float(kl.detach()), "distance": float(distance.detach())}
