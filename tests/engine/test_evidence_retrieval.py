"""Retrieval with the real sentence model: it finds what is meant, and tells apart what only sounds alike."""

from collections.abc import Iterator

import pytest

from deployments.chain.faults import FaultPolicy
from deployments.config.models import Evidence
from deployments.evidence.build import make_retrieval
from deployments.evidence.retrieval import RetrievalSource
from tests.models import model
from tests.unit.evidence_fakes import ask

pytestmark = pytest.mark.engine

HANDBOOK = """# Harbour handbook

## Moorings
Boats up to nine metres moor at the inner pier.

Longer boats moor at the outer pier, where the water is deeper.

## Fees
A night costs 12 coins in summer and 7 coins in winter.

Fees are paid at the office with the blue door.

## Waste
Used oil is taken back at the workshop. Never pour it into the harbour.
"""
BREAD = """# Bread

Mix flour, water, salt and a little yeast, and knead for ten minutes.

Let the dough rise until it has doubled, then bake it at 230 degrees for half an hour.
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    folder = tmp_path_factory.mktemp("evidence")
    (folder / "documents").mkdir()
    (folder / "documents" / "harbour.md").write_text(HANDBOOK)
    (folder / "documents" / "bread.md").write_text(BREAD)
    return Evidence(
        pool="cpu",
        documents=folder / "documents",
        history=True,
        index=folder / "index",
        sentences=model("sentences"),
    )


@pytest.fixture
def source(spec: Evidence) -> Iterator[RetrievalSource]:
    source = make_retrieval(spec, FaultPolicy())
    assert source._documents is not None
    source._documents.refresh()
    yield source
    source.close()


@pytest.mark.parametrize(
    ("question", "note"),
    [
        ("How much does a night in the harbour cost in summer?", "doc harbour.md#3"),
        ("Where do long boats moor?", "doc harbour.md#2"),
        ("How long does the bread have to be baked?", "doc bread.md#2"),
        ("Who wins when a boat and a train race?", None),
        ("Which planet is the largest one?", None),
        ("Write a poem about autumn leaves.", None),
    ],
)
def test_a_passage_that_answers_or_nothing(source: RetrievalSource, question: str, note: str | None) -> None:
    candidate = source.draft(ask(question))
    assert (None if candidate is None else candidate.note.split(" similarity")[0]) == note


def test_an_earlier_answer_is_drafted_for_the_same_question_only_also_after_a_restart(spec: Evidence) -> None:
    source = make_retrieval(spec, FaultPolicy())
    source.learn(ask("How do I encrypt the backup with a key?"), "Run lock backup.")
    source.close()
    source = make_retrieval(spec, FaultPolicy())
    same = source.draft(ask("How can I encrypt the backup with the key?"))
    assert same is not None
    assert same.text == "Run lock backup."
    for other in ("How do I decrypt the backup with a key?", "How do I encrypt the disk with a key?"):
        assert source.draft(ask(other)) is None
    assert source.draft(ask("How do I encrypt the backup with a key?", tenant="other")) is None
    source.close()
