"""The question set and its checkers: golds are what computing them gives, and right answers are told from wrong ones."""

import ast
import contextlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.answers_lib import checkers
from scripts.answers_lib.questions import WORDINGS, Question, load

SET = load()
NAMES = {"max": max, "min": min}


def compute(expression: str) -> Any:
    """The value of an expression of our own file that uses nothing but literals, operators, max and min."""
    tree = ast.parse(expression, mode="eval")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names <= set(NAMES)
    return eval(compile(tree, "<compute>", "eval"), {"__builtins__": {}}, NAMES)


@pytest.mark.parametrize("question", SET.questions, ids=lambda question: question.id)
def test_golds_are_right(question: Question) -> None:
    if question.kind in ("arithmetic", "units", "ordering", "rules"):
        assert question.compute
    if question.compute:
        value = compute(question.compute)
        assert question.right == (checkers.number(str(value)) if question.check == "number" else value)
    if question.kind == "code":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(question.code, question.id, "exec"), {})
        assert printed.getvalue().strip() == question.gold
    if question.kind == "extraction":
        assert question.gold in question.text
    if question.check == "choice":
        assert question.gold in question.options
        assert len(question.options) > 1


def test_the_set_is_large_and_even() -> None:
    assert len(SET.questions) >= 60
    kinds = Counter(question.kind for question in SET.questions)
    assert set(kinds) == set(SET.instructions)
    assert min(kinds.values()) >= 9
    prompts = [SET.prompt(question, wording) for question in SET.questions for wording in range(WORDINGS)]
    assert len(set(prompts)) == WORDINGS * len(SET.questions)
    answers = Counter(question.gold for question in SET.questions if question.kind == "yes_no")
    assert answers["yes"] >= 4
    assert answers["no"] >= 4


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("43", "43"),
        ("43.", "43"),
        ("The answer is 43.", "43"),
        ("17 + 26 = 43", "43"),
        ("**43**", "43"),
        ("43 is the sum of 17 and 26.", "43"),
        ("The sum of 17 and 26 is 43.", "43"),
        ("17 plus 26 makes 43", "43"),
        ("1,250.50 coins", "1250.5"),
        ("-4", "-4"),
        ("\N{MINUS SIGN}4", "-4"),
        ("0.0", "0"),
        ("room 214", "214"),
        ("I do not know.", None),
        ("", None),
        ("TX20", None),
        ("The answer is 12. It is 12 because 3 + 9 = 12.", "12"),
        ("100", "100"),
    ],
)
def test_numbers(text: str, want: str | None) -> None:
    assert checkers.number(text) == want


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["{}", "The answer is {}.", "3 + 4 = {}", "{} is it", "It makes {}"])
)
def test_any_integer_is_read(value: int, form: str) -> None:
    assert checkers.number(form.format(value)) == str(value)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Yes", "yes"),
        ("No, it is not.", "no"),
        ("no", "no"),
        ("The shop is closed, so no.", "no"),
        ("Yes, there is no milk.", "yes"),
        ("There are reasons for yes and no.", None),
        ("It could be yes or no. The answer is no.", "no"),
        ("Nobody knows.", None),
        ("", None),
    ],
)
def test_choices(text: str, want: str | None) -> None:
    assert checkers.choice(text, ("yes", "no")) == want


def test_exact_and_contains() -> None:
    assert checkers.exact("The answer is: the Kitchen!\nBecause of the text.") == "kitchen"
    assert checkers.exact(" \n") is None
    assert checkers.contains("The dog is called Pepper.", "Pepper") == "pepper"
    assert checkers.contains("Peppermint", "Pepper") == "peppermint"
    assert checkers.contains("", "Pepper") is None


@given(st.text(max_size=200))
def test_any_text_can_be_read(text: str) -> None:
    for question in SET.questions[::9]:
        reading = question.read(text)
        assert reading is None or reading


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ask": ["a", "a", "b", "c", "d"]}, "5 different wordings"),
        ({"kind": "riddle"}, "no kind 'riddle'; known: k"),
        ({"gold": "many"}, "does not pass its check"),
        ({"golden": "1"}, "unknown field"),
    ],
)
def test_wrong_questions_are_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    question = {"id": "q", "kind": "k", "gold": "1", "check": "number", "ask": list("abcde"), **change}
    path = tmp_path / "set.yaml"
    path.write_text(str({"instructions": {"k": "Answer."}, "questions": [question]}))
    with pytest.raises(ValueError, match=says):
        load(path)


def test_choosing() -> None:
    assert len(SET.chosen(None, 2)) == 2 * len(SET.instructions)
    assert {question.kind for question in SET.chosen(["code"], None)} == {"code"}
    with pytest.raises(ValueError, match="no kind 'riddles'; known: arithmetic"):
        SET.chosen(["riddles"], None)
