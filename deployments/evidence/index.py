"""An embedding index on disk: keys with a value, a group and some unit vectors each; exact search within a group.

In its folder lie a manifest, which names the current generation, and two files of that generation: ``records-N.log``
(:mod:`.log`) and ``vectors-N.f32``, a matrix ``[rows, dimensions]`` of little-endian float32, mapped into memory. Rows are
written and synced before the record that names them, so a record that is whole has its rows. When most of the files is
replaced or deleted, a new generation is written beside them; replacing the manifest is what makes it the current one.
"""

import json
import logging
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.evidence.entries import Entries, Entry
from deployments.evidence.folder import Folder
from deployments.evidence.log import Delete, Log, Put
from deployments.evidence.matrix import Matrix

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
MAX_ROWS = 500_000
_SEARCHES = 3  # until none of what was found was replaced meanwhile
COMPACT_BYTES = 4 * 1024 * 1024  # that may be dead, however little lives

Floats = npt.NDArray[np.float32]


class IndexFull(Exception):
    """The index has ``MAX_ROWS`` rows."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One of the rows nearest to what was searched for."""

    key: str
    value: bytes
    row: int  # among the rows of its key
    similarity: float


@dataclass(slots=True)
class _Files:
    """One generation."""

    number: int
    log: Log
    matrix: Matrix


