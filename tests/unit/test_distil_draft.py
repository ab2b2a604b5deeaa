"""The conditioned draft: its steps, its masks, its gradient, and its export to ONNX."""

import io
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from rich.console import Console

from hw.onnx import blockwise
from hw.onnx.build import BuildError
from hw.onnx.checkpoint import CheckpointError, Manifest
from hw.onnx.conditioned import read_head
from hw.onnx.conditioned_build import ConditionedOptions, build_conditioned
from hw.onnx.conditioned_weights import read_trained, write_trained
from hw.onnx.preparation import Preparation
from hw.onnx.progress import Display
from scripts.distil_lib.draft import ConditionedDraft, before
from scripts.distil_lib.export import trained_of
from scripts.distil_lib.loss import agreement
from scripts.distil_lib.target import Target
from tests.unit.distil_fakes import HEAD, VOCABULARY, tiny_checkpoint, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("tiny"))


def draft_of(target: Target, layers: int = 1, seed: int = 1) -> ConditionedDraft:
    """Begun as training does, then moved at random so that nothing in it is zero."""
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, 40))
    sample = [(ids, target.features(ids).clone(), torch.ones_like(ids, dtype=torch.bool))]
    head = torch.sort(torch.randperm(VOCABULARY)[:HEAD]).values
    draft = ConditionedDraft.begin(target, layers, head, sample)
    for weight in draft.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return draft


@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_steps_equal_decoding_one_token_at_a_time(target: Target, layers: int) -> None:
    """A chain that leaves the target's features at position p and goes on with its own, computed as the runtime does: the
    features of a sequence are what was known of each position, and all of it is read at once."""
    draft = draft_of(target, layers)
    ids = torch.randint(0, VOCABULARY, (1, 14))
    features = target.features(ids)
    with torch.no_grad():
        outputs = draft.unroll(ids, features, 4)
        for start in (1, 5, 9):
            known = features.clone()
            for step in range(4):
                place = start + step
                if place >= ids.shape[1]:
                    break
                # Keys and values of position p come from the feature of p - 1 that was known when p was computed.
                alone = draft.unroll(ids[:, : place + 1], known[:, : place + 1], 1)[0][:, place]
                torch.testing.assert_close(outputs[step][:, place], alone, atol=1e-4, rtol=1e-4)
                known[:, place] = alone


def test_no_step_sees_later_tokens_or_features(target: Target) -> None:
    draft = draft_of(target)
    ids = torch.randint(0, VOCABULARY, (1, 12))
    features = target.features(ids).clone()
    with torch.no_grad():
        first = draft.unroll(ids, features, 3)
        ids[:, 8], features[:, 7] = (ids[:, 8] + 1) % VOCABULARY, 0
        second = draft.unroll(ids, features, 3)
    for step in range(3):
        torch.testing.assert_close(first[step][:, step:8], second[step][:, step:8])
        assert not torch.allclose(first[step][:, 8], second[step][:, 8])


def test_what_it_begins_with_is_the_best_linear_guess(target: Target) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (4, 60))
    features = target.features(ids).clone()
    real = torch.ones_like(ids, dtype=torch.bool)
    draft = ConditionedDraft.begin(target, 1, torch.arange(VOCABULARY), [(ids, features, real)])
    wanted = (features / target.final_norm)[:, 1:].reshape(-1, 32)
    given = draft.inputs(ids, before(features))[:, 1:].reshape(-1, 64)
    best = torch.linalg.lstsq(given.detach(), wanted).solution
    ours = (given @ draft.fuse.weight.T - wanted).square().mean()
    assert float(ours.detach()) == pytest.approx(float((given @ best - wanted).square().mean().detach()), rel=0.05)


