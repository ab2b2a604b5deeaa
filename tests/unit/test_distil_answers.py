"""What is asked, what is kept out, and how answers are stored."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.bench_lib.prompts import MEASURED_SETS, load_prompts
from scripts.calibrate_lib.item_sets import GOLD_SETS, load_items
from scripts.distil_lib.generate import read_prompts, text_pieces
from scripts.distil_lib.grammar import TASKS, Grammar
from scripts.distil_lib.held_out import HELD_SHARE, held_out, measured_prompts, prompt_hash
from scripts.distil_lib.options import read_options
from scripts.distil_lib.record import data_of, markdown, write_record
from scripts.distil_lib.shards import ShardError, Written, known_hashes, read_shard, shard_names, write_shard
from tests.unit.distil_fakes import answers


def test_every_prompt_the_project_measures_with_is_known_however_it_is_written() -> None:
    measured = measured_prompts()
    asked = [prompt.messages[-1]["content"] for name in MEASURED_SETS for prompt in load_prompts(name)]
    asked += [item.prompt for name in GOLD_SETS for item in load_items(name, 8)]
    assert len(asked) > 200
    for text in asked:
        assert prompt_hash(text) in measured
        assert prompt_hash("  " + text.upper().replace(",", " ;") + "!\n") in measured
    assert prompt_hash("A question nobody measures with: how deep is that lake?") not in measured


def test_a_folder_without_prompts_is_no_reason_to_learn_from_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="what must stay out of training is not known"):
        measured_prompts(((tmp_path, "*.jsonl"),))


def test_about_one_prompt_in_so_many_is_held_out_and_stays_so() -> None:
    hashes = [prompt_hash(f"prompt {number}") for number in range(20_000)]
    share = sum(map(held_out, hashes)) / len(hashes)
    assert 0.7 / HELD_SHARE < share < 1.4 / HELD_SHARE
    assert prompt_hash("Hello,  WORLD") == prompt_hash("hello world")
    assert prompt_hash("hello worlds") != prompt_hash("hello world")


def test_grammar_is_varied_whole_and_never_a_measured_prompt() -> None:
    measured = measured_prompts()
    drawn = [
        Grammar(1).draw().text,
        *(prompt.text for grammar in [Grammar(2)] for prompt in (grammar.draw() for _ in range(4000))),
    ]
    assert len({prompt_hash(text) for text in drawn}) > 3200
    assert not {prompt_hash(text) for text in drawn} & measured
    assert not any("{" in text or "}" in text for text in drawn)
    assert [Grammar(3).draw() for _ in range(2)] == [Grammar(3).draw()] * 2
    assert len(TASKS) >= 30


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_shards_go_there_and_back(tmp_path: Path, vocabulary: int, dtype: type) -> None:
    written = [Written(np.array([1, vocabulary - 1, 3]), 1, 0.7, "0" * 16, "own"), *answers(3, 1)]
    write_shard(tmp_path, "00004", written, weights="w", vocabulary=vocabulary)
    assert np.load(tmp_path / "00004.npz")["ids"].dtype == dtype
    assert shard_names(tmp_path) == ["00004"]
    back = read_shard(tmp_path, "00004", "w")
    for one, other in zip(back, written, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert (one.prompt, one.hashed, one.kind) == (other.prompt, other.hashed, other.kind)
        assert one.temperature == pytest.approx(other.temperature)
    assert known_hashes(tmp_path) == {each.hashed for each in written}


def test_shards_of_another_target_and_broken_ones_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, "00000", answers(3, 1), weights="a" * 64, vocabulary=96)
    with pytest.raises(ShardError, match="own target only") as error:
        read_shard(tmp_path, "00000", "b" * 64)
    assert "a" * 16 in str(error.value)
    assert "b" * 16 in str(error.value)
    about = json.loads((tmp_path / "00000.json").read_text())
    (tmp_path / "00000.json").write_text(json.dumps(about | {"hashes": about["hashes"][:-1]}))
    with pytest.raises(ShardError, match="do not belong together"):
        read_shard(tmp_path, "00000", "a" * 64)
    (tmp_path / "00000.json").write_text(json.dumps(about))
    (tmp_path / "00000.npz").write_bytes(b"PK but nothing else")
    with pytest.raises(ShardError, match="cannot be read"):
        read_shard(tmp_path, "00000", "a" * 64)


def test_an_interrupted_shard_is_none(tmp_path: Path) -> None:
    write_shard(tmp_path, "00000", answers(1, 1), weights="w", vocabulary=96)
    (tmp_path / ".00001.npz").write_bytes(b"half")
    (tmp_path / "00001.json").write_text("{}")
    assert shard_names(tmp_path) == ["00000"]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("One?\n\n  Two. \n")
    assert read_prompts(path) == ["One?", "Two."]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "One?"}\n{"messages": [{"role": "user", "content": "Two."}]}\n')
    assert read_prompts(path) == ["One?", "Two."]
    path.write_text('{"prompt": "One?"}\n{"text": "Two."}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:2: neither messages nor a prompt"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path)


def test_text_is_cut_between_paragraphs_and_long_ones_within(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    paragraphs = ["a" * 8, "b" * 10, "c" * 45]
    path.write_text("\n\n".join(paragraphs))
    pieces = list(text_pieces(path, lambda text: [ord(letter) for letter in text], tokens=22))
    assert ["".join(map(chr, piece.ids)) for piece in pieces] == [
        "a" * 8 + "\n\n" + "b" * 10 + "\n\n", "c" * 22, "c" * 22, "c\n\n",
    ]  # fmt: skip
    assert all(piece.prompt == 1 and piece.temperature == -1 for piece in pieces)


def test_options_say_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["train", "--share", "0"], "--share"),
        (["generate", "--minutes", "-1"], "--minutes"),
        (["sing"], "sing"),
    ):
        with pytest.raises(SystemExit):
            read_options(arguments)
        assert said in capsys.readouterr().err
    cut = read_options(["train", "--kind", "cut", "--unroll", "3"])
    assert (cut.recipe.layers, cut.recipe.unroll) == (4, 1)
    assert read_options(["all"]).recipe.layers == 1


def test_the_record_counts_what_was_learned_from_and_says_so(tmp_path: Path) -> None:
    written = [*answers(5, 1, held=False), *answers(2, 1, held=True)]
    write_shard(tmp_path, "00000", written, weights="w", vocabulary=96)
    data = data_of(tmp_path, "w")
    assert (data["answers"], data["held_out_answers"], data["shards"]) == (5, 2, 1)
    assert data["answer_tokens"] == sum(each.answer for each in written[:5])
    point = {
        "step": 0, "tokens": 0, "seconds": 0.0, "first": 0.25, "committed": 1.3, "alone": [0.2], "acceptance": [0.3, 0.2],
        "positions": 9, "rounds": 4, "shards": 1,
    }  # fmt: skip
    record = {
        "name": "tiny", "kind": "conditioned", "target": {"source": "it", "weights": "w" * 64}, "licence": "Free.", "data": data,
        "recipe": {"layers": 1}, "trained": {"steps": 9, "tokens": 250, "seconds": 60.0, "threads": 1},
        "measured": {"held-out answers": {"answers": 2, "figures": point}}, "machine": "a machine",
        "curve": [point | {"tokens": count, "first": count / 1000} for count in range(0, 100, 2)],
    }  # fmt: skip
    write_record(tmp_path / "r.json", record)
    assert json.loads((tmp_path / "r.json").read_text()) == record
    page = (tmp_path / "r.md").read_text()
    assert page == markdown(record)
    assert "| held-out answers | 2 | 0.250 | 0.30, 0.20 | 1.30 |" in page
    assert page.count("| 98 |") == 1  # the last point is there
    assert page.count("\n| ") < 25  # but not every one
