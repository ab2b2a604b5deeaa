"""KV between a real vLLM target and real ONNX drafts: the same function both ways, and what must not cross does not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console
from vllm import SamplingParams

from deployments.channel.inprocess import InProcessChannel
from deployments.draft.engine import DraftEngine
from deployments.draft.kv_intake import TAKEN, KvIntake, make_intake
from deployments.kv import INLINE, SHARED_MEMORY
from hw.kv.codes import Code
from hw.kv.manifest import Manifest
from hw.kv.verdict import Accept, Convert, Local, Reject, check_manifest
from hw.onnx.build import BuildOptions
from hw.onnx.kv_identity import draft_manifest
from hw.onnx.preparation import Preparation
from hw.onnx.progress import Display
from hw.onnx.session import OnnxModel
from tests.engine.conftest import Engine
from tests.engine.prompts import PROMPTS
from tests.models import model

pytestmark = pytest.mark.engine

LOGIT_TOLERANCE = 2e-3  # float32 on both sides, other kernels: sums in another order over 30 layers


@pytest.fixture(scope="module")
def float_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights as a float32 ONNX model."""
    out = tmp_path_factory.mktemp("models")
    return Preparation(out, Display(Console(quiet=True))).draft(model("target"), BuildOptions(32))


def exported(engine: Engine, prompt: str, drafter: DraftEngine, link: str) -> list[Any]:
    """Generate with ``drafter`` taking the target's KV over ``link``; the request's output."""
    kv = engine.kv()
    intake = drafter._kv
    assert intake is not None
    accepted = intake.meet(kv.offer())
    assert accepted == SHARED_MEMORY
    engine.drafts(a=InProcessChannel(drafter))
    kv.connect([{"name": "a", "kv": link}])
    engine.rounds().send_kv(kv.export)
    try:
        return engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    finally:
        engine.rounds().send_kv(None)


class Watching(KvIntake):
    """Remembers, after each import, the slot's KV and what the session's tokens were."""

    seen: list[tuple[list[int], int, npt.NDArray[Any]]]

    def take(self, session: Any, reference: bytes) -> str:
        counted = super().take(session, reference)
        if counted == TAKEN:
            self.seen.append((list(session.tokens), session.slot, self._model.read_kv(session.slot, 0, len(session.tokens) - 1).copy()))  # type: ignore[attr-defined]  # fmt: skip
        return counted


@pytest.mark.parametrize("link", [SHARED_MEMORY, INLINE])
def test_a_float32_draft_computes_the_same_from_the_targets_kv(engine: Engine, float_draft: Path, link: str) -> None:
    onnx = OnnxModel(float_draft, slots=4, context=512, warm_up=False)
    local = draft_manifest(float_draft, "cpu")
    intake = Watching(onnx, local, local.identity.weights)
    intake.seen = []
    for prompt in PROMPTS[::6]:
        exported(engine, prompt, DraftEngine(onnx, kv=intake, ahead=0), link)
    openings = [entry for entry in intake.seen if entry[2].shape[2] > 1]
    assert len({tuple(tokens) for tokens, _, _ in openings}) >= len(PROMPTS[::6])
    worst = 0.0
    for tokens, _, kv in openings:
        last = len(tokens) - 1
        onnx.write_kv(0, 0, kv)
        imported = onnx.decode([0], [tokens[-1]], [last])[0].copy()
        onnx.prefill(1, tokens[:-1], 0)
        own = onnx.decode([1], [tokens[-1]], [last])[0].copy()
        worst = max(worst, float(np.abs(imported - own).max()))
        assert imported.argmax() == own.argmax()
        assert np.abs(kv - onnx.read_kv(1, 0, last)).max() < LOGIT_TOLERANCE
    assert worst < LOGIT_TOLERANCE


@pytest.mark.parametrize("link", [SHARED_MEMORY, INLINE])
@pytest.mark.parametrize("refresh", [False, True])
def test_output_equals_plain_and_prompts_are_not_read_twice(engine: Engine, link: str, refresh: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.drafts()
    plain = [out.outputs[0].token_ids for out in engine.generate(PROMPTS[:4], params)]
    onnx = OnnxModel(model("draft-int8"), slots=16, context=512)
    intake = make_intake(onnx, model("draft-int8"), "cpu")
    drafter = DraftEngine(onnx, kv=intake)
    kv = engine.kv()
    assert drafter.meet(kv.offer()) == SHARED_MEMORY
    engine.drafts(a=InProcessChannel(drafter))
    kv.connect([{"name": "a", "kv": link}])
    kv.export.refresh = refresh
    engine.rounds().send_kv(kv.export)
    try:
        drafted = [out.outputs[0].token_ids for out in engine.generate(PROMPTS[:4], params)]
        stats = engine.stats()
    finally:
        kv.export.refresh = False
        engine.rounds().send_kv(None)
    assert drafted == plain
    assert stats["accepted_tokens"] > 0
    counts = drafter.stats()
    assert counts[TAKEN] >= 4
    # a token here and there that it could not tell it would lack, never a prompt
    assert counts.get("prefill_tokens", 0) < counts["tokens"] / 4
    assert not any(name.startswith("kv_refused") for name in counts)
    store = kv.export._store
    store.store.check_integrity()
    assert store.store.stats()["leases"] == 0  # every answer settled what was lent for it


def test_a_drafts_kv_never_reaches_the_target(engine: Engine, float_draft: Path) -> None:
    """Even a float32 draft of the same weights computes with other kernels: equal function, other bits."""
    target = Manifest.decode(engine.kv().offer()["manifest"])
    draft = draft_manifest(float_draft, "cpu")
    verdict = check_manifest(draft, Local("target", target))
    assert isinstance(verdict, Reject)
    assert verdict.code is Code.COMPUTE
    towards_draft = check_manifest(target, Local("draft", draft, draft.identity.weights, frozenset({"cast"})))
    assert isinstance(towards_draft, Accept | Convert)


@pytest.fixture(autouse=True)
def _no_links(engine: Engine) -> Iterator[None]:
    yield
    engine.rounds().send_kv(None)
