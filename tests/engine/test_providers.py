"""The real draft on OpenVINO, loaded into the plain ONNX Runtime as a plug-in: it computes what the CPU provider does."""

import numpy as np
import pytest

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Step
from deployments.draft.build import build_engine
from hw.onnx.session import OnnxModel
from hw.providers import find, get_profile
from hw.providers.profile import CPU
from hw.providers.runtime import read_listing
from scripts.hw_lib.trial import fallback, kv_round_trip
from tests.engine.test_onnx_session import greedy, prompts  # noqa: F401  (a fixture)
from tests.models import model as folder

pytestmark = pytest.mark.engine

OPENVINO = get_profile("openvino")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    """Loads the plug-in only when a test of this file runs."""
    verdict = find(OPENVINO, read_listing([OPENVINO]))
    if not verdict.here:
        pytest.skip(verdict.reason)


@pytest.fixture(scope="module")
def openvino() -> OnnxModel:
    return OnnxModel(folder("draft-int4"), slots=4, context=256, provider="openvino", warm_up=False)


@pytest.fixture(scope="module")
def cpu() -> OnnxModel:
    return OnnxModel(folder("draft-int4"), slots=4, context=256, warm_up=False)


def test_it_computes_the_layers_and_leaves_attention(openvino: OnnxModel) -> None:
    assert openvino.placement is not None
    assert openvino.placement.providers_of("GroupQueryAttention") == {CPU}
    assert openvino.placement.providers_of("MatMulNBits") == {OPENVINO.execution_provider}
    assert 0 < fallback(openvino)["share"] < 0.5


def test_tokens_agree_with_the_cpu_providers(
    openvino: OnnxModel,
    cpu: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    """After the same tokens; INT4 rounds activations differently, so that near ties may fall otherwise."""
    same = total = 0
    for prompt in prompts:
        wanted = greedy(cpu, 0, prompt, 12)
        found = [int(openvino.prefill(0, prompt, 0).argmax())]
        for at, token in enumerate(wanted[:-1]):
            found.append(int(openvino.decode([0], [token], [len(prompt) + at])[0].argmax()))
        same += sum(a == b for a, b in zip(found, wanted, strict=True))
        total += len(wanted)
    assert same >= 0.85 * total


def test_inputs_are_this_steps(openvino: OnnxModel, prompts: list[list[int]]) -> None:  # noqa: F811
    """The plug-in copies what is bound when it is bound: a step on yesterday's mask or token would be seen here."""
    first, second = prompts[0], prompts[3]
    expected = [openvino.prefill(2, prompt, 0).copy() for prompt in (first, second)]
    for prompt, wanted in zip((second, first), expected[::-1], strict=True):
        assert np.array_equal(openvino.prefill(2, prompt, 0), wanted)
    rows = [openvino.decode([2], [token], [len(first)])[0].copy() for token in (5, 900, 5)]
    assert np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])


def test_kv_goes_out_and_in(openvino: OnnxModel, cpu: OnnxModel, prompts: list[list[int]]) -> None:  # noqa: F811
    errors = kv_round_trip(openvino, cpu, prompts[0])
    assert errors["read_back_error"] == 0
    assert errors["continue_error"] == 0
    assert errors["cpu_kv_agreement"] >= 0.5


def test_the_draft_engine_drafts_on_it(cpu: OnnxModel, prompts: list[list[int]]) -> None:  # noqa: F811
    """As the draft deployment builds it."""
    engine = build_engine(folder("draft-int4"), provider="openvino", context=256, slots=4)
    prompt = prompts[1]
    commit = Commit("a", 0, len(prompt), prompt, 4)
    for number in range(200):
        (draft,) = engine.step(Step(PROTOCOL_VERSION, "t", number + 1, 60.0, [commit], [])).drafts
        if draft.tokens:
            break
        engine.idle(1.0)  # it reads the prompt meanwhile
        commit = Commit("a", 0, len(prompt), [], 4)
    assert draft.tokens[:1] == greedy(cpu, 0, prompt, 1)
