"""The guard of semantic acceptance: what no similarity makes up for."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.acceptance.guard import CODE, NAME, NEGATION, NUMBER, OPPOSITE, objection
from deployments.chain.acceptance.semantic import Text, similarities

PAIRS = [
    ("encrypt the file", "decrypt the file", OPPOSITE),
    ("encrypts", "decrypted", OPPOSITE),
    ("increase the dose", "decrease the dose", OPPOSITE),
    ("increasing", "decreased", OPPOSITE),
    ("includes tax", "excludes tax", OPPOSITE),
    ("enabled", "disabled", OPPOSITE),
    ("legal", "illegal", OPPOSITE),
    ("possible", "impossible", OPPOSITE),
    ("harmful", "harmless", OPPOSITE),
    ("the upper limit", "the lower limit", OPPOSITE),
    ("before the date", "after the date", OPPOSITE),
    ("the buyer pays", "the seller pays", OPPOSITE),
    ("must pay", "may pay", OPPOSITE),
    ("true", "false", OPPOSITE),
    ("upload", "download", OPPOSITE),
    ("overestimate", "underestimate", OPPOSITE),
    ("on Monday", "on Tuesday", OPPOSITE),
    ("it takes 25 minutes", "it takes 50 minutes", NUMBER),
    ("costs $5", "costs €5", NUMBER),
    ("3.5", "35", NUMBER),
    ("-4 degrees", "4 degrees", NUMBER),
    ("two cats", "three cats", NUMBER),
    ("10:30", "10:45", NUMBER),
    ("it is", "it is not", NEGATION),
    ("is", "isn't", NEGATION),
    ("is", "isn’t", NEGATION),
    ("with sugar", "without sugar", NEGATION),
    ("always works", "never works", NEGATION),
    ("in Paris", "in London", NAME),
    ("asked Ann", "asked Bob", NAME),
    ("call foo(x)", "call bar(x)", CODE),
    ("use my_name", "use my_game", CODE),
    ("x + y", "x - y", CODE),
    ("a && b", "a || b", CODE),
    ("camelCase", "camelRace", CODE),
    ("read a/b", "read a/c", CODE),
    ("os.path", "os.walk", CODE),
]  # fmt: skip


@pytest.mark.parametrize(("draft", "target", "reason"), PAIRS)
def test_differences_of_meaning_are_named_both_ways(draft: str, target: str, reason: str) -> None:
    assert objection(draft, target) == reason
    assert objection(target, draft) == reason


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        ("a large house", "a big house"),
        ("quick to answer", "swift to answer"),
        ("begins soon", "starts soon"),
        ("it costs 25 dollars", "it is priced at 25 dollars"),
        ("we do not know", "it is not known"),
        ("in Paris, of course", "certainly in Paris"),
    ],
)
def test_other_words_for_the_same_pass(draft: str, target: str) -> None:
    assert objection(draft, target) == ""


@given(st.text(max_size=40))
def test_a_text_has_nothing_against_itself(text: str) -> None:
    assert objection(text, text) == ""


@given(st.text(max_size=30), st.integers(0, 999), st.integers(0, 999))
def test_another_number_never_passes(text: str, one: int, other: int) -> None:
    left, right = f"{text} {one} of them", f"{text} {other} of them"
    assert (objection(left, right) == "") == (one == other)


class Always:
    """Finds everything similar, as far as it gets."""

    def __init__(self, fits: int = 1000) -> None:
        self.asked: list[tuple[Text, Text]] = []
        self.fits = fits

    def compare(self, pairs: Sequence[tuple[Text, Text]], budget_s: float) -> list[float]:
        self.asked += pairs
        return [0.99 if index < self.fits else math.nan for index in range(len(pairs))]


def test_the_model_is_asked_only_about_what_the_guard_lets_by() -> None:
    model = Always()
    found = similarities([("encrypt", "decrypt"), ("big", "large"), ("is", "is not")], model, 0.01)
    assert model.asked == [("big", "large")]
    assert found[1] == 0.99
    assert math.isnan(found[0])
    assert math.isnan(found[2])


def test_what_does_not_fit_the_budget_is_not_close() -> None:
    found = similarities([("big", "large"), ("fast", "swift")], Always(fits=1), 0.01)
    assert found[0] == 0.99
    assert math.isnan(found[1])


def test_nothing_to_ask_asks_nothing() -> None:
    model = Always()
    assert similarities([], model, 0.01) == []
    assert model.asked == []
