"""Documents: passages, keeping up with a folder, and what a folder must not be able to do."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.evidence import documents as documents_module
from deployments.evidence.documents import Documents, read_inside
from deployments.evidence.index import Index
from deployments.evidence.passages import MAX_CHARS, Passage, passages
from tests.unit.evidence_fakes import WORDS, BagOfWords

FAQ = """# Shop

## Returns

Parcels can be returned within 30 days.

You need:

- the order number
- the parcel

```
# no heading
return --all

twice
```

## Shipping
We ship on weekdays.
***
Not on Sundays.
"""


def test_paragraphs_keep_their_headings() -> None:
    assert list(passages(FAQ)) == [
        Passage(("Shop", "Returns"), "Parcels can be returned within 30 days."),
        Passage(("Shop", "Returns"), "You need:\n- the order number\n- the parcel"),
        Passage(("Shop", "Returns"), "```\n# no heading\nreturn --all\n\ntwice\n```"),
        Passage(("Shop", "Shipping"), "We ship on weekdays."),
        Passage(("Shop", "Shipping"), "Not on Sundays."),
    ]
    assert next(passages(FAQ)).embedded == "Shop > Returns\nParcels can be returned within 30 days."


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab .!?\n#`-:é"), max_size=300).map(lambda text: text * 8))
def test_any_text_is_cut_into_bounded_passages_that_lose_no_word(text: str) -> None:
    found = list(passages(text))
    assert all(passage.text and len(passage.text) <= MAX_CHARS for passage in found)
    said = "".join("".join(passage.text.split()) for passage in found)
    letters = [c for c in said if c in "abé"]
    headings = sum(line.count(c) for line in text.splitlines() if line.lstrip().startswith("#") for c in "abé")
    assert len(letters) <= sum(text.count(c) for c in "abé") <= len(letters) + headings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "documents"
    root.mkdir()
    return root


@pytest.fixture
def model() -> BagOfWords:
    return BagOfWords()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "index", WORDS, "words")
    yield index
    index.close()


@pytest.fixture
def documents(folder: Path, index: Index, model: BagOfWords) -> Documents:
    return Documents(folder, index, model)


def write(path: Path, text: str, age_s: float = 60.0) -> None:
    """A file that has been as it is for some time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    then = time.time() - age_s
    os.utime(path, (then, then))


def found(documents: Documents, model: BagOfWords, text: str) -> str | None:
    hit = documents.find(model.embed([text])[0])
    return None if hit is None else f"{hit.document}#{hit.number} {hit.passage.text}"


def test_a_folder_is_found_by_meaning(documents: Documents, folder: Path, model: BagOfWords) -> None:
    assert found(documents, model, "anything") is None
    write(folder / "faq.md", FAQ)
    write(folder / "sub" / "hours.txt", "Open from nine to five.\n\nClosed at noon.")
    write(folder / "image.png", "Open from nine to five.")
    documents.refresh()
    assert documents.stats()["documents"] == 2
    assert found(documents, model, "open nine five") == "sub/hours.txt#1 Open from nine to five."
    assert found(documents, model, "Sundays") == "faq.md#5 Not on Sundays."


def test_only_what_changed_is_read_and_embedded(documents: Documents, folder: Path, model: BagOfWords) -> None:
    write(folder / "a.txt", "One apple.\n\nTwo pears.", age_s=90)
    write(folder / "b.txt", "Three plums.")
    documents.refresh()
    model.texts.clear()
    documents.refresh()
    assert model.texts == []
    write(folder / "a.txt", "One apple.\n\nFour pears.", age_s=80)
    (folder / "b.txt").unlink()
    documents.refresh()
    assert model.texts == ["Four pears."]
    assert found(documents, model, "Three plums") != "b.txt#1 Three plums."
    assert (documents.stats()["removed"], documents.stats()["documents"]) == (1, 1)


