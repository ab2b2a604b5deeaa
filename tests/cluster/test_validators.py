"""Validators over HTTP: tags in the trace, their effect on agreement, one that hangs, and what cannot be honoured."""

from typing import Any

import pytest

from tests.cluster.conftest import App

pytestmark = pytest.mark.cluster

ATTEMPTS = 10
RULE_ASK = "What does parcel insurance cost?"


def ask(app: App, *validators: Any, **chain: Any) -> dict[str, Any]:
    """What the trace says; the answer itself must be there. Tags that a busy machine made late are there the next time."""
    for _ in range(ATTEMPTS):
        body = app.chat(
            RULE_ASK, seed=1, chain={"mode": "answer", "trace": True, "k": 1, "validators": list(validators), **chain}
        )
        assert body["choices"][0]["message"]["content"]
        result: dict[str, Any] = body["chain"]["answer"]
        found = [tag for draft in result["drafts"] for tag in draft["tags"]]
        if not any(tag["tag"] == "unknown" and tag["validator"] != "stuck" for tag in found):
            break
    return result


def tags(answer: dict[str, Any], name: str) -> dict[str, str]:
    """Each source's tag from one validator."""
    return {
        draft["source"]: tag["tag"] for draft in answer["drafts"] for tag in draft["tags"] if tag["validator"] == name
    }


def test_drafts_are_tagged(app: App) -> None:
    four = {"name": "ranges", "numbers": [{"unit": "coins", "max": 4}]}
    three = {"name": "ranges", "numbers": [{"unit": "coins", "max": 3}]}
    answer = ask(app, "json_syntax", "brief", four, sources=["rules"])
    assert tags(answer, "json_syntax") == {"rules": "invalid"}  # a sentence
    assert tags(answer, "brief") == {"rules": "valid"}  # an operator's own function
    assert tags(answer, "ranges") == {"rules": "valid"}
    assert tags(ask(app, three, sources=["rules"]), "ranges") == {"rules": "invalid"}  # it says 4 coins


def test_an_invalid_draft_does_not_agree_with_others(app: App) -> None:
    schema = {"name": "json_schema", "schema": {"type": "object"}}
    wide = {"thresholds": {"agree": 1.0, "diverge": 1.0, "guard": False}}  # any two would agree
    assert ask(app, **wide)["outcome"] == "consensus"
    few = {"name": "ranges", "numbers": [{"unit": "coins", "max": 3}]}
    answer = ask(app, few, **wide)
    assert tags(answer, "ranges")["rules"] == "invalid"
    assert "rules" not in {answer["drafts"][index]["source"] for index in answer["agreeing"]}
    assert tags(ask(app, schema, **wide), "json_schema")["rules"] == "invalid"


def test_one_that_hangs_is_unknown_and_the_answer_comes(app: App) -> None:
    answer = ask(app, "stuck", "json_syntax", sources=["rules"])
    assert tags(answer, "stuck") == {"rules": "unknown"}
    assert tags(answer, "json_syntax") == {"rules": "invalid"}


@pytest.mark.parametrize(
    ("validator", "says"),
    [
        ("spelling", "chain.validators.0: no validator 'spelling'; known: python_syntax"),
        ({"name": "ranges", "low": 1}, "ranges.low: not a parameter here; known: numbers, dates, decimal"),
        ({"name": "custom", "function": "os:system"}, "no validator 'custom'"),
        ({"name": "brief", "parameters": {"most": 1}}, "brief.parameters: not a parameter here"),
        ({"name": "json_schema", "schema": {"type": 1}}, "not a JSON schema"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(app: App, validator: Any, says: str) -> None:
    chain = {"mode": "answer", "validators": [validator]}
    answer = app.post("/v1/chat/completions", app.body(RULE_ASK, chain=chain))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chain.validators.0")
    assert says in answer.json()["error"]["message"]
