"""Templates: shapes of questions, and the answers that are drafted from them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.answer.candidate import Question
from deployments.evidence.shape import shape_of, template_of
from deployments.evidence.templates import Limits, TemplateSource
from tests.unit.evidence_fakes import ask

Turns = Sequence[tuple[str, str]]


def drafted(source: TemplateSource, question: Question) -> str | None:
    candidate = source.draft(question)
    return None if candidate is None else candidate.text


def taught(*pairs: tuple[str, str], limits: Limits | None = None) -> TemplateSource:
    source = TemplateSource(limits)
    for question, answer in pairs:
        source.learn(ask(question), answer)
    return source


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Convert 3 km to miles", ("3",)),
        ("What is 12.5% of $1,200?", ("12.5%", "$1,200")),
        ("Is 2024-02-29 a date? And 10:30?", ("2024-02-29", "10:30")),
        ('Reverse "hello world" and `x+1`', ("hello world", "x+1")),
        ("Don't spell 'cat' or the dogs' names", ("cat",)),
        ("Where does Maria Silva live?", ("Maria Silva",)),
        ("Does Maria live in Rome?", ("Maria", "Rome")),
        ("Maria Silva lives where?", ("Silva",)),
        ("May I visit Rome?", ("Rome",)),
        ("List the capitals", ()),
        ("It is 5km away. Then what?", ("5",)),
    ],
)
def test_values_of_a_question(text: str, values: tuple[str, ...]) -> None:
    shape = shape_of(text)
    assert shape is not None
    assert shape.values == values


def test_one_shape() -> None:
    shapes = [shape_of("Convert 3 km  to Rome time"), shape_of("convert 40 km to Oslo time")]
    assert shapes[0] is not None
    assert shapes[1] is not None
    assert shapes[0].pattern == shapes[1].pattern
    assert shape_of("number " * 3 + "1 " * 33) is None


def test_two_answers_that_differ_in_their_values_only_make_a_template() -> None:
    source = taught(
        ("Where is order AB12?", "x"),
        ("Book a table for 2 in Rome", "A table for 2 people in Rome is booked."),
        ("Book a table for 4 in Oslo", "A table for 4 people in Oslo is booked."),
    )
    candidate = source.draft(ask("Book a table for 7 in New York"))
    assert candidate is not None
    assert candidate.text == "A table for 7 people in New York is booked."
    assert (candidate.source, candidate.note) == ("templates", "shape of 2 answers, earlier answers")


def test_one_answer_proves_nothing_but_itself() -> None:
    source = taught(("Is 7 prime?", "Yes, 7 is prime."))
    assert drafted(source, ask("Is 8 prime?")) is None
    assert drafted(source, ask("Is 7 prime?")) == "Yes, 7 is prime."


def test_answers_that_differ_in_what_they_conclude_make_none() -> None:
    source = taught(("What is 1 plus 2?", "1 plus 2 is 3."), ("What is 2 plus 6?", "2 plus 6 is 8."))
    assert drafted(source, ask("What is 4 plus 5?")) is None


def test_a_slot_that_could_be_one_of_two_values_is_not_filled_until_it_is_clear() -> None:
    source = taught(("Copy 3 to 3", "3 is copied."), ("Copy 4 to 4", "4 is copied."))
    assert drafted(source, ask("Copy 5 to 6")) is None
    assert drafted(source, ask("Copy 6 to 6")) == "6 is copied."
    source.learn(ask("Copy 1 to 2"), "1 is copied.")
    assert drafted(source, ask("Copy 5 to 6")) == "5 is copied."


def test_parts_of_words_and_numbers_are_no_values() -> None:
    template = template_of("12 of 112, 1.2, 12.5 and 12.", ("12",))
    assert template.literals == ("", " of 112, 1.2, 12.5 and ", ".")


def test_the_conversation_itself_is_enough_without_a_tenant() -> None:
    before: Turns = [
        ("user", "Greet Anna"),
        ("assistant", "Good morning, Anna!"),
        ("user", "Greet Bob"),
        ("assistant", "Good morning, Bob!"),
    ]
    source = TemplateSource()
    candidate = source.draft(ask("Greet Eve", tenant="", before=before))
    assert candidate is not None
    assert (candidate.text, candidate.note) == ("Good morning, Eve!", "shape of 2 answers, this conversation")
    assert source.draft(ask("Greet Eve", tenant="", before=before[:2])) is None


def test_tenants_and_instructions_keep_to_themselves() -> None:
    source = taught(("Greet Anna", "Hello Anna"), ("Greet Bob", "Hello Bob"))
    assert drafted(source, ask("Greet Eve")) == "Hello Eve"
    assert drafted(source, ask("Greet Eve", tenant="other")) is None
    assert drafted(source, ask("Greet Eve", tenant="")) is None
    assert drafted(source, ask("Greet Eve", before=[("system", "Be rude.")])) is None
    source.learn(ask("Greet Tom", tenant=""), "Hello Tom")
    assert source.stats() == {"tenants": 1, "shapes": 1}


def test_what_leans_on_the_conversation_is_not_learned() -> None:
    source = TemplateSource()
    before: Turns = [("user", "Is tea hot?"), ("assistant", "Yes.")]
    source.learn(ask("Why?", before=before), "Water.")
    assert source.stats() == {"tenants": 0, "shapes": 0}


def test_memory_is_bounded() -> None:
    source = TemplateSource(Limits(tenants=2, shapes=2, answers=2, answer_chars=20))
    for number, word in enumerate(["apples", "pears", "plums"]):
        source.learn(ask(f"Count {word}", tenant="one"), str(number))
    assert drafted(source, ask("Count apples", tenant="one")) is None
    assert drafted(source, ask("Count plums", tenant="one")) == "2"
    source.learn(ask("Count figs", tenant="one"), "x" * 21)
    for tenant in ("two", "three"):
        source.learn(ask("Count figs", tenant=tenant), "1")
    assert source.stats() == {"tenants": 2, "shapes": 2}
    assert drafted(source, ask("Count plums", tenant="one")) is None


@settings(deadline=None)
@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_has_a_shape_and_fills_its_own_template(question: str, answer: str) -> None:
    shape = shape_of(question)
    if shape is not None:
        assert template_of(answer, shape.values).filled(shape.values) == answer


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 10**6), min_size=3, max_size=3, unique=True),
    st.sampled_from(["Order {} is late, {}.", "{}", "I saw {} and {}"]),
)
def test_a_template_says_the_new_value_and_never_an_old_one(numbers: list[int], form: str) -> None:
    first, second, new = map(str, numbers)
    source = taught(*((f"Where is order {n}?", form.replace("{}", n)) for n in (first, second)))
    assert drafted(source, ask(f"Where is order {new}?")) == form.replace("{}", new)
