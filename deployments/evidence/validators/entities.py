"""Whether what a text says of named things agrees with a table of them."""

from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from deployments.evidence.validators.base import VALID, Context, Tag, invalid, unknown
from deployments.evidence.validators.entity_table import WORD, Entity, EntityTable, load, words
from deployments.evidence.validators.mentions import NEGATION, blanked, find_numbers, sentences

MAX_INLINE_ROWS = 200
Spans = list[tuple[int, int, tuple[Entity, ...]]]  # first word, behind the last word, what it can be


class Entities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text is invalid if it contradicts the table (``file``, or ``rows`` of a request), sentence by sentence:

    it calls a name by another kind of the table ("the river Tessaro", a city there), or says of a name, with the word of a column,
    what is another row's value there ("the capital of Ombria is Veldt") or another number ("TX-20 has a price of 15").
    It is valid if it names things of the table, without contradiction and none that the table lacks; else unknown, and so are
    sentences with a negation, for what they deny may well be true.
    """

    name: ClassVar[str] = "entities"
    isolated: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    operator_only: ClassVar[frozenset[str]] = frozenset({"file"})

    file: str | None = None
    rows: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if (self.file is None) == (not self.rows):
            raise ValueError("entities: needs file or rows, and not both")
        if len(self.rows) > MAX_INLINE_ROWS:
            raise ValueError(f"rows: at most {MAX_INLINE_ROWS}; larger tables belong into a file")
        if self.rows:
            EntityTable.of(self.rows, "rows")
        else:
            self._table()

    def _table(self) -> EntityTable:
        if self.file is None:
            return EntityTable.of(self.rows, "rows")
        path = Path(self.file)
        try:
            changed = path.stat().st_mtime_ns
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        return _loaded(path, changed)

    def check(self, text: str, context: Context) -> Tag:
        table = self._table()
        known, denied = 0, False
        strange: list[str] = []
        for sentence in sentences(text):
            tokens = [(match[0], match.start()) for match in WORD.finditer(sentence)]
            spans = _named(tokens, table)
            known += len(spans)
            if spans and NEGATION.search(sentence):
                denied = True
                continue
            why = _wrong_kind(tokens, spans, table) or _wrong_fact(sentence, tokens, spans, table)
            if why:
                return invalid(why)
            strange += _strangers(tokens, spans)
        if denied:
            return unknown("it denies something")
        if strange:
            return unknown(f"not in the table: {', '.join(dict.fromkeys(strange))}")
        return VALID if known else unknown("names nothing in the table")


@lru_cache(maxsize=32)
def _loaded(path: Path, changed: int) -> EntityTable:
    """``changed`` is the file's time of change: a new table is read when it is written."""
    return load(path)


def _named(tokens: list[tuple[str, int]], table: EntityTable) -> Spans:
    """Names of the table, longest first, written with a capital or a digit as names are."""
    spans: Spans = []
    at = 0
    while at < len(tokens):
        for length in range(min(table.longest, len(tokens) - at), 0, -1):
            written = tokens[at : at + length]
            found = table.by_name.get(tuple(word.lower() for word, _ in written))
            if found and any(word[0].isupper() or any(map(str.isdigit, word)) for word, _ in written):
                spans.append((at, at + length, found))
                at += length
                break
        else:
            at += 1
    return spans


def _wrong_kind(tokens: list[tuple[str, int]], spans: Spans, table: EntityTable) -> str:
    """``the river Tessaro``, ``the river of Tessaro``, ``Tessaro is a river``."""
    for first, end, found in spans:
        before = [word.lower() for word, _ in tokens[max(0, first - 2) : first]]
        after = [word.lower() for word, _ in tokens[end : end + 3]]
        said = before[-1:] if before[-1:] != ["of"] else before[:1]
        if after[:2] in (["is", "a"], ["is", "an"], ["is", "the"], ["was", "a"], ["was", "an"]):
            said = said + after[2:3]
        kinds = {entity.kind for entity in found}
        for word in said:
            if word in table.kinds and word not in kinds:
                return f"{found[0].name} is no {word} but a {sorted(kinds)[0]}"
    return ""


def _wrong_fact(sentence: str, tokens: list[tuple[str, int]], spans: Spans, table: EntityTable) -> str:
    """Only in sentences about one thing: with two, whose fact is meant is anybody's guess."""
    written = [word.lower() for word, _ in tokens]
    said = {tuple(written[at : at + length]) for length in range(1, table.longest + 1) for at in range(len(written))}
    for column, domain in table.domains.items():
        holders = [found[0] for _, _, found in spans if len(found) == 1 and column in found[0].facts]
        if words(column) not in said or len(holders) != 1:
            continue
        right = holders[0].facts[column]
        if words(right) in said:
            continue
        others = [domain[key] for key in said if key in domain]
        if others:
            return f"{column} of {holders[0].name} is {right}, not {min(others)}"
        if (number := _number(right)) is not None:
            names = ((tokens[first][1], tokens[end - 1][1] + len(tokens[end - 1][0])) for first, end, _ in spans)
            numbers = list(find_numbers(blanked(sentence, names)))
            if numbers and all(mention.value != number for mention in numbers):
                return f"{column} of {holders[0].name} is {right}, not {numbers[0].text}"
    return ""


def _strangers(tokens: list[tuple[str, int]], spans: Spans) -> list[str]:
    """Capitalised words inside a sentence, and ids such as TX-20, that the table does not have."""
    covered = {index for first, end, _ in spans for index in range(first, end)}
    return [
        word
        for index, (word, _) in enumerate(tokens)
        if index not in covered
        and ((index > 0 and word[0].isupper() and len(word) > 1) or (word[0].isupper() and any(map(str.isdigit, word))))
    ]


def _number(value: str) -> Any:
    found = list(find_numbers(value))
    return found[0].value if len(found) == 1 and found[0].text == value else None
