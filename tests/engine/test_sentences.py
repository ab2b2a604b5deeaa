"""The prepared sentence model: against torch on the weights it was made of, and what texts it takes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hw.onnx.checkpoint import CheckpointError
from hw.onnx.sentences import SentenceModel
from tests.models import model

TEXTS = [
    "Hello",
    "The cat sat on the mat.",
    "In order to make a good soup, you first need to chop the vegetables and then boil them.",
    "a" * 50_000,
    "",
    "Ünïcödé 日本語 \U0001f600 and \0 control",
]


@pytest.fixture(scope="module")
def sentences() -> SentenceModel:
    return SentenceModel(model("sentences"))


def test_vectors_are_those_of_the_published_model(sentences: SentenceModel) -> None:
    """``golden_sentences.json``: torch in float32 on the packaged weights. The int8 model errs by 0.01 on average."""
    golden = json.loads((Path(__file__).parent / "golden_sentences.json").read_text())
    want = np.asarray(golden["first_values"])  # [n, 16] of the vectors
    got = sentences.embed(golden["texts"])
    np.testing.assert_allclose(got[:, :16], want, atol=0.03)
    cosines = np.asarray(golden["cosines"])
    errors = np.abs(got @ got.T - cosines)
    assert errors.max() < 0.06
    assert errors.mean() < 0.02


def test_rows_are_unit_vectors_whatever_the_text(sentences: SentenceModel) -> None:
    rows = sentences.embed(TEXTS)
    assert rows.shape == (len(TEXTS), 384)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-4)


def test_a_vector_does_not_depend_on_its_neighbours(sentences: SentenceModel) -> None:
    alone = SentenceModel(model("sentences"), cache=0)
    together = sentences.embed(TEXTS)
    for text, row in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(alone.embed([text])[0], row)


def test_nothing_to_do(sentences: SentenceModel) -> None:
    assert sentences.embed([]).shape == (0, 384)
    assert sentences.compare([], 1.0) == []


def test_meaning_is_compared(sentences: SentenceModel) -> None:
    near, far = sentences.compare(
        [
            ("The film was very good.", "The movie was really great."),
            ("The film was very good.", "The invoice is due on Monday."),
        ],
        math.inf,
    )
    assert near > 0.75 > 0.4 > far


def test_phrases_are_told_apart_where_texts_are_not(sentences: SentenceModel) -> None:
    """One word in a sentence: the text around it makes any two sentences similar, but not any two phrases."""
    before, after = "The company plans to ", " a new building in the centre of the city next year"
    others = ("buy", "rent")
    near, far = sentences.compare([((before, "purchase", after), (before, other, after)) for other in others], math.inf)
    near_text, far_text = sentences.compare(
        [(f"{before}purchase{after}", f"{before}{other}{after}") for other in others], math.inf
    )
    assert near > 0.75 > 0.5 > far
    assert far_text > 0.75  # which no threshold on texts would tell from one that means the same
    assert near - far > 2 * (near_text - far_text)


def test_a_draft_is_no_sentence_model() -> None:
    with pytest.raises(CheckpointError, match="draft, not a sentence model"):
        SentenceModel(model("draft-int8"))