def test_layers_begin_with_what_the_linear_guess_leaves(target: Target) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (20, 60))
    features = target.features(ids).clone()
    draft = ConditionedDraft.begin(target, 2, torch.arange(VOCABULARY), [(ids, features, torch.ones_like(ids) > 0)])
    linear = ConditionedDraft.begin(target, 2, torch.arange(VOCABULARY), [(ids, features, torch.ones_like(ids) > 0)])
    for layer in linear.layers:
        layer.out.weight.data.zero_()
        layer.down.weight.data.zero_()

    def apart(one: ConditionedDraft, tokens: torch.Tensor) -> float:
        with torch.no_grad():
            found = one.unroll(tokens, target.features(tokens), 1)[0]
            return float((found - target.features(tokens))[:, 1:].square().mean())

    assert apart(draft, ids) < 0.97 * apart(linear, ids)  # so what was fitted is what runs


def test_gradient_of_the_agreement_is_that_of_torch() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(2, 300, 16, requires_grad=True)
    features, head, weights = torch.randn(300, 16), torch.randn(40, 16), torch.rand(2, 300)
    ours = agreement(outputs, weights, features, head)
    (gradient,) = torch.autograd.grad(ours * 3, outputs)
    wanted = (features @ head.T).log_softmax(-1)
    given = (outputs @ head.T).log_softmax(-1)
    plain = ((wanted.exp() * (wanted - given)).sum(-1) * weights).sum()
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain * 3, outputs)[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 96])
def test_blocks_are_read_by_onnx_runtime_as_we_mean_them(bits: int, columns: int) -> None:
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    weight = random.normal(size=(24, columns)).astype(np.float32)
    weight[3] = 0
    blocks = blockwise.quantise(weight, bits, 32)
    back = blockwise.dequantise(blocks, bits)
    assert np.abs(back - weight).max() < (0.4 if bits == 4 else 0.03)
    names = ["x", "w", "s"] + (["z"] if blocks.zeros is not None else [])
    constants = [
        numpy_helper.from_array(value, name) for name, value in zip("wsz", blocks, strict=True) if value is not None
    ]
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft", K=columns, N=24, bits=bits, block_size=32, accuracy_level=0
    )
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 24])], constants,
    )  # fmt: skip
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    )
    model.ir_version = 10
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = random.normal(size=(5, columns)).astype(np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ back.T, rtol=1e-4, atol=1e-4)


def test_blocks_that_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        blockwise.quantise(np.zeros((4, 40), np.float32), 4, 32)


def exported(folder: Path, target: Target, draft: ConditionedDraft, options: ConditionedOptions) -> Path:
    write_trained(folder / "w.safetensors", trained_of(draft, target))
    (folder / "w.json").write_text(json.dumps({"tokens": 7, "curve": [1]}))
    build_conditioned(folder / "w.safetensors", target.folder, folder / "onnx", options, folder)
    return folder / "onnx"