class Index:
    """Any thread may use it. A search sees all of a change or nothing; it waits for no writer's disk."""

    def __init__(self, path: Path, dimensions: int, model: str, wait_s: float = 0.0) -> None:
        """Open the index in ``path``, or begin one. ``model`` names what makes the vectors; those of another are dropped.

        Raises:
            IndexLocked: another process has it open, still after ``wait_s``.
            ValueError: the folder holds something else, or a format of another version.
            OSError: it cannot be read or written.
        """
        self._folder = Folder(path, wait_s)
        self._dimensions = dimensions
        self._about = {"format": FORMAT, "dimensions": dimensions, "model": model}
        self._writing = threading.Lock()  # held by whoever changes files
        self._state = threading.Lock()  # held for as long as it takes to look at, or swap, what is in memory
        self._entries = Entries(4 * dimensions)
        self._not_below = 0  # dead bytes below which compacting is not tried again
        self._closed = False
        self.damaged = 0  # records whose rows were not those that were written
        try:
            self._files = self._open()
            self._load()
        except BaseException:
            self._folder.close()
            raise

    def _open(self) -> _Files:
        about = self._manifest()
        if about is None:
            return self._begin(1)
        number = about.pop("generation")
        if about.get("format") != FORMAT:
            raise ValueError(
                f"{self._folder.path}: an index of format {about.get('format')}; this version reads {FORMAT}"
            )
        if about != self._about:
            logger.warning("index %s was made with another sentence model and begins anew", self._folder.path)
            return self._begin(number + 1)
        self._remove_others(number)
        return self._generation(number)

    def _manifest(self) -> dict[str, Any] | None:
        """What the folder says about the index in it; None where there is none."""
        path = self._folder.path / MANIFEST
        if not path.exists():
            return None
        try:
            about: dict[str, Any] = json.loads(path.read_bytes())
            about["generation"] = int(about["generation"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is not the manifest of an index; remove the folder to begin anew") from None
        return about

    def _begin(self, number: int) -> _Files:
        """An empty generation, which becomes the current one."""
        self._remove_others(number - 1)  # also what was left of an attempt at this one
        files = self._generation(number)
        self._publish(number)
        self._remove_others(number)
        return files

    def _generation(self, number: int) -> _Files:
        log, matrix = (self._folder.path / name for name in (f"records-{number}.log", f"vectors-{number}.f32"))
        return _Files(number, Log(log), Matrix(matrix, self._dimensions))

    def _publish(self, number: int) -> None:
        self._folder.sync()
        self._folder.replace(MANIFEST, json.dumps({**self._about, "generation": number}).encode())

    def _remove_others(self, number: int) -> None:
        """Files of generations that are not the current one: before it, or never finished."""
        (self._folder.path / f"{MANIFEST}.new").unlink(missing_ok=True)
        for pattern in ("records-*.log", "vectors-*.f32"):
            for file in self._folder.path.glob(pattern):
                if file.stem.partition("-")[2] != str(number):
                    file.unlink()

    def _load(self) -> None:
        files = self._files
        end = 0
        for record, offset, size in files.log.replay():
            self._entries.delete(record.key)
            if isinstance(record, Delete):
                continue
            end = max(end, record.first + record.rows)
            if _crc(files.matrix.rows(record.first, record.rows)) == record.vectors_crc:
                self._entries.put(record.key, Entry(record.group, offset, size, record.first, record.rows))
            else:
                self.damaged += 1
        files.matrix.end = end
        if files.log.cut or self.damaged:
            logger.warning(
                "index %s: %d bytes of an unfinished record removed, %d records with damaged rows left out",
                self._folder.path,
                files.log.cut,
                self.damaged,
            )

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def rows(self) -> int:
        """Rows that can be found."""
        return self._entries.rows

    @property
    def size(self) -> int:
        """Bytes of both files, what is dead included."""
        return self._files.log.size + self._files.matrix.end * self._files.matrix.row_bytes

    def keys(self, group: str = "") -> list[str]:
        """Keys of a group, the one put last at the end."""
        with self._state:
            return self._entries.keys(group)

    def items(self) -> list[tuple[str, str]]:
        """Group and key of everything, the one put last at the end."""
        with self._state:
            return [(entry.group, key) for key, entry in self._entries.items()]

    def get(self, key: str) -> tuple[bytes, Floats] | None:
        """Value and rows ``[n, dimensions]`` (a copy) of a key."""
        with self._state:
            self._check_open()
            entry = self._entries.get(key)
            if entry is None or (value := self._value(entry)) is None:
                return None
            return value, self._files.matrix.rows(entry.first, entry.rows).copy()

    def _value(self, entry: Entry) -> bytes | None:
        record = self._files.log.read(entry.offset)
        return record.value if isinstance(record, Put) else None

    def search(self, vector: Floats, group: str = "", most: int = 1) -> list[Hit]:
        """The ``most`` rows of the group with the largest product with ``vector`` ``[dimensions]``, best first.

        Fewer where they are replaced faster than they are read.
        """
        for _ in range(_SEARCHES):
            hits, current = self._search(vector, group, most)
            if current:
                break
        return hits

    def _search(self, vector: Floats, group: str, most: int) -> tuple[list[Hit], bool]:
        """Hits, and whether all of them still were what was found when their values were read."""
        with self._state:
            self._check_open()
            nearby = self._entries.nearby(group)
            matrix = self._files.matrix.view()
        if not len(nearby.rows):
            return [], True
        # gathering rows costs more than computing with some that are then left out
        few = 2 * len(nearby.rows) < len(matrix)
        similar = matrix[nearby.rows] @ vector if few else (matrix @ vector)[nearby.rows]
        best = np.argsort(-similar)[:most] if most > 1 else [np.argmax(similar)]
        hits: list[Hit] = []
        current = True
        with self._state:
            self._check_open()
            for place in best:
                key, entry = nearby.owners[nearby.owner[place]]
                if not self._entries.holds(key, entry):
                    current = False
                elif (value := self._value(entry)) is not None:
                    hits.append(Hit(key, value, int(nearby.rows[place]) - entry.first, float(similar[place])))
        return hits, current

    def put(self, key: str, value: bytes, vectors: Floats, group: str = "") -> None:
        """Give a key this value and these rows ``[n, dimensions]``; on the disk when this returns.

        Raises:
            IndexFull: there is no room for the rows.
            ValueError: the rows have another shape or are not finite, the value is too large, or the index is closed.
            OSError: the disk refused; the index is as before.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self._dimensions or not np.isfinite(vectors).all():
            raise ValueError(f"rows must be finite and [n, {self._dimensions}], not {list(vectors.shape)}")
        with self._writing:
            self._check_open()
            if self._entries.rows + len(vectors) > MAX_ROWS:
                raise IndexFull(f"the index has {self._entries.rows} rows; at most {MAX_ROWS} can be searched in time")
            entry = self._write(self._files, key, group, value, vectors)
            with self._state:
                self._entries.put(key, entry)
                self._files.matrix.end = entry.first + entry.rows
            self._compact_if_due()

    @staticmethod
    def _write(files: _Files, key: str, group: str, value: bytes, vectors: Floats, sync: bool = True) -> Entry:
        first, rows = files.matrix.end, np.ascontiguousarray(vectors, "<f4")
        files.matrix.write(first, rows, sync)
        offset = files.log.append(Put(key, group, value, first, len(rows), _crc(rows)), sync)
        return Entry(group, offset, files.log.size - offset, first, len(rows))

    def delete(self, key: str) -> bool:
        """Forget a key; whether it was there. What it held leaves the disk when the index is compacted."""
        with self._writing:
            self._check_open()
            if self._entries.get(key) is None:
                return False
            self._files.log.append(Delete(key))
            with self._state:
                self._entries.delete(key)
            self._compact_if_due()
            return True

    def _compact_if_due(self) -> None:
        dead = self.size - self._entries.size
        if dead <= max(COMPACT_BYTES, self._entries.size, self._not_below):
            return
        try:
            self._compact()
        except OSError as error:
            self._not_below = 2 * dead
            logger.warning("index %s could not be compacted: %s", self._folder.path, error)

    def _compact(self) -> None:
        """Write what lives into a new generation and go on with that."""
        old = self._files
        self._remove_others(old.number)
        new = self._generation(old.number + 1)
        entries = Entries(new.matrix.row_bytes)
        for key, entry in self._entries.items():
            record = old.log.read(entry.offset)
            rows = old.matrix.rows(entry.first, entry.rows)
            if not isinstance(record, Put) or _crc(rows) != record.vectors_crc:
                self.damaged += 1  # since it was opened: a new checksum must not bless it
                continue
            entries.put(key, self._write(new, key, entry.group, record.value, rows, sync=False))
            new.matrix.end += entry.rows
        new.matrix.sync()
        new.log.sync()
        try:
            self._publish(new.number)
        except OSError:
            about = self._manifest()
            if about is None or about["generation"] != new.number:
                new.log.close()
                new.matrix.close()
                raise
        with self._state:
            self._files, self._entries = new, entries
        old.log.close()
        old.matrix.close()
        self._remove_others(new.number)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the index {self._folder.path} is closed")

    def close(self) -> None:
        """Let another process open it. Closing twice is harmless."""
        with self._writing, self._state:
            if not self._closed:
                self._closed = True
                self._files.log.close()
                self._files.matrix.close()
                self._folder.close()


def _crc(rows: Floats) -> int:
    return zlib.crc32(rows.data)
