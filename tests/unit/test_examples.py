"""The examples' own judgement of what a model said, their data, and the config they run on."""

import io
from pathlib import Path
from typing import Any

import pytest
import regex
from rich.console import Console

from deployments.chain.faults import FaultPolicy
from deployments.config import AppConfig
from deployments.config.serve_file import read
from deployments.demo.client import Answer
from deployments.evidence.passages import passages
from deployments.evidence.rules import load_rules
from deployments.evidence.validators.python_syntax import PythonSyntax
from scripts.examples_lib import cli, code, law, shop, show, tutor
from scripts.examples_lib.arithmetic import NotArithmetic, values, wrong_equations
from scripts.examples_lib.config import write_config
from scripts.examples_lib.example import Finding, Report, Step


def draft(source: str, text: str, **changes: Any) -> dict[str, Any]:
    return {"source": source, "text": text, "finished": True, "note": "", "tags": [], "standing": None, **changes}


def step(text: str, drafts: list[dict[str, Any]], **told: Any) -> Step:
    answer = Answer(text, 5, 0.1, {"rounds": [], "answer": {"drafts": drafts, "chosen": None, **told}})
    return Step(question="?", answer=answer)


def mistakes(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if not finding.right]


class TestArithmetic:
    @pytest.mark.parametrize(
        "text",
        [
            "Their sum is 2m + 1 + 2n + 1 = 2m + 2n + 2 = 2(m + n + 1).",
            "So 3 + 5 = 8, and 2 × 4 = 8.",
            "Let n = 2k + 1 be odd.",
            "It has a = sign in it = 7 and == 3",
            "(a + b)c = ac + bc",
            "((((((= 3",
        ],
    )
    def test_nothing_wrong(self, text: str) -> None:
        assert wrong_equations(text) == []

    @pytest.mark.parametrize("text", ["3 + 5 = 9", "2m + 1 + 2n + 1 = 2(m + n)", "x + x = 2x = 3x", "-(a - b) = a - b"])
    def test_wrong(self, text: str) -> None:
        assert wrong_equations(f"We know that {text}, so there.")

    def test_a_function_is_tried(self) -> None:
        text = 'def f(x: int) -> bool:\n    """Odd?"""\n    if x % 2 == 0:\n        return False\n    return not x < 0'
        assert values(text, "f", [1, 2, -1]) == [True, False, False]
        assert values("def f(x):\n    return 1 % x", "f", [2, 0])[0] == 1

    @pytest.mark.parametrize(
        "text",
        [
            "def f(x):\n    return open(x)",
            "def f(x):\n    return x.__class__",
            "import os\ndef g(x):\n    return 1",
            "def f(x):\n    while True: pass",
            "def f(x):\n    return 'a' * x",
            "def f(x):\n    return 9 ** x",
            "def f(x=print()):\n    return x",
            "@print\ndef f(x):\n    return x",
            "def f(x):\n    return (lambda: x)()",
            "def f(x):\n    return 10000000000 * x",
        ],
    )
    def test_what_does_more_than_compute_is_not_executed(self, text: str) -> None:
        with pytest.raises(NotArithmetic):
            values(text, "f", [1])

    def test_an_annotation_is_not_executed(self) -> None:
        assert values("def f(x: open('nowhere')) -> print(1):\n    return x", "f", [4]) == [4]


class TestData:
    def test_the_clause_that_decides_is_one_passage(self) -> None:
        found = [passage for passage in passages(law.CONTRACT.read_text()) if law.CLAUSE in passage.text.lower()]
        assert len(found) == 1
        assert law.yes_or_no("No, because of the fog.") == law.GOLD

    def test_every_product_has_a_rule_that_drafts_what_was_clicked_most(self) -> None:
        catalogue = shop.catalogue()
        assert catalogue.favourite(shop.VIEWED) == "foam mat"
        for rule in shop.rules():
            assert sum(bool(regex.search(rule["pattern"], f"looks at the {name}.")) for name in catalogue.branch) == 1
        neighbours = catalogue.neighbours(shop.VIEWED)
        assert catalogue.favourite(shop.VIEWED) in neighbours
        assert shop.VIEWED not in neighbours
        assert {catalogue.branch[name] for name in neighbours} == set(catalogue.branch.values())

    def test_two_snippets_are_equal_and_broken_the_third_is_not(self) -> None:
        first, second, third = code.shipped()
        assert first == second
        assert PythonSyntax().check(first, {}).tag == "invalid"
        assert PythonSyntax().check(third, {}).tag == "valid"
        assert mistakes(code.of_code(third)) == [
            "The answer's function is wrong about 1900: True, not False; 2100: True, not False."
        ]

    def test_the_shipped_proofs_compute_rightly(self) -> None:
        assert not any(wrong_equations(proof) for proof in tutor.shipped()["proofs"].values())