@pytest.mark.parametrize("layers", [1, 2])
def test_export_computes_what_torch_does(target: Target, layers: int, tmp_path: Path) -> None:
    draft = draft_of(target, layers)
    folder = exported(tmp_path, target, draft, ConditionedOptions(bits=32, head_bits=32))
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    ids = torch.randint(0, VOCABULARY, (2, 10))
    features = before(target.features(ids))
    empty = np.zeros((2, 2, 0, 16), np.float32)
    feeds = {"input_ids": ids.numpy(), "features": features.numpy(), "attention_mask": np.ones((2, 10), np.int64)}
    feeds |= {value.name: empty for value in session.get_inputs() if value.name.startswith("past")}
    logits, out = session.run(["logits", "features_out"], feeds)
    with torch.no_grad():
        wanted = draft.step(ids, features, [[] for _ in range(layers)])
        heads = draft.logits(wanted[:, -1:])
    # Weights are stored as float16.
    np.testing.assert_allclose(out, wanted.numpy(), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(logits, heads.numpy(), rtol=0.02, atol=0.05)
    facts = Manifest.read(folder)
    assert (facts.kind, facts.layers, facts.head_size, facts.hidden_size) == ("conditioned", layers, HEAD, 32)
    assert facts.trained == {"tokens": 7}
    assert facts.target_weights == target.weights == facts.weights
    assert facts.complete(folder)
    assert read_head(folder, facts).tolist() == draft.head_ids.tolist()


def test_quantised_export_guesses_mostly_the_same(target: Target, tmp_path: Path) -> None:
    draft = draft_of(target)
    folder = exported(tmp_path, target, draft, ConditionedOptions(bits=8, head_bits=8))
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    empty = np.zeros((1, 2, 0, 16), np.float32)
    same = 0
    for seed in range(40):
        torch.manual_seed(seed)
        ids = torch.randint(0, VOCABULARY, (1, 6))
        features = before(target.features(ids))
        feeds = {"input_ids": ids.numpy(), "features": features.numpy(), "attention_mask": np.ones((1, 6), np.int64)}
        feeds |= {"past_key_values.0.key": empty, "past_key_values.0.value": empty}
        best = int(session.run(["logits"], feeds)[0].argmax())
        with torch.no_grad():
            same += best == int(draft.logits(draft.step(ids, features, [[]])[:, -1]).argmax())
    assert same >= 36


def test_another_target_is_refused_with_both_fingerprints(target: Target, tmp_path: Path) -> None:
    other = tiny_target(tmp_path / "other", seed=5)
    write_trained(tmp_path / "w.safetensors", trained_of(draft_of(target), target))
    with pytest.raises(BuildError) as error:
        build_conditioned(tmp_path / "w.safetensors", other.folder, tmp_path / "out", ConditionedOptions(), tmp_path)
    assert target.weights[:16] in str(error.value)
    assert other.weights[:16] in str(error.value)


def test_preparing_builds_the_draft_that_was_trained_for_a_target(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    with Display(Console(file=io.StringIO())) as display:
        display.say = said.append  # type: ignore[method-assign]
        preparation = Preparation(tmp_path / "models", display)
        (tmp_path / "models").mkdir()
        assert preparation.conditioned(target.folder, tmp_path / "trained") is None  # none was
        (tmp_path / "trained").mkdir()
        (tmp_path / "trained" / "a.safetensors").write_bytes(b"another kind of file")
        assert preparation.conditioned(target.folder, tmp_path / "trained") is None
        write_trained(tmp_path / "trained" / "b.safetensors", trained_of(draft_of(target), target))
        folder = preparation.conditioned(target.folder, tmp_path / "trained")
        assert folder is not None
        first = Manifest.read(folder)
        assert first.source == "b.safetensors"
        said.clear()
        assert preparation.conditioned(target.folder, tmp_path / "trained") == folder
        assert said == ["  draft-conditioned: there already"]
        (tmp_path / "trained" / "b.json").write_text('{"tokens": 1}')
        preparation.conditioned(target.folder, tmp_path / "trained")
        assert Manifest.read(folder).trained == {"tokens": 1}
        other = tiny_target(tmp_path / "other", seed=5)
        assert preparation.conditioned(other.folder, tmp_path / "trained") is None


def test_trained_file_goes_there_and_back_and_is_refused_when_cut(target: Target, tmp_path: Path) -> None:
    trained = trained_of(draft_of(target), target)
    path = tmp_path / "w.safetensors"
    write_trained(path, trained)
    back = read_trained(path)
    assert back.shape == trained.shape
    assert back.target_weights == target.weights
    assert back.head_ids.tolist() == trained.head_ids.tolist()
    for name, value in trained.tensors.items():
        np.testing.assert_allclose(back.tensors[name], value, rtol=2e-3, atol=1e-5)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_trained(path)
    trained.head_ids[:2] = trained.head_ids[1::-1].copy()
    with pytest.raises(CheckpointError, match="ascending"):
        write_trained(path, trained)


def test_other_families_are_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, model_type="gemma3")
    with pytest.raises(CheckpointError, match="is a gemma3 model: drafts are trained for llama-like targets only"):
        Target(folder)
