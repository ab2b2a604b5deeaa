"""What semantic acceptance compares at a mismatch, and that the guard sees what differs there."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.acceptance.continuations import BEFORE, Phrase, continuations
from deployments.chain.acceptance.guard import CODE, NAME, NEGATION, NUMBER, OPPOSITE, objection_in_text
from deployments.chain.acceptance.semantic import different


class Pieces:
    """A tokenizer whose tokens are the pieces it is shown, ``|`` between them."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in text.split("|") if piece]
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self._texts)
                self._texts.append(piece)
        return [self._ids[piece] for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[token] for token in ids)


def at(before: str, draft: str, own: str, behind: str | None = " and", offset: int = 0) -> tuple[Phrase, Phrase] | None:
    pieces = Pieces()
    tail = None if behind is None else pieces.encode(behind)[0]
    (token,) = pieces.encode(own)
    return continuations(pieces.decode, pieces.encode(before), pieces.encode(draft), offset, token, tail)


def words(found: tuple[Phrase, Phrase] | None) -> tuple[str, str] | None:
    return None if found is None else (found[0][1], found[1][1])


class TestPhrases:
    def test_one_token_takes_the_place_of_another(self) -> None:
        assert at("She| was", " happy| to| see", " glad") == (
            ("She was ", "happy", " to see and"),
            ("She was ", "glad", " to see and"),
        )

    def test_later_in_the_draft(self) -> None:
        found = at("She| was", " happy| to| see", " meet", offset=2)
        assert found == (("She was happy to ", "see", " and"), ("She was happy to ", "meet", " and"))

    def test_the_target_may_leave_something_out(self) -> None:
        assert words(at("a", " very| big| house", " big")) == ("very big", "big")
        assert words(at("helps", " to| really| improve| it", " improve")) == ("to really improve", "improve")
        assert words(at("a", " very| very| very| big| house", " big")) == ("very", "big")  # too far to be meant
        assert words(at("boost", " health| and| cut", " and")) == ("health", "and")  # the draft adds something

    @pytest.mark.parametrize(
        ("before", "draft", "own", "expected"),
        [
            ("to", " enc|rypt| it", " dec", ("encrypt", "decrypt")),
            ("to| re", "run| it", "start", ("rerun", "restart")),
            ("he| run", " fast| now", "ning", ("run fast", "running")),
            ("it| is", " well|-|known| to", " un", ("well-known", "un-known")),
            ("it", " isn|'t| so", " hasn", ("isn't", "hasn't")),
            ("line\nto", " a| b", " c", ("a", "c")),
        ],
    )
    def test_words_are_whole(self, before: str, draft: str, own: str, expected: tuple[str, str]) -> None:
        assert words(at(before, draft, own)) == expected

    def test_a_word_that_may_go_on_is_not_comparable(self) -> None:
        assert at("we", " incre", " grow", behind="ase") is None
        assert words(at("we", " grow", " rise", behind=" and")) == ("grow", "rise")
        assert words(at("we", " grow", " rise", behind=None)) == ("grow", "rise")  # the answer ends there

    @pytest.mark.parametrize(
        ("before", "draft", "own"),
        [
            ("a", ",| and", " so"),
            ("a", " so| and", ","),
            ("a", "\n|b", " c"),
            ("a", " b| c", "\n\n"),
            ("a", " 25| of", " 50"),
            ("a", " b\ufffd| c", " d"),
            ("a\ufffd", " b| c", " d"),
        ],
    )
    def test_layout_digits_and_broken_characters_are_not_comparable(self, before: str, draft: str, own: str) -> None:
        assert at(before, draft, own) is None

    def test_a_tokenizer_that_does_not_decode_piece_by_piece(self) -> None:
        def decode(ids: Sequence[int]) -> str:
            return f"{len(ids)}:" + " ".join(map(str, ids))

        assert continuations(decode, [1, 2], [3, 4], 0, 5, 6) is None

    def test_the_text_before_is_the_current_line_and_begins_with_a_word(self) -> None:
        found = at("one| two|\n|three", " four| five", " six")
        assert found is not None
        assert found[0][0] == "three "
        found = at("|".join(["un", "believ", *(f"able{i} " for i in range(BEFORE))]), "x| y", "z")
        assert found is not None
        assert found[0][0].startswith("able1 ")  # the word at the cut is not whole

    @given(st.lists(st.sampled_from([" a", " bc", "d", ".", "\n", " E", "-", " 1"]), max_size=24), st.data())
    def test_both_are_texts_that_could_have_been(self, pieces: list[str], data: st.DataObject) -> None:
        """The phrases spell what their tokens do, share all but their words, and are those of the other way round."""
        before = data.draw(st.integers(0, len(pieces)))
        table = Pieces()
        ids = table.encode("|".join(pieces))
        committed, draft = ids[:before], ids[before:]
        if not draft:
            return
        offset = data.draw(st.integers(0, len(draft) - 1))
        own = table.encode(data.draw(st.sampled_from([" fg", "h", " a", "!"])))[0]
        found = continuations(table.decode, committed, draft, offset, own, None)
        if found is None or own == draft[offset]:
            return
        (left, one, right), (same_left, other, same_right) = found
        assert (left, right) == (same_left, same_right)
        assert left + one + right in table.decode([*committed, *draft])
        assert re.search(r"[a-zA-Z]", one)
        assert re.search(r"[a-zA-Z]", other)


