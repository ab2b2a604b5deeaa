"""From a trained module to the file that is kept, and the check that the ONNX folder made of it guesses as the module does."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hw.onnx.conditioned_weights import Trained
from scripts.distil_lib.draft import KV, ConditionedDraft
from scripts.distil_lib.shards import Written
from scripts.distil_lib.target import Target

COMPARED = 24  # answers


def trained_of(draft: ConditionedDraft, target: Target) -> Trained:
    """What is kept of a module: its weights, its sizes, and which target it belongs to."""
    tensors = {name: value.detach().float().cpu().numpy() for name, value in draft.state_dict().items()}
    return Trained(draft.shape, target.weights, tensors, draft.head_ids.cpu().numpy().astype(np.int32))


@dataclass(frozen=True)
class Compared:
    """Of an ONNX folder with its module, at every position of some answers: share of equal first guesses, and how far
    features are apart at most and on average, as a share of their own size."""

    positions: int
    agreement: float
    largest: float
    mean: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def compare(
    folder: Path,
    draft: ConditionedDraft,
    found: Sequence[tuple[Written, npt.NDArray[np.float16]]],
    longest: int,
) -> Compared:
    """Run both over the first answers of ``found``, the target's features given at every position."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    session = ort.InferenceSession(str(folder / "model.onnx"), settings, providers=["CPUExecutionProvider"])
    shape = draft.shape
    empty = np.zeros((1, shape.kv_heads, 0, shape.head_dim), np.float32)
    past = {value.name: empty for value in session.get_inputs() if value.name.startswith("past_key_values")}
    head = draft.head.float()
    same, count, apart = 0, 0, []
    for sequence, rows in found[:COMPARED]:
        ids = sequence.ids[:longest]
        features = np.zeros((1, len(ids), shape.hidden), np.float32)
        features[0, 1:] = rows[: len(ids) - 1]
        feeds = {"input_ids": ids[None], "features": features, "attention_mask": np.ones((1, len(ids)), np.int64)}
        logits, out = session.run(["logits", "features_out"], {**feeds, **past})
        device = head.device
        past_steps: list[list[KV]] = [[] for _ in draft.layers]
        wanted = draft.step(torch.from_numpy(ids)[None].to(device), torch.from_numpy(features).to(device), past_steps)[
            0
        ]
        given = torch.from_numpy(out[0]).to(device)
        apart.append(((given - wanted).norm(dim=-1) / wanted.norm(dim=-1)).cpu().numpy())
        same += int(((given @ head.T).argmax(-1) == (wanted @ head.T).argmax(-1)).sum()) - 1
        # The last position has its logits from the graph's own head, quantised as it is.
        same += int(logits[0, 0].argmax() == int((wanted[-1] @ head.T).argmax()))
        count += len(ids)
    every = np.concatenate(apart)
    return Compared(count, same / max(count, 1), float(every.max()), float(every.mean()))
