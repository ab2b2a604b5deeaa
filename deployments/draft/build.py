"""An engine over an ONNX model folder, of whichever kind that is."""

from pathlib import Path

from deployments.chain.faults import FaultPolicy
from deployments.draft.answers import Writing
from deployments.draft.engine import DraftEngine
from deployments.draft.hidden_intake import HiddenIntake
from deployments.draft.kv_intake import make_intake
from hw.onnx.checkpoint import conditioned_facts
from hw.onnx.conditioned import ConditionedModel
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
    """Load ``folder/model.onnx`` and put an engine on it.

    A folder whose ``chain.json`` says that it is conditioned takes the target's hidden states, and drafts only when it is asked: what
    it would guess ahead of them, it would compute again with them. Raises what :class:`hw.onnx.session.OnnxModel` and
    :class:`hw.onnx.conditioned.ConditionedModel` raise.
    """
    facts = conditioned_facts(folder)
    if facts is not None:
        conditioned = ConditionedModel(folder, slots=slots, context=context, provider=provider, tuning=tuning)
        return DraftEngine(
            conditioned,
            name=name,
            target_vocab_size=target_vocab_size,
            top_k=top_k,
            faults=faults,
            ahead=0,
            hidden=HiddenIntake(conditioned, facts.target_weights),
            writing=writing,
        )
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
