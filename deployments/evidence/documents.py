"""A folder of documents, and the index of its passages kept up to date with it."""

import hashlib
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.evidence.index import Index, IndexFull
from deployments.evidence.passages import Passage, passages

logger = logging.getLogger(__name__)

SUFFIXES = (".md", ".txt")
MAX_FILES = 20_000
MAX_FILE_BYTES = 1024 * 1024
SETTLED_NS = 2_000_000_000  # a file changed less than this before it was read may change again without a new time

Floats = npt.NDArray[np.float32]
Stamp = tuple[int, int, int]  # time of last change, ns; bytes; inode


class Encoder(Protocol):
    """As :class:`hw.onnx.sentences.SentenceModel`."""

    @property
    def dimension(self) -> int: ...

    def embed(self, texts: Sequence[str], budget_s: float = ...) -> Floats: ...


class Document(msgspec.Struct, frozen=True, array_like=True):
    """What the index keeps of one file: its row ``i`` stands for passage ``i``."""

    digest: bytes
    passages: list[Passage]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Document)


@dataclass(frozen=True, slots=True)
class Found:
    """The passage nearest to what was looked for."""

    document: str  # path below the folder
    number: int  # of the passage, from 1
    passage: Passage
    similarity: float


def document(value: bytes) -> Document:
    """A document out of the index."""
    return _decoder.decode(value)


class Documents:
    """Reads the folder and never writes to it. One thread at a time refreshes."""

    def __init__(self, folder: Path, index: Index, model: Encoder) -> None:
        self._folder = folder
        self._index = index
        self._model = model
        self._seen: dict[
            str, Stamp
        ] = {}  # files as they were when they were last read, where that is known to be current
        self.counts: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()  # files of the last refresh that are not indexed, by reason

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Make the index what the folder is; stops between two passages where ``stopped``.

        A folder that cannot be listed changes nothing: it may be back in a moment.
        """
        self.skipped = Counter()
        try:
            files = self._list()
        except OSError as error:
            self.counts["refreshes_failed"] += 1
            logger.warning("documents %s cannot be listed, the index stays: %s", self._folder, error)
            return
        for name in set(self._index.keys()) - files.keys():
            self._index.delete(name)
            self._seen.pop(name, None)
            self.counts["removed"] += 1
        for name, stamp in files.items():
            if stopped():
                return
            if self._seen.get(name) != stamp:
                self._read(name, stopped)
        self.counts["refreshes"] += 1

    def find(self, vector: Floats) -> Found | None:
        """The passage nearest to a vector ``[dimensions]``; None while nothing is indexed."""
        hits = self._index.search(vector)
        if not hits:
            return None
        (hit,) = hits
        return Found(hit.key, hit.row + 1, document(hit.value).passages[hit.row], hit.similarity)

    def _list(self) -> dict[str, Stamp]:
        """Documents by their path below the folder. What a symbolic link leads to counts if it lies inside, too.

        Raises OSError where any part of the folder cannot be read.
        """
        root = self._folder.resolve(strict=True)
        files: dict[str, Stamp] = {}

        def fail(error: OSError) -> None:
            raise error

        for folder, folders, names in os.walk(root, onerror=fail):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                if name.startswith(".") or path.suffix.lower() not in SUFFIXES:
                    continue
                if len(files) == MAX_FILES:
                    self.skipped["too_many_files"] += 1
                    continue
                try:
                    real = path.resolve(strict=True)
                    found = real.stat()
                    key = str(path.relative_to(root))
                    key.encode()
                except (OSError, RuntimeError, UnicodeEncodeError):  # gone, a dangling link, links in a circle, no text
                    self.skipped["unreadable"] += 1
                    continue
                if not real.is_relative_to(root):
                    self.skipped["outside"] += 1
                elif not stat.S_ISREG(found.st_mode):
                    self.skipped["no_file"] += 1
                elif found.st_size > MAX_FILE_BYTES:
                    self.skipped["too_large"] += 1
                else:
                    files[key] = (found.st_mtime_ns, found.st_size, found.st_ino)
        return files

    def _read(self, name: str, stopped: Callable[[], bool]) -> None:
        try:
            content, stamp = read_inside(self._folder, name)
            text = content.decode()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = "not_utf8" if isinstance(error, UnicodeDecodeError) else "unreadable"
            self.skipped[reason] += 1
            if self._index.delete(name):  # what it said before is not what it says
                self.counts["removed"] += 1
            return
        digest = hashlib.blake2b(content, digest_size=16).digest()
        known = self._index.get(name)
        before = document(known[0]) if known is not None else Document(b"", [])
        if before.digest != digest:
            rows = self._rows(text, before, known[1] if known is not None else None, stopped)
            if rows is None:
                return
            found, vectors = rows
            try:
                self._index.put(name, _encoder.encode(Document(digest, found)), vectors)
            except (IndexFull, ValueError) as error:
                self.skipped["index_full"] += 1
                logger.warning("document %s is not indexed: %s", name, error)
                return
            self.counts["indexed"] += 1
        if time.time_ns() - stamp[0] > SETTLED_NS:
            self._seen[name] = stamp

    def _rows(
        self, text: str, before: Document, rows: Floats | None, stopped: Callable[[], bool]
    ) -> tuple[list[Passage], Floats] | None:
        """Passages and their vectors ``[n, dimensions]``; those that did not change keep theirs. None where stopped."""
        known = dict(zip(before.passages, rows, strict=True)) if rows is not None else {}
        found = list(passages(text))
        vectors = np.empty((len(found), self._model.dimension), np.float32)
        for row, passage in enumerate(found):
            vector = known.get(passage)
            if vector is None:
                if stopped():
                    return None
                vector = self._model.embed([passage.embedded])[0]
                self.counts["embedded"] += 1
            vectors[row] = vector
        return found, vectors

    def close(self) -> None:
        """Let go of the index."""
        self._index.close()

    def stats(self) -> dict[str, float]:
        """Sizes of the index, counts since the start, and ``skipped:REASON`` of the last refresh."""
        sizes = {"documents": len(self._index), "passages": self._index.rows, "index_bytes": self._index.size}
        return {**sizes, **self.counts, **{f"skipped:{reason}": count for reason, count in self.skipped.items()}}


def read_inside(root: Path, name: str) -> tuple[bytes, Stamp]:
    """A file below ``root`` and what it was when it was read. No link leads out of ``root``, whoever swaps what meanwhile.

    Raises OSError, or ValueError where the file lies outside or is too large.
    """
    real_root = root.resolve(strict=True)
    parts = (real_root / name).resolve(strict=True).relative_to(real_root).parts  # ValueError: outside
    handle = os.open(real_root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            # resolved, so none of the parts is a link unless it has just become one
            below = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = below
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{name} is not a file")
        with os.fdopen(os.dup(handle), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(handle)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is larger than {MAX_FILE_BYTES} bytes")
    return content, (found.st_mtime_ns, found.st_size, found.st_ino)
