"""A table of named things: what each is called, what kind of thing it is, and what is known of it."""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_ROWS = 20_000
MAX_WORDS = 6  # of a name; longer values of columns are not looked for
OWN = ("name", "kind", "aliases")
WORD = re.compile(r"[^\W_]+(?:[-'’.][^\W_]+)*")


@dataclass(frozen=True, slots=True)
class Entity:
    """One row."""

    name: str
    kind: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EntityTable:
    """Look-ups by name (words in lower case, aliases included). One name may stand for several rows."""

    by_name: Mapping[tuple[str, ...], tuple[Entity, ...]]
    kinds: frozenset[str]
    domains: Mapping[str, Mapping[tuple[str, ...], str]]  # column: every value that any row has there, by its words
    longest: int  # words of the longest name or value

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], where: str) -> "EntityTable":
        """From rows ``{name, kind, aliases?, column: value, …}``; ``where`` names their origin in errors.

        Raises:
            ValueError: a row without name or kind, a name that is too long, too many rows.
        """
        names: dict[tuple[str, ...], list[Entity]] = {}
        domains: dict[str, dict[tuple[str, ...], str]] = {}
        kinds: set[str] = set()
        for number, row in enumerate(rows, start=1):
            if number > MAX_ROWS:
                raise ValueError(f"{where}: more than {MAX_ROWS} rows")
            entity, called = _row(row, f"{where}, row {number}")
            kinds.add(entity.kind)
            for column, value in entity.facts.items():
                domains.setdefault(column, {})[words(value)] = value
            for name in called:
                names.setdefault(name, []).append(entity)
        if not names:
            raise ValueError(f"{where}: no rows")
        return cls(
            {name: tuple(found) for name, found in names.items()},
            frozenset(kinds),
            domains,
            min(MAX_WORDS, max(map(len, [*names, *(value for values in domains.values() for value in values)]))),
        )


def words(text: str) -> tuple[str, ...]:
    """The words of a name in lower case."""
    return tuple(word.lower() for word in WORD.findall(text))


def load(path: Path) -> EntityTable:
    """A ``.csv`` with a header, or a ``.yaml`` list of rows. Aliases are a YAML list, or separated by ``|``.

    Raises:
        ValueError: naming the file and the row.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            return EntityTable.of(csv.DictReader(text.splitlines()), str(path))
        if path.suffix in (".yaml", ".yml"):
            rows = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError(f"{path}: must be a list of rows with name and kind")
            return EntityTable.of(rows, str(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    raise ValueError(f"{path}: must be .csv or .yaml")


def _row(row: Mapping[str, Any], where: str) -> tuple[Entity, list[tuple[str, ...]]]:
    name, kind, aliases = (row.get(key) for key in OWN)
    if not isinstance(name, str) or not words(name) or not isinstance(kind, str) or not kind.strip():
        raise ValueError(f"{where}: needs a name and a kind")
    if not isinstance(aliases, list):
        aliases = str(aliases).split("|") if aliases else []
    called = [found for text in (name, *map(str, aliases)) if (found := words(text))]
    for found in called:
        if len(found) > MAX_WORDS:
            raise ValueError(f"{where}: {' '.join(found)!r} has more than {MAX_WORDS} words")
    facts = {
        str(column).strip().lower(): str(value).strip()
        for column, value in row.items()
        if column is not None and column not in OWN and value not in (None, "")
    }
    return Entity(name.strip(), kind.strip().lower(), facts), called