NEVER = [
    ("to", " encrypt| the| file", " decrypt", OPPOSITE),
    ("to", " enc|rypt| the", " dec", OPPOSITE),
    ("to", " increase| the", " decrease", OPPOSITE),
    ("to", " increase| the", " dec", OPPOSITE),
    ("to", " decrease| the", " in", OPPOSITE),
    ("it| is", " legal| to", " illegal", OPPOSITE),
    ("it| is", " legal| to", " ill", OPPOSITE),
    ("it| is", " careful| to", " care", OPPOSITE),
    ("there| are", " more| of", " le", OPPOSITE),
    ("it| takes| about", " twenty|-five| or", " fifty", NUMBER),
    ("it| takes| x", "25| min| or", "y", NUMBER),
    ("all", " six| of", " se", NUMBER),
    ("it| is", " safe| to", " not", NEGATION),
    ("it| is", " not| safe| to", " safe", NEGATION),
    ("it", " is| safe", " isn", NEGATION),
    ("we", " could| go", " can", NEGATION),
    ("we", " always| go", " ne", NEGATION),
    ("they", " reduced| the", " increased", OPPOSITE),
    ("in", " Paris| of", " London", NAME),
    ("we| call", " foo|(x)| in", " bar", CODE),
    ("if| x| ==| y|:| return", " total| or", " sum", CODE),
    ("the| file| my_|name| of", " the| x", " a", CODE),
]


@pytest.mark.parametrize(("before", "draft", "own", "reason"), NEVER)
def test_what_must_never_pass_is_named_or_not_comparable(before: str, draft: str, own: str, reason: str) -> None:
    found = at(before, draft, own)
    assert found is not None
    assert different(*found) == reason


@pytest.mark.parametrize(
    ("before", "draft", "own"),
    [
        ("She| was", " happy| to| see", " glad"),
        ("a", " large| house", " big"),
        ("the| results", " show| that", " indicate"),
        ("You| can", " start| by", " begin"),
        ("a", " very| big| house", " big"),
        ("launch", " the| product", " a"),
    ],
)
def test_other_words_for_the_same_are_left_to_the_model(before: str, draft: str, own: str) -> None:
    found = at(before, draft, own)
    assert found is not None
    assert different(*found) == ""


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_a_phrase_has_nothing_against_itself(before: str, words: str, after: str) -> None:
    assert objection_in_text(before, words, words, after) == ""
