"""What an index knows of its keys while it is open."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a key's value and rows lie."""

    group: str
    offset: int  # of its record in the log
    size: int  # of its record, bytes
    first: int  # of its rows in the matrix
    rows: int


@dataclass(frozen=True, slots=True)
class Nearby:
    """The rows of one group as a search needs them."""

    owners: list[tuple[str, Entry]]
    owner: Ints  # [rows] place in owners
    rows: Ints  # [rows] place in the matrix


class Entries:
    """Entries by key and by group, the one put last at the end."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._keys: dict[str, Entry] = {}
        self._groups: dict[str, dict[str, Entry]] = {}
        self._nearby: dict[str, Nearby] = {}  # of groups that did not change since they were last searched
        self.rows = 0
        self.size = 0  # bytes of records and rows

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: str) -> Entry | None:
        return self._keys.get(key)

    def holds(self, key: str, entry: Entry) -> bool:
        """Whether this is still the key's entry, and not one put later."""
        return self._keys.get(key) is entry

    def items(self) -> list[tuple[str, Entry]]:
        """Keys with their entries."""
        return list(self._keys.items())

    def keys(self, group: str) -> list[str]:
        """Keys of one group."""
        return list(self._groups.get(group, ()))

    def put(self, key: str, entry: Entry) -> None:
        """In place of what the key had."""
        self.delete(key)
        self._keys[key] = entry
        self._groups.setdefault(entry.group, {})[key] = entry
        self._changed(entry, 1)

    def delete(self, key: str) -> None:
        """A key that is not there is no error."""
        entry = self._keys.pop(key, None)
        if entry is not None:
            del self._groups[entry.group][key]
            if not self._groups[entry.group]:
                del self._groups[entry.group]
            self._changed(entry, -1)

    def _changed(self, entry: Entry, sign: int) -> None:
        self._nearby.pop(entry.group, None)
        self.rows += sign * entry.rows
        self.size += sign * (entry.size + entry.rows * self._row_bytes)

    def nearby(self, group: str) -> Nearby:
        """All rows of a group."""
        found = self._nearby.get(group)
        if found is None:
            owners = list(self._groups.get(group, {}).items())
            counts = np.array([entry.rows for _, entry in owners], np.int64)
            firsts = np.array([entry.first for _, entry in owners], np.int64)
            owner = np.repeat(np.arange(len(owners)), counts)
            # rows before an owner's own, taken from its first row: what is added to the count of all rows so far
            found = Nearby(owners, owner, np.arange(len(owner)) + (firsts - (np.cumsum(counts) - counts))[owner])
            if owners:
                self._nearby[group] = found
        return found
