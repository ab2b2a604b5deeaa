"""Training: batches in, a better draft out, until the time is up. Everything it needs to go on is in one checkpoint."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from scripts.distil_lib.draft import Draft
from scripts.distil_lib.feed import Batch, Feed, Place
from scripts.distil_lib.loss import Weights, unrolled_loss
from scripts.distil_lib.target import Target

CHECKPOINT_FORMAT = 1


class CheckpointMismatch(Exception):
    """A checkpoint belongs to another run; the text says in what they differ."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is learned, but for the data and the time.

    ``rate``: of matrices (Muon, matched to AdamW's update size); vectors take AdamW with ``vector_rate``.
    """

    layers: int = 1
    head: int = 16384
    unroll: int = 2
    batch_tokens: int = 2048
    longest: int = 320
    rate: float = 2.5e-4
    vector_rate: float = 4e-3
    decay: float = 0.02
    warm_up: int = 20  # steps
    last_rate: float = 0.02  # of the first
    clip: float = 1.0
    seed: int = 0
    weights: Weights = field(default_factory=Weights)


@dataclass
class State:
    """How far training is. ``seconds``: spent on it, over all runs; ``tokens``: answer tokens seen, repeats counted."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains one draft from one folder of shards."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        data: Path,
        recipe: Recipe,
        *,
        budget: float,
        steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``budget``: seconds over all runs, by which the rate has fallen; ``steps``: or so many steps."""
        self.draft, self.target, self.recipe, self.state = draft, target, recipe, State()
        self._data, self._budget, self._steps, self._clock = data, budget, steps, clock
        self._place = Place()
        matrices = [weight for weight in draft.parameters() if weight.requires_grad and weight.ndim == 2]
        vectors = [weight for weight in draft.parameters() if weight.requires_grad and weight.ndim < 2]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.rate, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw", momentum=0.95
            ),
            torch.optim.AdamW(vectors, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = (recipe.rate, recipe.vector_rate)

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, 0..1."""
        spent = self.state.seconds / self._budget if self._budget else 1.0
        if self._steps is not None:
            spent = max(spent, self.state.step / self._steps)
        return min(spent, 1.0)

    @property
    def shards(self) -> int:
        """How many have been learned from."""
        return len({*self._place.seen, *self._place.names})

    def __call__(self, after_step: Callable[[dict[str, float]], None]) -> None:
        """Train until the budget is spent; ``after_step`` gets the parts of the loss."""
        recipe = self.recipe
        feed = Feed(
            self._data,
            self.target,
            tokens=recipe.batch_tokens,
            longest=recipe.longest,
            seed=recipe.seed,
            place=self._place,
        )
        self.draft.train()
        began = self._clock()
        batches = iter(feed)
        while self.progress < 1:
            parts = self._step(next(batches))
            now = self._clock()
            self.state.seconds += now - began
            began = now
            after_step(parts)
            self.draft.train()

    def _step(self, batch: Batch) -> dict[str, float]:
        recipe, state = self.recipe, self.state
        rate = self._factor()
        for optimizer, first in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = first * rate
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + state.step)
        low = self.target.model.dtype == torch.bfloat16
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=low):
            outputs = self.draft.unroll(batch.ids, batch.given, recipe.unroll)
            loss, parts = unrolled_loss(
                outputs, batch.features, batch.prompts, batch.lengths, self.draft.head, recipe.weights, generator
            )
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self.draft.parameters(), recipe.clip))
        if math.isfinite(norm):
            for optimizer in self._optimizers:
                optimizer.step()
        state.step += 1
        state.tokens += batch.answers
        return {**parts, "loss": float(loss.detach()), "norm": norm, "rate": rate}

    def _factor(self) -> float:
        """Warm-up by steps, then a cosine over the budget."""
        recipe = self.recipe
        warm = min(1.0, (self.state.step + 1) / max(recipe.warm_up, 1))
        fallen = recipe.last_rate + (1 - recipe.last_rate) * 0.5 * (1 + math.cos(math.pi * self.progress))
        return warm * fallen

    # --- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write everything needed to go on, replacing what was there as a whole."""
        content = {
            "format": CHECKPOINT_FORMAT,
            "weights": self.target.weights,
            "recipe": asdict(self.recipe),
            "head_ids": self.draft.head_ids.cpu(),
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "state": asdict(self.state),
            "place": asdict(self._place),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.new")
        torch.save(content, temporary)
        os.replace(temporary, path)

    def load(self, content: dict[str, Any]) -> None:
        """Go on from what :func:`read_checkpoint` gave."""
        self.draft.load_state_dict(content["draft"])
        for optimizer, saved in zip(self._optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.state = State(**content["state"])
        self._place = Place(**content["place"])


def read_checkpoint(path: Path, target: str, recipe: Recipe) -> dict[str, Any]:
    """A checkpoint's content. Raises CheckpointMismatch when it is of another target or recipe, or cannot be read."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        of, theirs = content["weights"], content["recipe"]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointMismatch(f"{path} is no checkpoint of this version: {error}") from error
    if of != target:
        raise CheckpointMismatch(f"{path} was trained for the target {of[:16]}, this one is {target[:16]}")
    saved = replace(recipe, **{**theirs, "weights": Weights(**theirs["weights"])})
    if saved != recipe:
        other = [name for name, value in asdict(recipe).items() if asdict(saved)[name] != value]
        raise CheckpointMismatch(f"{path} was trained with other settings ({', '.join(other)}): --fresh begins anew")
    return content
