"""How good a draft is: replayed over answers the target gave greedily, as the running system would use it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scripts.distil_lib.draft import Draft
from scripts.distil_lib.features import groups
from scripts.distil_lib.feed import make_batch
from scripts.distil_lib.shards import Written
from scripts.distil_lib.target import Target

DRAFTED = 4  # tokens a round


@dataclass(frozen=True)
class Figures:
    """``acceptance``: by place in the draft, the share of guesses that are right among those whose predecessors were, over
    the rounds of a replay; ``first``: of first guesses at every position; ``alone``: by place, of guesses at every position
    whatever came of the ones before; ``committed``: tokens per verify, the target's own among them; ``positions``, ``rounds``:
    counted."""

    acceptance: list[float]
    first: float
    alone: list[float]
    committed: float
    positions: int
    rounds: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        shares = " ".join(f"{share:.2f}" for share in self.acceptance)
        return f"first {self.first:.3f}, by place {shares}, {self.committed:.2f} tokens a verify"


@torch.inference_mode()
def guesses(
    draft: Draft,
    found: Sequence[tuple[Written, npt.NDArray[np.float16]]],
    target: Target,
    longest: int,
    steps: int = DRAFTED,
) -> list[npt.NDArray[np.int64]]:
    """For each sequence ``[steps, n]``: row s has at t the token guessed to follow t by a chain that began s positions before
    and was right so far (a replay needs no others). Rows are -1 where t < s."""
    out: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(found)
    for group in groups([min(len(sequence.ids), longest) for sequence, _ in found], 4096):
        batch = make_batch([found[place] for place in group], longest, target)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.model.dtype == torch.bfloat16):
            outputs = draft.unroll(batch.ids, batch.features, steps)
            best = [_best(draft, output) for output in outputs]
        tokens = torch.stack(best, 1).cpu().numpy()  # [B, steps, S]
        for row, place, length in zip(tokens, group, batch.lengths.tolist(), strict=True):
            for step in range(steps):
                row[step, :step] = -1
            out[place] = row[:, :length].copy()
    return out


def _best(draft: Draft, outputs: torch.Tensor) -> torch.Tensor:
    rows = outputs.flatten(0, 1)
    best = torch.cat([draft.logits(part).argmax(-1) for part in rows.split(256)])
    return draft.head_ids[best].view(outputs.shape[:2])


def replay(ids: npt.NDArray[np.int64], prompt: int, guessed: npt.NDArray[np.int64]) -> list[int]:
    """Lengths accepted in each round over one answer: a round begins after the last committed token, drafts, and commits what
    was right and one token of the target's own."""
    accepted = []
    at = prompt  # the target's first token needs no draft
    last = len(ids) - 1
    while at < last:
        run = 0
        while run < len(guessed) and at + run < last and guessed[run, at + run] == ids[at + run + 1]:
            run += 1
        accepted.append(run)
        at += run + 1
    return accepted


def measure(
    draft: Draft,
    found: Sequence[tuple[Written, npt.NDArray[np.float16]]],
    target: Target,
    longest: int,
    steps: int = DRAFTED,
) -> Figures:
    """Figures over greedy answers. Raises ValueError where there are none."""
    if not found:
        raise ValueError("nothing to measure with")
    right, asked = np.zeros(steps), np.zeros(steps)
    every, all_right = np.zeros(steps), np.zeros(steps)
    committed, rounds = 0, 0
    for (sequence, _), guessed in zip(found, guesses(draft, found, target, longest, steps), strict=True):
        ids = sequence.ids[: guessed.shape[1]]
        for step in range(steps):
            places = np.arange(sequence.prompt - 1 + step, len(ids) - 1)
            every[step] += len(places)
            all_right[step] += (guessed[step, places] == ids[places + 1]).sum()
        at = sequence.prompt
        for run in replay(ids, sequence.prompt, guessed):
            rounds += 1
            reached = min(run + 1, steps, len(ids) - 1 - at)
            asked[:reached] += 1
            right[:run] += 1
            committed += min(run + 1, len(ids) - 1 - at)
            at += run + 1
    return Figures(
        acceptance=(right / np.maximum(asked, 1)).tolist(),
        first=float(all_right[0] / max(every[0], 1)),
        alone=(all_right / np.maximum(every, 1)).tolist(),
        committed=committed / max(rounds, 1),
        positions=int(every[0]),
        rounds=rounds,
    )
