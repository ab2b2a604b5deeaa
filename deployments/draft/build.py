"""An engine over an ONNX model folder."""

from pathlib import Path

from deployments.chain.faults import FaultPolicy
from deployments.draft.answers import Writing
from deployments.draft.engine import DraftEngine
from deployments.draft.kv_intake import make_intake
from hw.onnx.session import OnnxModel
from hw.providers import Tuning


def build_engine(
    folder: Path,
    *,
    provider: str = "cpu",
    context: int = 2048,
    slots: int = 32,
    top_k: int = 4,
    tuning: Tuning | None = None,
    target_vocab_size: int | None = None,
    faults: FaultPolicy | None = None,
    name: str = "draft",
    ahead: int | None = None,
    writing: Writing | None = None,
) -> DraftEngine:
    """Load ``folder/model.onnx`` and put an engine on it. Raises what :class:`hw.onnx.session.OnnxModel` raises."""
    model = OnnxModel(folder, slots=slots, context=context, provider=provider, tuning=tuning)
    return DraftEngine(
        model,
        name=name,
        target_vocab_size=target_vocab_size,
        top_k=top_k,
        faults=faults,
        ahead=ahead,
        kv=make_intake(model, folder, provider),
        writing=writing,
    )
