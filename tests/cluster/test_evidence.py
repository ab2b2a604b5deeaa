"""The evidence deployment in Serve: its index outlives its replica, and one replica takes over from another."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.app import build_evidence
from deployments.config.models import Evidence
from tests.cluster.conftest import App, wait_until
from tests.models import model
from tests.unit.evidence_fakes import ask, wire

pytestmark = pytest.mark.cluster

NAME = "evidence"


class Evidences:
    """An application of the evidence deployment alone, on the running cluster."""

    def __init__(self, handle: Any, folder: Path) -> None:
        self._handle = handle
        self.folder = folder

    def draft(self, text: str, tenant: str = "one") -> dict[str, dict[str, Any]]:
        """What each source says."""
        question = wire(ask(text, tenant))
        answers = self._handle.draft.remote(question, None, 2.0).result(timeout_s=60)
        return {answer["source"]: answer for answer in answers}

    def learn(self, text: str, answer: str, tenant: str = "one") -> None:
        self._handle.learn.remote(wire(ask(text, tenant)), answer).result(timeout_s=60)

    def stats(self) -> dict[str, dict[str, float]]:
        result: dict[str, dict[str, float]] = self._handle.stats.remote().result(timeout_s=60)
        return result


@pytest.fixture(scope="module")
def evidence(app: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evidences]:
    from ray import serve

    folder = tmp_path_factory.mktemp("evidence")
    (folder / "documents").mkdir()
    (folder / "documents" / "ferry.md").write_text("# Ferry\n\nThe crossing takes forty minutes.")
    rule = {"name": "fare", "pattern": r"fare to (?P<town>\w+)", "draft": "Ask in {town}."}
    (folder / "rules.yaml").write_text(json.dumps({"rules": [rule]}))  # JSON is YAML
    spec = Evidence(
        pool="evidence",
        documents=folder / "documents",
        index=folder / "index",
        history=True,
        rules=folder / "rules.yaml",
        sentences=model("sentences"),
    )
    application = build_evidence(app.config.model_copy(update={"evidence": spec}))
    yield Evidences(serve.run(application, name=NAME, route_prefix=None), folder)
    serve.delete(NAME)


def lock_holder(evidence: Evidences) -> int:
    return int((evidence.folder / "index" / "history" / "lock").read_text())


def test_every_source_over_a_handle(evidence: Evidences) -> None:
    wait_until(lambda: evidence.stats()["retrieval"].get("documents") == 1)
    answers = evidence.draft("How long does the crossing with the ferry take?")
    assert answers["retrieval"]["text"] == "The crossing takes forty minutes."
    assert answers["rules"]["reason"] == "no_match"
    assert evidence.draft("What is the fare to Halvik?")["rules"]["text"] == "Ask in Halvik."


def test_an_answer_outlives_a_killed_replica(evidence: Evidences) -> None:
    evidence.learn("When does the last ferry leave?", "At nine in the evening.")
    wait_until(lambda: evidence.stats()["retrieval"]["history_answers"] == 1)
    before = lock_holder(evidence)
    os.kill(before, signal.SIGKILL)

    def answered() -> bool:
        try:
            answer = evidence.draft("When does the last ferry leave?")["retrieval"]
        except Exception:  # the handle may still point at the one that is gone
            time.sleep(0.5)
            return False
        return bool(answer["text"] == "At nine in the evening.")

    wait_until(answered, timeout_s=90)
    assert lock_holder(evidence) != before
    assert (
        evidence.draft("When does the last ferry leave?", tenant="two")["retrieval"]["text"]
        != "At nine in the evening."
    )
