"""Retrieval: what it drafts from documents and past answers, and that tenants never see each other's."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.faults import FaultPolicy
from deployments.evidence.documents import Documents
from deployments.evidence.history import History, Limits
from deployments.evidence.index import Index
from deployments.evidence.retrieval import RetrievalSource
from deployments.evidence.same_question import same_question
from tests.unit.evidence_fakes import WORDS, BagOfWords, ask

FAULTS = FaultPolicy(evidence_refresh_s=0.05, drain_timeout_s=5.0)
Make = Callable[..., RetrievalSource]


class Clock:
    """Seconds since 1970, as tests like them."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Make]:
    """Makes the source over the same folders again and again, as restarts do."""
    opened: list[RetrievalSource] = []

    def source(limits: Limits | None = None, **thresholds: float) -> RetrievalSource:
        while opened:
            opened.pop().close()
        (tmp_path / "documents").mkdir(exist_ok=True)
        model = BagOfWords()
        documents = Documents(tmp_path / "documents", Index(tmp_path / "d", WORDS, "words"), model)
        history = History(Index(tmp_path / "h", WORDS, "words"), limits, clock)
        opened.append(RetrievalSource(model, FAULTS, documents=documents, history=history, **thresholds))
        documents.refresh()
        return opened[-1]

    yield source
    while opened:
        opened.pop().close()


def text(candidate: Candidate | None) -> str | None:
    return None if candidate is None else candidate.text


def test_the_nearest_passage_above_the_threshold(make: Make, tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "faq.md").write_text("# Opening hours\n\nFrom nine to five.\n\nNever on Sundays.")
    source = make(similarity=0.6)
    candidate = source.draft(ask("opening hours from nine to"))
    assert candidate is not None
    assert (candidate.text, candidate.source) == ("From nine to five.", "retrieval")
    assert candidate.note.startswith("doc faq.md#1 similarity 0.")
    assert source.draft(ask("something else entirely")) is None


def test_an_answer_is_remembered_across_restarts_and_comes_before_documents(make: Make, tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "faq.md").write_text("when do you open")
    make().learn(ask("When do you open?"), "At nine.")
    source = make()
    candidate = source.draft(ask("when do you open"))
    assert candidate is not None
    assert (candidate.text, candidate.note) == ("At nine.", "answer to an earlier question, similarity 1.00")
    source.learn(ask("When do you open?"), "At ten.")
    assert text(source.draft(ask("When do you open?"))) == "At ten."
    assert source.stats()["history_answers"] == 1


def test_tenants_share_documents_and_nothing_else(make: Make, tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "faq.md").write_text("what is the code")
    source = make()
    source.learn(ask("What is my code?", tenant="one"), "It is 1234.")
    source.learn(ask("What is my code?", tenant=""), "It is nothing.")
    assert text(source.draft(ask("What is my code?", tenant="one"))) == "It is 1234."
    for other in ("two", "", "on", "one/", "one\0"):
        assert text(source.draft(ask("What is my code?", tenant=other))) == "what is the code"


@settings(deadline=None, max_examples=40)
@given(
    learned=st.lists(st.tuples(st.sampled_from(["a", "b", "ab", ""]), st.integers(0, 5)), max_size=20),
    asked=st.tuples(st.sampled_from(["a", "b", "ab", "", "c"]), st.integers(0, 5)),
)
def test_no_series_of_questions_shows_a_tenant_what_another_was_told(
    tmp_path_factory: pytest.TempPathFactory, learned: list[tuple[str, int]], asked: tuple[str, int]
) -> None:
    model = BagOfWords()
    index = Index(tmp_path_factory.mktemp("history"), WORDS, "words")
    source = RetrievalSource(model, FAULTS, history=History(index), answer_similarity=0.0)
    for tenant, number in learned:
        source.learn(ask(f"which word is w{number}", tenant), f"{tenant} was told {number}")
    tenant, number = asked
    said = text(source.draft(ask(f"which word is w{number}", tenant)))
    assert (said is not None) == bool(tenant and asked in learned)
    assert said is None or said.split()[0] == tenant
    source.close()


