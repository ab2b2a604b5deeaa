"""Retrieval: the passage of a document, or the answer to an earlier question, that is nearest in meaning to the question."""

import logging
import math
import threading

from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.faults import FaultPolicy
from deployments.evidence.documents import Documents, Encoder, Floats
from deployments.evidence.history import History
from deployments.evidence.same_question import same_question
from deployments.evidence.source import MAX_ANSWER_CHARS, standalone

logger = logging.getLogger(__name__)


class RetrievalSource:
    """Drafts from documents, which all tenants share, and from each tenant's own past answers."""

    name = "retrieval"

    def __init__(
        self,
        model: Encoder,
        faults: FaultPolicy,
        *,
        documents: Documents | None = None,
        history: History | None = None,
        similarity: float = 0.55,
        answer_similarity: float = 0.9,
    ) -> None:
        self._model = model
        self._faults = faults
        self._documents = documents
        self._history = history
        self._similarity = similarity
        self._answer_similarity = answer_similarity
        self._stop = threading.Event()
        self._refresher: threading.Thread | None = None

    def start(self) -> None:
        """Keep the index up to date from now on, in a thread of its own."""
        self._refresher = threading.Thread(target=self._refresh, name="evidence-refresh", daemon=True)
        self._refresher.start()

    def _refresh(self) -> None:
        while not self._stop.is_set():
            try:
                if self._documents is not None:
                    self._documents.refresh(self._stop.is_set)
                if self._history is not None:
                    self._history.prune()
            except Exception:  # the next one may go better; what is indexed stays usable
                logger.exception("refreshing the index failed")
            self._stop.wait(self._faults.evidence_refresh_s)

    def draft(self, question: Question) -> Candidate | None:
        """Raises TimeoutError where the sentence model does not get to it in time."""
        vector = self._vector(question.text)
        return self._answer(question, vector) or self._passage(vector)

    def _vector(self, text: str) -> Floats:
        vector: Floats = self._model.embed([text], self._faults.evidence_deadline_s)[0]
        if math.isnan(vector[0]):
            raise TimeoutError("the sentence model was not done in time")
        return vector

    def _answer(self, question: Question, vector: Floats) -> Candidate | None:
        """The answer to the nearest earlier question that asks for the same thing as far as words can tell."""
        if self._history is None or not standalone(question):
            return None
        for earlier, similarity in self._history.find(question, vector):
            if similarity < self._answer_similarity:
                break
            if same_question(question.text, earlier.question):
                self._history.used(question, earlier)
                note = f"answer to an earlier question, similarity {similarity:.2f}"
                return Candidate(source=self.name, text=earlier.answer, note=note)
        return None

    def _passage(self, vector: Floats) -> Candidate | None:
        found = self._documents.find(vector) if self._documents is not None else None
        if found is None or found.similarity < self._similarity:
            return None
        note = f"doc {found.document}#{found.number} similarity {found.similarity:.2f}"
        return Candidate(source=self.name, text=found.passage.text, note=note)

    def learn(self, question: Question, answer: str) -> None:
        if self._history is not None and question.tenant and standalone(question) and len(answer) <= MAX_ANSWER_CHARS:
            self._history.learn(question, answer, self._vector(question.text))

    def stats(self) -> dict[str, float]:
        documents = self._documents.stats() if self._documents is not None else {}
        history = self._history.stats() if self._history is not None else {}
        return {**documents, **{f"history_{name}": value for name, value in history.items()}}

    def close(self) -> None:
        self._stop.set()
        if self._refresher is not None:
            self._refresher.join(self._faults.drain_timeout_s)
        for held in (self._documents, self._history):
            if held is not None:
                held.close()