def test_a_change_within_the_same_moment_is_noticed(documents: Documents, folder: Path, model: BagOfWords) -> None:
    write(folder / "a.txt", "old", age_s=0)
    stat = (folder / "a.txt").stat()
    documents.refresh()
    (folder / "a.txt").write_text("new")
    os.utime(folder / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    documents.refresh()
    assert found(documents, model, "new") == "a.txt#1 new"


def test_a_restart_embeds_nothing_again(folder: Path, tmp_path: Path, model: BagOfWords) -> None:
    write(folder / "a.txt", "One apple.\n\nTwo pears.")
    for expected in (["One apple.", "Two pears."], []):
        index = Index(tmp_path / "index", WORDS, "words")
        model.texts.clear()
        Documents(folder, index, model).refresh()
        assert model.texts == expected
        index.close()


def test_stopping_leaves_whole_documents(documents: Documents, folder: Path, model: BagOfWords) -> None:
    for name in "abc":
        write(folder / f"{name}.txt", f"First {name}.\n\nSecond {name}.")
    documents.refresh(lambda: len(model.texts) >= 3)
    assert documents.stats()["documents"] == 1
    documents.refresh()
    assert documents.stats()["documents"] == 3


def test_no_link_leads_out_of_the_folder(documents: Documents, folder: Path, model: BagOfWords, tmp_path: Path) -> None:
    write(tmp_path / "secret" / "key.txt", "secret key")
    write(folder / "..data" / "real.txt", "mounted text")
    (folder / "real.txt").symlink_to(Path("..data") / "real.txt")  # as Kubernetes mounts a ConfigMap
    (folder / "file.txt").symlink_to(tmp_path / "secret" / "key.txt")
    (folder / "folder").symlink_to(tmp_path / "secret")
    (folder / "nowhere.txt").symlink_to("nothing")
    (folder / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(folder / "pipe.txt")
    (folder / "named.txt").mkdir()
    documents.refresh()
    assert found(documents, model, "secret key") == "real.txt#1 mounted text"
    assert documents.stats()["documents"] == 1
    assert documents.skipped == {"outside": 1, "unreadable": 2, "no_file": 1}
    for name in ("file.txt", "folder/key.txt", "../secret/key.txt", str(tmp_path / "secret" / "key.txt"), "pipe.txt"):
        with pytest.raises(ValueError):
            read_inside(folder, name)
    assert read_inside(folder, "real.txt")[0] == b"mounted text"


def test_a_link_swapped_in_after_looking_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "secret.txt", "secret")
    write(folder / "sub" / "a.txt", "public")
    real = os.open
    swapped = []

    def swap(path: str | Path, flags: int, *rest: object, **kwargs: int) -> int:
        if path == "a.txt" and not swapped:
            swapped.append(path)
            (folder / "sub" / "a.txt").unlink()
            (folder / "sub" / "a.txt").symlink_to(tmp_path / "secret.txt")
        return real(path, flags, *rest, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OSError):
        read_inside(folder, "sub/a.txt")
    assert swapped


def test_files_that_are_too_large_or_no_text_are_left_out_and_leave_the_index(
    documents: Documents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "MAX_FILE_BYTES", 100)
    for name in ("large.txt", "binary.txt", "fine.txt"):
        write(folder / name, "fine")
    documents.refresh()
    assert documents.stats()["documents"] == 3
    write(folder / "large.txt", "x" * 101)
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    documents.refresh()
    assert documents.stats()["documents"] == 1
    assert documents.skipped == {"too_large": 1, "not_utf8": 1}
    monkeypatch.setattr(documents_module, "MAX_FILES", 1)
    write(folder / "more.txt", "more")
    documents.refresh()
    assert documents.skipped["too_many_files"] == 3


def test_a_folder_that_is_away_for_a_moment_empties_nothing(documents: Documents, folder: Path) -> None:
    write(folder / "a.txt", "One apple.")
    documents.refresh()
    folder.rename(folder.with_name("away"))
    documents.refresh()
    assert (documents.stats()["documents"], documents.stats()["refreshes_failed"]) == (1, 1)
