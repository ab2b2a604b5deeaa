"""What a crash, a damaged or full disk, and a second process do to the index."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from deployments.evidence import index as index_module
from deployments.evidence.folder import Folder, IndexLocked
from deployments.evidence.index import Index, IndexFull
from tests.unit.evidence_index_cases import DIMENSIONS, change, expected, holds, open_index, vectors


def test_compacting_keeps_what_lives_and_lets_go_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "COMPACT_BYTES", 2_000)
    index = open_index(tmp_path)
    for number in range(100):
        index.put("same", b"secret %d" % number, vectors(number, 2))
    assert index.size < 8_000
    assert len(list(tmp_path.glob("records-*.log"))) == 1
    assert b"secret 3" not in next(tmp_path.glob("records-*.log")).read_bytes()
    index.close()
    index = open_index(tmp_path)
    held = index.get("same")
    assert held is not None
    assert held[0] == b"secret 99"
    index.close()


WRITER = """
import sys
from deployments.evidence import index
from tests.unit.evidence_index_cases import change, open_index
from pathlib import Path
index.COMPACT_BYTES = 3_000
opened = open_index(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 1_000_000):
    change(opened, number)
    print(number, flush=True)
"""


def test_a_process_killed_at_any_moment_loses_at_most_the_change_it_was_making(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    done = 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(done)], stdout=subprocess.PIPE, cwd=Path.cwd()
        )
        assert writer.stdout is not None
        said = 0
        for _ in range(int(random.integers(1, 60))):
            said += bool(writer.stdout.readline())
        threading.Event().wait(float(random.uniform(0, 0.02)))
        writer.kill()
        said += len(writer.stdout.read().splitlines())
        writer.stdout.close()
        writer.wait()
        assert said
        index = open_index(tmp_path)
        # the last change may have been whole without having been said to be
        done = next(changes for changes in (done + said, done + said + 1) if holds(index, expected(changes)))
        index.close()
        assert len(list(tmp_path.glob("*"))) == 4  # lock, manifest, records, vectors: nothing left over


def test_damage_in_the_middle_is_found(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    for key in ("a", "b", "c"):
        index.put(key, key.encode() * 50, vectors(1, 2))
    index.close()
    matrix = next(tmp_path.glob("vectors-*"))
    content = bytearray(matrix.read_bytes())
    content[2 * 4 * DIMENSIONS + 3] ^= 1  # in b's first row
    matrix.write_bytes(content)
    index = open_index(tmp_path)
    assert (index.keys(), index.damaged) == (["a", "c"], 1)
    index.close()
    log = next(tmp_path.glob("records-*"))
    content = bytearray(log.read_bytes())
    content[-80] ^= 1  # in c's value
    log.write_bytes(content)
    index = open_index(tmp_path)
    assert index.keys() == ["a"]
    index.put("d", b"d", vectors(2, 1))
    index.close()
    index = open_index(tmp_path)
    assert index.keys() == ["a", "d"]
    index.close()


def test_a_log_damaged_while_open_gives_nothing_rather_than_something_else(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.put("a", b"value", vectors(1, 1))
    log = next(tmp_path.glob("records-*"))
    log.write_bytes(log.read_bytes().replace(b"value", b"VALUE"))
    assert index.get("a") is None
    assert index.search(vectors(1, 1)[0]) == []
    index.close()


def test_another_sentence_model_begins_anew_and_another_format_is_refused(tmp_path: Path) -> None:
    index = open_index(tmp_path, "one")
    index.put("a", b"", vectors(1, 1))
    index.close()
    index = open_index(tmp_path, "two")
    assert len(index) == 0
    index.close()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(ValueError, match="format 9; this version reads 1"):
        open_index(tmp_path, "two")
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is not the manifest of an index"):
        open_index(tmp_path, "two")
    Folder(tmp_path).close()  # a failed start holds no lock


def test_a_crash_before_the_first_manifest_or_in_the_middle_of_compacting_leaves_nothing(tmp_path: Path) -> None:
    for name in ("records-1.log", "vectors-1.f32"):
        (tmp_path / name).write_bytes(b"unfinished")
    index = open_index(tmp_path)
    index.put("a", b"a", vectors(1, 1))
    index.close()
    for name in ("records-2.log", "vectors-2.f32", "manifest.json.new"):
        (tmp_path / name).write_bytes(b"unfinished")
    index = open_index(tmp_path)
    assert index.keys() == ["a"]
    assert sorted(file.name for file in tmp_path.glob("*")) == [
        "lock",
        "manifest.json",
        "records-1.log",
        "vectors-1.f32",
    ]
    index.close()


def test_a_disk_that_refuses_leaves_the_index_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(tmp_path)
    index.put("a", b"a", vectors(1, 1))
    real = os.pwrite
    written = 0

    def full(file: int, content: bytes, offset: int) -> int:
        nonlocal written
        if len(content) > 2 and (written := written + 1) > 1:  # the rows go, the record breaks off
            real(file, content[:2], offset)
            raise OSError(28, "No space left on device")
        return real(file, content, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        index.put("b", b"b", vectors(2, 1))
    monkeypatch.undo()
    assert index.keys() == ["a"]
    index.put("c", b"c", vectors(3, 1))
    index.close()
    index = open_index(tmp_path)
    assert holds(index, {"a": ("", b"a", vectors(1, 1)), "c": ("", b"c", vectors(3, 1))})
    index.close()


def test_compacting_that_fails_is_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "COMPACT_BYTES", 1_000)
    index = open_index(tmp_path)
    publish = index._publish

    def fail(number: int) -> None:
        raise OSError(28, "No space left on device")

    index._publish = fail  # type: ignore[method-assign]
    for number in range(40):
        change(index, number)
    assert holds(index, expected(40))
    before = index.size
    assert before > 2_000
    index._publish = publish  # type: ignore[method-assign]
    for number in range(40, 120):
        change(index, number)
    assert holds(index, expected(120))
    index.close()
    index = open_index(tmp_path)
    assert holds(index, expected(120))
    assert index.size < 3 * before
    index.close()


def test_one_writer(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    with pytest.raises(IndexLocked, match=f"is written to by process {os.getpid()}: an index has one writer"):
        open_index(tmp_path)
    program = "import sys; from tests.unit.evidence_index_cases import *; open_index(Path(sys.argv[1]))"
    other = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "IndexLocked" in other.stderr
    threading.Timer(0.3, index.close).start()
    waited = Index(tmp_path, DIMENSIONS, "m", wait_s=20)  # the replica that is replaced lets go
    waited.close()


def test_what_cannot_be_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_ROWS", 2)
    index = open_index(tmp_path)
    index.put("a", b"", vectors(1, 2))
    with pytest.raises(IndexFull, match="at most 2"):
        index.put("b", b"", vectors(1, 1))
    for rows in (np.full((1, DIMENSIONS), np.nan, np.float32), vectors(1, 1)[0], vectors(1, 1)[:, :2]):
        with pytest.raises(ValueError, match="rows must be finite"):
            index.put("a", b"", rows)
    index.close()
    index.close()
    with pytest.raises(ValueError, match="is closed"):
        index.put("a", b"", vectors(1, 1))


def test_searching_while_another_thread_writes_and_compacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "COMPACT_BYTES", 3_000)
    index = open_index(tmp_path)
    index.put("fixed", b"fixed", np.array([[100.0, 0, 0, 0]], np.float32))
    stop = threading.Event()
    wrong: list[object] = []

    def search() -> None:
        while not stop.is_set():
            hits = index.search(np.array([1.0, 0, 0, 0], np.float32))
            if [(hit.key, hit.value) for hit in hits] != [("fixed", b"fixed")]:
                wrong.append(hits)

    thread = threading.Thread(target=search)
    thread.start()
    for number in range(150):
        change(index, number)
    stop.set()
    thread.join()
    assert not wrong
    index.close()
