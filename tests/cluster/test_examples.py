"""Every example against the running application: what each must show whatever the model says."""

import json
import subprocess
import sys
from typing import Any

import pytest

from deployments.config.load import REPOSITORY
from scripts.examples_lib import law, shop, tutor
from scripts.examples_lib.cli import EXAMPLES
from tests.cluster.conftest import App

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def reports(app: App) -> dict[str, dict[str, Any]]:
    """What each example says, from the command as a user gives it."""
    command = [sys.executable, "-m", "scripts.examples_lib.cli", "all", "--url", f"{app.url}/v1", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {report["example"]: report for report in map(json.loads, done.stdout.splitlines())}


def told(report: dict[str, Any]) -> dict[str, Any]:
    """The trace of the example's request."""
    result: dict[str, Any] = report["steps"][-1]["chain"]["answer"]
    return result


def by_source(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {draft["source"]: draft for draft in told(report)["drafts"]}


def test_each_shows_drafts_distances_a_decision_and_what_came_of_it(reports: dict[str, dict[str, Any]]) -> None:
    assert list(reports) == list(EXAMPLES)
    for report in reports.values():
        answer = told(report)
        count = len(answer["drafts"])
        assert count >= 2
        assert [len(row) for row in answer["distances"]] == [count] * count
        assert answer["outcome"] in ("consensus", "leaning", "divergence")
        assert report["steps"][-1]["answer"].strip()
        assert report["shows"]
        assert report["findings"]


def test_law_names_the_document_that_a_viewpoint_rests_on(reports: dict[str, dict[str, Any]]) -> None:
    drafts = by_source(reports["law"])
    if told(reports["law"])["outcome"] == "consensus":  # both lawyers said the same: nobody else was waited for
        assert set(drafts) >= {"given#0", "given#1"}
        return
    assert set(drafts) == {"given#0", "given#1", "retrieval"}
    assert drafts["retrieval"]["note"].startswith(f"doc {law.CONTRACT.name}#")
    assert law.CLAUSE in drafts["retrieval"]["text"].lower()
    assert told(reports["law"])["decision"] in ("written", "likeliest")


def test_shop_scores_the_rule_and_the_tree_and_answers_with_a_product(reports: dict[str, dict[str, Any]]) -> None:
    answer, catalogue = told(reports["shop"]), shop.catalogue()
    drafts = by_source(reports["shop"])
    assert drafts["rules"]["note"] == "rule clicks-two-person-tent"
    assert drafts["rules"]["text"] == shop.sentence(catalogue.favourite(shop.VIEWED))
    assert (answer["outcome"], answer["decision"]) == ("divergence", "likeliest")
    standings = [draft["standing"] for draft in answer["drafts"]]
    assert len(standings) == len(catalogue.neighbours(shop.VIEWED))
    assert standings[answer["chosen"]] == max(standings)
    assert reports["shop"]["steps"][-1]["answer"] in map(shop.sentence, catalogue.neighbours(shop.VIEWED))


def test_code_that_does_not_compile_never_has_the_say(reports: dict[str, dict[str, Any]]) -> None:
    answer = told(reports["code"])
    tags = [[tag["tag"] for tag in draft["tags"]] for draft in answer["drafts"]]
    invalid = {index for index, of_draft in enumerate(tags) if of_draft == ["invalid"]}
    assert invalid >= {0, 1}
    assert tags[2] == ["valid"]
    assert all(len(of_draft) == 1 for of_draft in tags)
    assert answer["distances"][0][1] == 0.0  # they would agree
    assert not invalid & {answer["chosen"], *answer["given"], *answer["agreeing"]}
    assert answer["drafts"][0]["standing"] is None


def test_tutor_marks_what_a_proof_and_the_answer_have_in_common(reports: dict[str, dict[str, Any]]) -> None:
    answer, text = told(reports["tutor"]), reports["tutor"]["steps"][-1]["answer"]
    proofs = list(tutor.shipped()["proofs"].values())
    assert [draft["text"] for draft in answer["drafts"]] == proofs
    assert answer["decision"] == "likeliest"
    kept = tutor.scaffold(text)
    assert proofs[answer["chosen"]].startswith(kept)
    plain = text.replace(f'<draft source="given#{answer["chosen"]}">', "").replace("</draft>", "")
    assert "".join(part["text"] for part in answer["segments"]).startswith(plain)
