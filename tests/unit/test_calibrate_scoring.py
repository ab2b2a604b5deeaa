"""Items that can be checked, and what counts as a right answer."""

from pathlib import Path

import pytest

from scripts.calibrate_lib.item_sets import GOLD_SETS, SETS, Item, digest, load_items
from scripts.calibrate_lib.scoring import answer, code, defined, number, says, score


def item(check: str, **more: object) -> Item:
    return Item(id="x-1", set="x", prompt="?", max_tokens=8, check=check, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0),
        ("2 + 3 = 5.", 5.0),
        ("First 7, then -4", -4.0),
        ("It costs 1,200 coins", 1200.0),
        ("3.50", 3.5),
        ("none at all", None),
        ("version 1.2.3", None),
    ],
)
def test_the_last_number_counts(text: str, value: float | None) -> None:
    assert number(text) == value


def test_numbers_are_right_by_value_and_absent_ones_are_wrong() -> None:
    assert score(item("number", gold="5"), "2 + 3 = 5.0") is True
    assert score(item("number", gold="5"), "5 or 6") is False
    assert score(item("number", gold="5"), "no idea") is False


@pytest.mark.parametrize(
    ("text", "words", "there"),
    [
        ("From track 4.", "4", True),
        ("From track 14", "4", False),
        ("It weighs 4.5 kg", "4", False),
        ("It weighs 3.4 kg", "4", False),
        ("At 18:40", "18:40", True),
        ("At 18:40:30", "18:40", False),
        ("The BLUE jar", "blue jar", True),
        ("bluejay", "blue", False),
        ("K-5521", "5521", False),
    ],
)
def test_words_are_said_as_a_whole(text: str, words: str, there: bool) -> None:
    assert says(text, words) is there


def test_naming_everything_is_no_extraction() -> None:
    field = item("field", gold="beans", others=("onions",))
    assert score(field, "Beans.") is True
    assert score(field, "carrots") is False
    assert score(field, "Either beans or onions") is False


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("def add(a, b):\n    return a + b", True),
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.", True),
        ("```python\ndef add(a, b):\n    return a + b", True),  # cut at its length
        ("```\ndef add(a, b):\n    return a +\n```", False),
        ("def plus(a, b):\n    return a + b", False),
        ("Sure", False),
        ("def add(a, b):\n    return a + b\nThis adds two numbers.", False),
        ("if True:\n    def add(a, b): pass", False),
        ("x = '\0'", False),
    ],
)
def test_python_parses_and_defines_what_was_asked(text: str, right: bool) -> None:
    assert score(item("python", needs=("add",)), text) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a": 1, "b": [2]}', True),
        ('```json\n{"a": 1, "b": 2}\n```', True),
        ('{"a": 1}', False),
        ('{"a": 1, "b": }', False),
        ('["a", "b"]', False),
        ("[" * 5000, False),
        ("", False),
    ],
)
def test_json_has_the_keys(text: str, right: bool) -> None:
    assert score(item("json", needs=("a", "b")), text) is right


def test_only_the_first_block_counts() -> None:
    assert code("```py\na\n```\nor\n```py\nb\n```") == "a"
    assert defined("class A:\n  pass\nasync def b(): pass\nc = 1") == {"A", "b"}


def test_two_answers_agree_by_what_counts() -> None:
    assert answer(item("number", gold="5"), "It is 5.") == answer(item("number", gold="5"), "2 + 3 = 5")
    assert answer(item("json", needs=("a",)), '{"a": 1, "b": 2}') == answer(item("json"), '{"b": 2,\n "a": 1}')
    assert answer(item("none"), "The  Sky\n") == answer(item("none"), "the sky")
    assert answer(item("python"), "def f(): pass  \n") == answer(item("python"), "def f(): pass")
    assert answer(item("python"), "def f(): pass") != answer(item("python"), "def f(): ...")
    assert score(item("none"), "anything") is None


@pytest.mark.parametrize("name", SETS)
def test_every_set_loads(name: str) -> None:
    items = load_items(name, 48)
    assert len(items) >= 20
    assert len({each.id for each in items}) == len({each.seed for each in items}) == len(items)
    assert all(each.check == "none" for each in items) is (name not in GOLD_SETS)


@pytest.mark.parametrize("name", GOLD_SETS)
def test_a_perfect_answer_scores_and_the_prompt_itself_does_not(name: str) -> None:
    """The gold answer is right, and repeating the question is not."""
    for each in load_items(name, 48):
        if each.check == "python":
            perfect = f"```python\ndef {each.needs[0]}(x):\n    return x\n```"
        elif each.check == "json":
            perfect = "{" + ", ".join(f'"{key}": 1' for key in each.needs) + "}"
        else:
            perfect = f"It is {each.gold}."
        assert score(each, perfect) is True, each.id
        assert score(each, each.prompt) is False, each.id


def test_a_broken_item_is_named(tmp_path: Path) -> None:
    head = "set: arithmetic\ncheck: number\nmax_tokens: 8\nitems:\n"
    for line, why in (
        ("  - {id: a-1, prompt: q}\n", "a-1"),
        ("  - {id: a-1, prompt: q, gold: 5}\n", "a-1"),
        ("  - {id: a-1, prompt: q, gold: '5', check: magic}\n", "a-1"),
        ("  - {id: a-1, prompt: q, gold: '5'}\n" * 2, "same id"),
    ):
        (tmp_path / "arithmetic.yaml").write_text(head + line)
        with pytest.raises(ValueError, match=why):
            load_items("arithmetic", 48, folder=tmp_path)
    with pytest.raises(ValueError, match="there are: arithmetic"):
        load_items("poems", 48)


def test_a_digest_follows_the_items() -> None:
    items = load_items("prose", 48)
    assert digest(items) == digest(load_items("prose", 48))
    assert len({digest(items), digest(items[:-1]), digest(load_items("prose", 49))}) == 3
