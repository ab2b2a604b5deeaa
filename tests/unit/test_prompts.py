"""The benchmark's prompt sets: enough of them, all different, none in two sets."""

import ast
import json

import pytest

from scripts.bench_lib.prompts import MEASURED_SETS, MIXED_SET, WARMUP_SET, in_turn, load_prompts, prompts_for

ALL = (*MEASURED_SETS, WARMUP_SET)


def text(prompt):
    return "\n".join(message["content"] for message in prompt.messages)


@pytest.mark.parametrize(
    ("name", "least"), [("prose", 40), ("copy", 40), ("json", 40), ("code", 40), ("mixed", 160), ("warmup", 16)]
)
def test_every_set_is_large_enough(name, least):
    assert len(load_prompts(name)) >= least


def test_ids_and_texts_are_unique_over_all_sets():
    prompts = [prompt for name in ALL for prompt in load_prompts(name)]
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({" ".join(text(prompt).split()).lower() for prompt in prompts}) == len(prompts)


def test_messages_are_chats_that_end_with_the_user():
    for name in ALL:
        for prompt in load_prompts(name):
            assert [message["role"] for message in prompt.messages] == ["user"]
            assert all(set(message) == {"role", "content"} for message in prompt.messages)
            assert text(prompt).strip() == text(prompt)


def test_prose_is_short_and_copy_carries_a_passage():
    assert all(len(text(prompt)) <= 160 and "\n" not in text(prompt) for prompt in load_prompts("prose"))
    for prompt in load_prompts("copy"):
        instruction, passage = text(prompt).split("\n\n", 1)
        assert instruction.endswith(":")
        assert 120 <= len(passage) <= 900


@pytest.mark.parametrize("name", ["json", "code"])
def test_json_and_code_ask_something_of_given_material(name):
    for prompt in load_prompts(name):
        instruction, material = text(prompt).split("\n\n", 1)
        assert instruction.endswith(":") or name == "code"
        assert 200 <= len(text(prompt)) <= 900
        assert len(material.splitlines()) >= (5 if name == "code" else 1)


def test_json_asks_for_json():
    assert all("json" in text(prompt).split("\n\n", 1)[0].lower() for prompt in load_prompts("json"))


def test_code_is_python_that_has_something_to_edit():
    for prompt in load_prompts("code"):
        tree = ast.parse(text(prompt).split("\n\n", 1)[1])
        assert any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)


def test_mixed_has_every_measured_set_in_turn():
    mixed = load_prompts(MIXED_SET)
    assert [prompt.set for prompt in mixed] == list(MEASURED_SETS) * 40
    assert [prompt.id for prompt in mixed[:8]] == [f"{name}-{n:02d}" for n in (1, 2) for name in MEASURED_SETS]


def test_sets_of_different_size_are_taken_in_turn_to_their_end():
    prose, warmup = load_prompts("prose"), load_prompts("warmup")
    found = in_turn([prose, warmup])
    assert found[:4] == [prose[0], warmup[0], prose[1], warmup[1]]
    assert found[2 * len(warmup) :] == prose[len(warmup) :]


def test_warm_up_has_both_kinds():
    kinds = ["\n\n" in text(prompt) for prompt in load_prompts(WARMUP_SET)]
    assert sum(kinds) >= 4
    assert len(kinds) - sum(kinds) >= 4


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_three_repetitions_share_no_prompt(batch):
    prompts = load_prompts("prose")
    slices = [prompts_for(prompts, batch, repetition) for repetition in range(3)]
    ids = [prompt.id for chosen in slices for prompt in chosen]
    assert len(set(ids)) == len(ids)
    assert all(len(chosen) % batch == 0 and len(chosen) >= 4 for chosen in slices)


def test_a_large_batch_wraps_around_without_repeating_within_itself():
    prompts = load_prompts("copy")
    for repetition in range(4):
        chosen = prompts_for(prompts, 32, repetition)
        assert len({prompt.id for prompt in chosen}) == 32


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(ValueError, match="batch 99"):
        prompts_for(load_prompts("prose"), 99, 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"id": "a", "set": "other", "messages": [{"role": "user", "content": "x"}]}, "set is 'other'"),
        ({"id": "a", "set": "mine", "messages": []}, "messages with content"),
        ({"id": "a", "set": "mine", "messages": [{"role": "user", "content": " "}]}, "messages with content"),
        ({"id": "", "set": "mine", "messages": [{"role": "user", "content": "x"}]}, "needs an id"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, reason):
    (tmp_path / "mine.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=reason) as caught:
        load_prompts("mine", tmp_path)
    assert "mine.jsonl:1" in str(caught.value)


def test_an_unknown_set_lists_the_known_ones(tmp_path):
    (tmp_path / "here.jsonl").write_text("")
    with pytest.raises(ValueError, match="there are: here"):
        load_prompts("gone", tmp_path)
    with pytest.raises(ValueError, match="empty"):
        load_prompts("here", tmp_path)
