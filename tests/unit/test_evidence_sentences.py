"""Where sentences end and how drafts are cut."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.evidence.sentences import CHARS_A_TOKEN, Length, sentence_ends


def sentences(text: str) -> list[str]:
    found, begin = [], 0
    for end in sentence_ends(text):
        found.append(text[begin:end].strip())
        begin = end
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("It costs 3.50 euros. Really.", ["It costs 3.50 euros.", "Really."]),
        ("See e.g. Dr. Smith at no. 5. Then go.", ["See e.g. Dr. Smith at no. 5.", "Then go."]),
        ('He said "go." Then left.', ['He said "go."', "Then left."]),
        ("Items:\n- one\n- two", ["Items:", "- one", "- two"]),
        ("A line\nthat goes on.\n\nA paragraph", ["A line\nthat goes on.", "A paragraph"]),
        ("", [""]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are words and signs."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    assert json.loads(path.read_text())
    return path


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (100, ("One two three. Four five. Six.", True)),
        (9, ("One two three. Four five. Six.", True)),
        (8, ("One two three. Four five.", False)),
        (7, ("One two three. Four five.", False)),
        (6, ("One two three.", False)),
        (3, ("One two three", False)),
        (1, ("One", False)),
    ],
)
def test_whole_sentences_that_fit(words: Path, tokens: int, expected: tuple[str, bool]) -> None:
    assert Length(words).cut(" One two three. Four five. Six. ", tokens) == expected


@settings(deadline=None)
@given(st.text(alphabet="ab .!\n", max_size=200), st.integers(1, 40))
def test_a_cut_is_a_beginning_that_fits(words: Path, text: str, tokens: int) -> None:
    for length in (Length(None), Length(words)):
        cut, whole = length.cut(text, tokens)
        assert text.strip().startswith(cut)
        assert whole == (cut == text.strip())
        assert cut or not text.strip()
        assert len(cut.split()) <= tokens * CHARS_A_TOKEN


def test_a_very_long_text_is_not_tokenised_to_its_end(words: Path) -> None:
    cut, whole = Length(words).cut("word " * 1_000_000, 5)
    assert (cut, whole) == ("word word word word word", False)


def test_without_a_tokenizer_characters_are_counted(tmp_path: Path) -> None:
    assert Length(tmp_path / "none.json").cut("abc def ghi", 2) == ("abc", False)