class TestFindings:
    def test_law(self) -> None:
        contract = law.CONTRACT.read_text()
        found = [
            draft("given#0", "Yes. It is 99 crowns."),
            draft("retrieval", "No late fee is due while fog …", note="doc hire_agreement.md#2 similarity 0.7"),
        ]
        said = law.findings(step("No, there was fog.", found), contract)
        assert [item.right for item in said] == [True, True, False, False, True]
        assert "numbers from nowhere: 99" in said[2].text
        assert "hirer's lawyer" in said[3].text  # who wrote nothing
        nothing = law.findings(step("Perhaps.", [], reasons={"retrieval": "no_match"}), contract)
        assert "no_match" in mistakes(nothing)[0]
        assert "neither yes nor no" in mistakes(nothing)[1]

    @pytest.mark.parametrize(
        ("text", "verdict"),
        [
            ("No, there was fog.", "no"),
            ("Answer: yes. But there is no fee.", "yes"),
            ("The hirer must pay 15 crowns.", "yes"),
            ("The hirer does not have to pay. There was fog.", "no"),
            ("The hirer must pay. He need not pay.", "both"),
            ("There is no fog.", ""),
        ],
    )
    def test_yes_and_no_are_read_off_the_words(self, text: str, verdict: str) -> None:
        assert law.yes_or_no(text) == verdict

    def test_shop(self) -> None:
        found = [
            draft("rules", shop.sentence("foam mat"), standing=-2.0),
            draft("given#0", shop.sentence("gas stove"), standing=-1.0),
        ]
        said = shop.findings(step(shop.sentence("gas stove"), found), shop.catalogue(), "foam mat")
        assert [item.right for item in said] == [True, False, True]
        assert "number 2" in said[1].text

    def test_code(self) -> None:
        bad = {"validator": "python_syntax", "tag": "invalid", "why": "line 2: a slip"}
        found = [draft("given#0", "x", tags=[bad]), draft("given#1", "x", tags=[{**bad, "tag": "valid"}])]
        said = code.findings(step("def is_leap(year)", found, given=[0], agreeing=[]))
        assert [item.right for item in said] == [True, False, False, False]

    def test_tutor(self) -> None:
        proof = [draft("given#0", "Let the sum be 2 + 2 = 4.")]
        text = '<draft source="given#0">Let the sum</draft> be 2 + 2 = 5.'
        said = tutor.findings(step(text, proof, chosen=0))
        assert [item.right for item in said] == [False, False]
        assert "0 of 1 lines (11 of 25 characters)" in said[0].text
        assert tutor.scaffold("Let the sum") == ""

    def test_the_end_says_plainly_what_went_wrong(self) -> None:
        right, wrong = Finding(right=True, text="a"), Finding(right=False, text="b")
        assert "Nothing" in show.verdict(Report(steps=[], shows="", findings=[right]))
        assert "1 of" not in show.verdict(Report(steps=[], shows="", findings=[right, wrong]))
        assert "one thing" in show.verdict(Report(steps=[], shows="", findings=[right, wrong]))


class TestShown:
    def test_everything_is_there_and_nothing_is_markup(self) -> None:
        tag = {"validator": "python_syntax", "tag": "invalid", "why": "line 2: [bold]"}
        drafts = [
            draft("given#0", "[red]one[/red]", tags=[tag]),
            draft("model:a#0", "two", finished=False, note="rule [x]", standing=-1.5),
            draft("rules", "three"),
        ]
        told = {
            "outcome": "leaning",
            "decision": "likeliest",
            "chosen": 1,
            "distances": [[0, 0.25, 0.5], [0.25, 0, 0.75], [0.5, 0.75, 0]],
            "reasons": {"model:a#0": "deadline", "retrieval": "no_match"},
            "distances_to_answer": [0.5, 0.125, 1.0],
        }
        rounds = [{"accepted_text": "two ", "own_text": "[b]more<|end|>"}]
        answer = Answer("two [b]more", 3, 0.1, {"rounds": rounds, "answer": {"drafts": drafts, **told}})
        found = Report(
            steps=[Step(question="[why]?", answer=answer, names={"given#0": "mine"})],
            shows="That.",
            findings=[Finding(right=False, text="It is [wrong].")],
            unchecked="The rest.",
        )
        console = Console(file=io.StringIO(), width=100)
        show.report(console, "name", found)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        for part in (
            "[why]?",
            "[red]one[/red]",
            "0  mine",
            "two …",
            "rule [x]",
            "log probability -1.50",
            "invalid: line 2: [bold]",
            "0.75",
            "chosen: model:a#0",
            "only part of a draft by model:a#0: deadline",
            "no draft by retrieval: no_match",
            "two [b]more ",
            "nearest draft: model:a#0, distance 0.12",
            "✗ It is [wrong].",
            "? The rest.",
            "one thing went wrong",
        ):
            assert part in text, part
        assert "<|end|>" not in text


class TestCommand:
    def test_the_config_is_one_that_serves(self, tmp_path: Path) -> None:
        content = read(write_config(tmp_path / "new"))
        args = content["applications"][0]["args"]
        evidence = AppConfig.model_validate(args).evidence
        assert evidence is not None
        assert evidence.rules is not None
        assert evidence.documents is not None
        assert len(load_rules(evidence.rules, FaultPolicy())) == len(shop.catalogue().branch)
        assert [file.name for file in evidence.documents.iterdir()] == [law.CONTRACT.name]

    def test_without_a_name_they_are_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 0
        assert len(capsys.readouterr().out.strip().splitlines()) == len(cli.EXAMPLES) + 1

    def test_an_unknown_name_tells_those_there_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["lawn"])
        assert "law, shop, code, tutor" in capsys.readouterr().err
