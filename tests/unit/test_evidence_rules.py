"""Rules: what they draft, what is wrong with them, and what they cost at worst."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.chain.faults import FaultPolicy
from deployments.evidence import rules
from deployments.evidence.rules import RulesError, RuleSource, load_rules
from tests.unit.evidence_fakes import ask

FAULTS = FaultPolicy()
REFUND = {
    "name": "refund-period",
    "pattern": r"\brefund\b.*\border (?P<order>[A-Z]{2}\d{4,8})\b",
    "draft": "Order {order} can be returned within 30 days.",
}


def file(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"rules": list(entries)}))
    return path


def drafted(path: Path, text: str, tenant: str = "tenant") -> str | None:
    candidate = RuleSource(path, FAULTS).draft(ask(text, tenant))
    return None if candidate is None else candidate.text


def test_named_groups_fill_the_draft(tmp_path: Path) -> None:
    source = RuleSource(file(tmp_path, REFUND), FAULTS)
    candidate = source.draft(ask("How do I get a refund for my order AB12345?"))
    assert candidate is not None
    assert (candidate.text, candidate.note) == ("Order AB12345 can be returned within 30 days.", "rule refund-period")
    assert source.draft(ask("How do I get a refund?")) is None


def test_higher_priority_first_then_the_order_of_the_file(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        {"name": "a", "pattern": "x", "draft": "a"},
        {"name": "b", "pattern": "x", "draft": "b", "priority": 2},
        {"name": "c", "pattern": "x|y", "draft": "c", "priority": 2},
    )
    assert drafted(path, "x") == "b"
    assert drafted(path, "y") == "c"


def test_a_rule_of_a_tenant_is_for_that_tenant_only(tmp_path: Path) -> None:
    path = file(tmp_path, {"name": "a", "pattern": "x", "draft": "a", "tenant": "one"})
    assert drafted(path, "x", "one") == "a"
    assert drafted(path, "x", "two") is None
    assert drafted(path, "x", "") is None


def test_a_group_that_took_no_part_leaves_the_rule_out(tmp_path: Path) -> None:
    rule = {"name": "a", "pattern": r"size(?: (?P<size>\d+))?", "draft": "Size {size}."}
    path = file(tmp_path, rule, {"name": "b", "pattern": "size", "draft": "Any size.", "priority": -1})
    assert drafted(path, "size 12") == "Size 12."
    assert drafted(path, "which size") == "Any size."


def test_braces_and_what_looks_like_code_stay_text(tmp_path: Path) -> None:
    path = file(tmp_path, {"name": "a", "pattern": "say (?P<what>.+)", "draft": "{{{what}}}"})
    assert drafted(path, "say {0.__class__} $HOME") == "{{0.__class__} $HOME}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"patern": "x"}, "rules[0].patern: unknown key; did you mean 'pattern'?"),
        ({"pattern": "(x"}, "rule 'refund-period': pattern: missing )"),
        ({"pattern": ".*", "draft": "x"}, "matches the empty text"),
        ({"draft": "{odrer}"}, "rule 'refund-period': draft: no group 'odrer' in the pattern; did you mean 'order'?"),
        ({"draft": "{order.__class__}"}, "{order.__class__} must be the name of a group"),
        ({"draft": "{order!r}"}, "must be the name of a group"),
        ({"draft": "{"}, "write {{ and }} for braces"),
        ({"draft": ""}, "rules[0].draft: String should have at least 1 character"),
        ({"priority": "high"}, "rules[0].priority: Input should be a valid integer"),
        ({"name": 7}, "rules[0].name: Input should be a valid string"),
    ],
)
def test_what_is_wrong_is_named_with_its_rule(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    with pytest.raises(RulesError) as error:
        load_rules(file(tmp_path, REFUND | change), FAULTS)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- a", "must be a mapping with `rules`"),
        ("rules: {a: [}", "rules.yaml:1:13: not valid YAML"),
        ("rule: []", "rule: unknown key; did you mean 'rules'?"),
        ("rules: !!python/object/apply:os.system [echo]", "not valid YAML"),
    ],
)
def test_files_that_are_no_rules(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(content)
    with pytest.raises(RulesError) as error:
        load_rules(path, FAULTS)
    assert expected in str(error.value)


def test_two_rules_of_one_name_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="two rules are named 'refund-period'"):
        load_rules(file(tmp_path, REFUND, REFUND), FAULTS)
    with pytest.raises(RulesError, match="cannot be read: No such file"):
        load_rules(tmp_path / "none.yaml", FAULTS)


def test_a_pattern_that_backtracks_without_end_is_given_up_and_then_left_out(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        {"name": "bad", "pattern": r"(?:(?:a|aa)+)+c|(.*)*\1x", "draft": "bad", "priority": 1},
        {"name": "good", "pattern": "b", "draft": "good"},
    )
    source = RuleSource(path, FAULTS)
    for _ in range(FAULTS.circuit_failures + 2):
        candidate = source.draft(ask("a" * 10_000 + "b"))
        assert candidate is not None
        assert candidate.text == "good"
    assert source.stats()["timeouts"] == FAULTS.circuit_failures


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "CHECK_EVERY_S", 0.0)
    path = file(tmp_path, {"name": "a", "pattern": "x", "draft": "one"})
    source = RuleSource(path, FAULTS)

    def says() -> str | None:
        candidate = source.draft(ask("x"))
        return None if candidate is None else candidate.text

    assert says() == "one"
    file(tmp_path, {"name": "a", "pattern": "x", "draft": "two times"})
    assert says() == "two times"
    path.write_text("rules: [")
    assert says() == "two times"
    path.unlink()
    assert says() == "two times"
    assert source.stats()["reloads_failed"] == 2
    other = tmp_path / "other"
    other.write_text(yaml.safe_dump({"rules": [{"name": "a", "pattern": "x", "draft": "three"}]}))
    os.replace(other, path)
    assert says() == "three"


def test_looking_at_the_file_is_not_done_for_every_question(tmp_path: Path) -> None:
    path = file(tmp_path, {"name": "a", "pattern": "x", "draft": "one"})
    source = RuleSource(path, FAULTS)
    file(tmp_path, {"name": "a", "pattern": "x", "draft": "two"})
    began = time.monotonic()
    candidate = source.draft(ask("x"))
    if time.monotonic() - began < rules.CHECK_EVERY_S / 2:
        assert candidate is not None
        assert candidate.text == "one"