def test_answers_under_other_instructions_are_other_answers(make: Make) -> None:
    source = make()
    pirate = [("system", "Speak like a pirate.")]
    source.learn(ask("Who are you?", before=pirate), "Arr.")
    assert source.draft(ask("Who are you?")) is None
    assert text(source.draft(ask("Who are you?", before=pirate))) == "Arr."


def test_a_question_that_leans_on_the_conversation_is_neither_learned_nor_answered(make: Make) -> None:
    source = make()
    before = [("user", "Is tea hot?"), ("assistant", "Yes.")]
    source.learn(ask("And why?", before=before), "Because of the water.")
    assert source.stats()["history_answers"] == 0
    source.learn(ask("And why?"), "Why not.")
    assert source.draft(ask("And why?", before=before)) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is the refund period?", "How long is the refund period?", True),
        ("What is 12 plus 5?", "What is 12 plus 6?", False),
        ("How do I encrypt the file?", "How do I decrypt the file?", False),
        ("Is it allowed?", "Is it not allowed?", False),
        ("Where does Maria live?", "Where does Peter live?", False),
        ("Berlin is in which country?", "Madrid is in which country?", False),
        ("Maria lives where?", "Where does Peter live?", False),
        ("Is there milk in the soup?", "Is there ginger in the soup?", False),
        ("Is there milk in the soup?", "Does the soup have milk in it?", True),
        ("Tell me: which town is Rome near?", "Which town is Rome near?", True),
        ("I want a refund. When is it paid?", "When is a refund paid?", True),
        ("", "", True),
    ],
)
def test_similar_is_not_the_same(one: str, other: str, same: bool) -> None:
    assert same_question(one, other) == same


def test_history_is_bounded_and_forgets_what_was_used_longest_ago(make: Make) -> None:
    source = make(Limits(answers=3, all_answers=4))
    for word in ("apple", "pear", "plum"):
        source.learn(ask(f"what is a {word}"), word)
    assert text(source.draft(ask("what is a apple"))) == "apple"
    source.learn(ask("what is a fig"), "fig")
    assert source.draft(ask("what is a pear")) is None
    assert text(source.draft(ask("what is a apple"))) == "apple"
    source.learn(ask("what is a nut", tenant="two"), "nut")
    source.learn(ask("what is a kiwi", tenant="two"), "kiwi")
    assert source.draft(ask("what is a plum")) is None
    assert (source.stats()["history_answers"], source.stats()["history_evicted"]) == (4, 2)


def test_history_ages(make: Make, clock: Clock) -> None:
    source = make(Limits(age_s=100))
    source.learn(ask("what is a pear"), "pear")
    clock.now += 99
    assert text(source.draft(ask("what is a pear"))) == "pear"
    clock.now += 2
    assert source.draft(ask("what is a pear")) is None
    make(Limits(age_s=100)).start()
    source = make(Limits(age_s=100))  # closing the last one has ended its refreshing
    assert source.stats()["history_answers"] == 0


def test_the_folder_is_watched(make: Make, tmp_path: Path) -> None:
    source = make()
    source.start()
    (tmp_path / "documents" / "new.txt").write_text("something new")
    for _ in range(200):
        if text(source.draft(ask("something new"))) == "something new":
            break
        source._stop.wait(0.05)
    assert text(source.draft(ask("something new"))) == "something new"


def test_a_sentence_model_that_is_late_is_no_draft(tmp_path: Path) -> None:
    class Late(BagOfWords):
        def embed(self, texts: object, budget_s: float = 0.0) -> np.ndarray:
            return np.full((1, WORDS), np.nan, np.float32)

    source = RetrievalSource(Late(), FAULTS, history=History(Index(tmp_path, WORDS, "words")))
    with pytest.raises(TimeoutError):
        source.draft(ask("q"))
    with pytest.raises(TimeoutError):
        source.learn(ask("q"), "a")
    source.close()


def test_a_full_index_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.evidence.index.MAX_ROWS", 2)
    source = RetrievalSource(BagOfWords(), FAULTS, history=History(Index(tmp_path, WORDS, "words")))
    for word in ("apple", "pear", "plum"):
        source.learn(ask(f"what is a {word}"), word)
    answers: list[Question] = [ask(f"what is a {word}") for word in ("apple", "pear", "plum")]
    assert [text(source.draft(question)) for question in answers] == [None, "pear", "plum"]
    source.close()
