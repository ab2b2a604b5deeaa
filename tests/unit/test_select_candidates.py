"""Who may draft for a target: what is refused, with which fact, and what is only warned of."""

from pathlib import Path

import pytest

from scripts.select_lib import candidates, rules
from scripts.select_lib.candidates import Unusable, read_candidate, read_target, tokenizer_difference
from scripts.select_lib.drafts import kv_verdict
from tests.unit.select_cases import WORDS, draft, target, tokenizer


def test_a_target_and_a_draft_of_it(tmp_path: Path) -> None:
    found = read_target(target(tmp_path / "target"))
    assert (found.parameters, found.nbytes > 400, found.shape.layers) == (100, True, 2)
    candidate = read_candidate(draft(tmp_path / "draft-a"), found)
    assert (candidate.name, candidate.kind, candidate.asks_model) == ("draft-a", "model", True)
    assert rules.of_facts(candidate, found) == []


def test_no_target_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="name a checkpoint with --target, or run scripts/prepare_models"):
        read_target(tmp_path)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["<end>", "a", "x", "c", "ab"], "id 2 is 'b' in the target and 'x' in the draft"),
        (WORDS[:4], "id 4 is 'ab' in the target and nothing in the draft (5 and 4 tokens in all)"),
        ([*WORDS, "abc"], "id 5 is nothing in the target and 'abc' in the draft (5 and 6 tokens in all)"),
    ],
)
def test_another_tokenizer_is_refused_by_its_first_difference(tmp_path: Path, words: list[str], fact: str) -> None:
    found = read_target(target(tmp_path / "target"))
    with pytest.raises(Unusable, match="has another tokenizer than the target") as error:
        read_candidate(draft(tmp_path / "other", words=words), found)
    assert fact in str(error.value)


def test_merges_special_tokens_and_kinds_are_differences_too(tmp_path: Path) -> None:
    one, other = target(tmp_path / "target"), tmp_path / "other"
    other.mkdir()
    tokenizer(other, merges=["b a"])
    assert tokenizer_difference(one, other) == "merge 0 is 'a b' in the target and 'b a' in the draft"
    tokenizer(other, merges=[])
    assert tokenizer_difference(one, other) == "the target has 1 merges, the draft 0"
    tokenizer(other, special=1)
    assert tokenizer_difference(one, other) == "id 0 is special in only one of them"
    (other / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}')
    assert tokenizer_difference(one, other) == "the target's is BPE, the draft's Unigram"


def test_what_is_no_draft_is_refused(tmp_path: Path) -> None:
    found = read_target(target(tmp_path / "target"))
    with pytest.raises(Unusable, match=r"scripts/prepare_models --target .* --draft .* makes a draft of it"):
        read_candidate(found.folder, found)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unusable, match=r"has no model\.onnx; scripts/prepare_models makes drafts"):
        read_candidate(tmp_path / "empty", found)
    with pytest.raises(Unusable, match="of kind 'sentences'"):
        read_candidate(draft(tmp_path / "s", kind="sentences"), found)


def test_a_conditioned_draft_belongs_to_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_target(target(tmp_path / "target"))
    with pytest.raises(Unusable, match="another target's hidden states: other, this target is") as error:
        read_candidate(draft(tmp_path / "other", kind="conditioned", target_weights="other"), found)
    assert found.weights in str(error.value)
    mine = draft(tmp_path / "mine", kind="conditioned", target_weights=found.weights)
    assert read_candidate(mine, found).kind == "conditioned"
    monkeypatch.setattr(candidates, "_RUNTIME", "hw.onnx.not_there")
    with pytest.raises(Unusable, match="takes the target's hidden states, which this version cannot run yet"):
        read_candidate(mine, found)


def test_rules_of_thumb(tmp_path: Path) -> None:
    found = read_target(target(tmp_path / "target"))
    odd = read_candidate(
        draft(tmp_path / "odd", 300, architecture="Qwen3ForCausalLM", rope_theta=1e6, max_context=512), found
    )
    size, architecture, rope, context = rules.of_facts(odd, found)
    assert "% of the target's bytes; a draft usually has 10%, at most a third" in size
    assert "Qwen3ForCausalLM, the target a LlamaForCausalLM" in architecture
    assert "RoPE θ 1e+06" in rope
    assert "at most 512 tokens" in context
    (half,) = rules.of_facts(read_candidate(draft(tmp_path / "half", 100), found), found)
    assert "usually has up to 10%" in half


def test_kv_verdicts_are_words(tmp_path: Path) -> None:
    found = read_target(target(tmp_path / "target"))
    candidate = read_candidate(draft(tmp_path / "a"), found)
    assert kv_verdict(candidate, "", "cpu") == ("the target's cannot be moved", False)
    words, takes = kv_verdict(candidate, "00", "cpu")
    assert words.startswith("REJECT (")
    assert not takes
    assert kv_verdict(candidates.lookup(), "00", "cpu") == ("takes none", False)
