"""The folders that preparing fills: whether an output is up to date, how it is replaced, and who may write.

An output is up to date when it was made from the same inputs with the same options and tools; the hash of those is in
its ``chain.json``. It is made in a hidden folder beside its place and moved there at the end.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hw.onnx.checkpoint import (
    CheckpointError,
    Manifest,
    ModelShape,
    canonical,
    tokenizer_fingerprint,
    weight_files,
    weights_fingerprint,
)


class PrepareError(Exception):
    """Something the user can do something about; the text says what."""


def cache_key(kind: str, inputs: dict[str, Any], tools: dict[str, str]) -> str:
    """sha256 (64 hex digits) of everything that decides an output; independent of the order of entries."""
    return hashlib.sha256(canonical({"kind": kind, "inputs": inputs, "tools": tools})).hexdigest()


def cached(folder: Path, key: str) -> bool:
    """Does ``folder`` hold the finished output with this key?"""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return False
    return manifest.key == key and manifest.complete(folder)


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder`` that takes its place when the block ends well and vanishes when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}.stage-", dir=folder.parent))
    try:
        made = stage / folder.name
        made.mkdir()
        yield made
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            folder.rename(stage / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def exclusive(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the output folder's lock, so that two runs do not build the same thing; clears what killed runs left."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise PrepareError(f"cannot write to {out}: {error.strerror}; name another folder with --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is preparing models in {out}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in out.glob(".*.stage-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def source_fingerprints(checkpoint: Path, out: Path) -> dict[str, str]:
    """Fingerprints of a checkpoint: weights, tokenizer, config.

    Hashing the weights of a large model takes a while, so their fingerprint is kept in ``out`` with the size and the
    time of last change of every file it covers.
    """
    # The file's identity too: a replaced file may keep its size, and its time when copied with it.
    stats = [(path.name, *_identity(path)) for path in weight_files(checkpoint)]
    seen = hashlib.sha256(canonical([str(checkpoint.resolve()), stats])).hexdigest()
    store = out / ".fingerprints.json"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(store.read_text())
    if seen not in known:
        known[seen] = weights_fingerprint(checkpoint)
        replacement = store.with_suffix(".new")
        replacement.write_text(json.dumps(known, indent=1))
        replacement.replace(store)
    config = checkpoint / "config.json"
    ModelShape.read(checkpoint)
    return {
        "weights": known[seen],
        "tokenizer": tokenizer_fingerprint(checkpoint),
        "config": hashlib.sha256(config.read_bytes()).hexdigest(),
    }


def _identity(path: Path) -> tuple[int, int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
