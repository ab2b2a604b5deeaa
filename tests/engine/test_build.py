"""The prepared models are what drafts rely on: inputs and outputs of the graph, tokenizer, agreement with the target."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hw.onnx.build import expected_inputs, trial_run
from hw.onnx.checkpoint import Manifest, ModelShape, tokenizer_fingerprint, weights_fingerprint
from tests.models import model

pytestmark = pytest.mark.engine

DRAFTS = ["draft-int4", "draft-int8"]


@pytest.fixture(params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> Path:
    return model(request.param)


def session(folder: Path) -> Any:
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    return ort.InferenceSession(str(folder / "model.onnx"), settings, providers=["CPUExecutionProvider"])


def test_one_step(draft: Path) -> None:
    manifest = Manifest.read(draft)
    run = session(draft)
    assert {value.name for value in run.get_inputs()} == expected_inputs(manifest.layers)
    past = np.zeros((1, manifest.kv_heads, 0, manifest.head_dim), manifest.kv_dtype)
    feeds = {f"past_key_values.{i}.{part}": past for i in range(manifest.layers) for part in ("key", "value")}
    feeds |= {"input_ids": np.array([[1, 520]], np.int64), "attention_mask": np.ones((1, 2), np.int64)}
    outputs = dict(zip([value.name for value in run.get_outputs()], run.run(None, feeds), strict=True))
    assert outputs["logits"].shape == (1, 1, manifest.vocab_size)
    assert outputs["logits"].dtype == np.float32
    assert np.isfinite(outputs["logits"]).all()
    assert outputs["present.0.key"].shape == (1, manifest.kv_heads, 2, manifest.head_dim)
    assert len(outputs) == 1 + 2 * manifest.layers


def test_trial_run_takes_several_sequences(draft: Path) -> None:
    assert trial_run(draft, ModelShape.read(model("target"))) == "float32"


def test_manifest_tells_what_it_was_made_of(draft: Path) -> None:
    manifest = Manifest.read(draft)
    assert manifest.complete(draft)
    assert manifest.weights == weights_fingerprint(model("target"))
    assert manifest.tokenizer == tokenizer_fingerprint(model("target")) == tokenizer_fingerprint(draft)
    assert manifest.bits == int(draft.name[-1])
    assert manifest.last_logits_only


def test_draft_continues_like_the_target(draft: Path) -> None:
    """Greedy text of a short chat against the float32 checkpoint: the first tokens agree (int8), some of them (int4)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model("target"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    target = AutoModelForCausalLM.from_pretrained(model("target"), dtype=torch.float32)
    wanted = target.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    assert "Paris" in tokenizer.decode(wanted)

    manifest = Manifest.read(draft)
    run = session(draft)
    agreed = 0
    for place, token in enumerate(wanted):
        context = ids + wanted[:place]
        past = np.zeros((1, manifest.kv_heads, 0, manifest.head_dim), manifest.kv_dtype)
        feeds = {f"past_key_values.{i}.{part}": past for i in range(manifest.layers) for part in ("key", "value")}
        feeds |= {"input_ids": np.array([context], np.int64), "attention_mask": np.ones((1, len(context)), np.int64)}
        agreed += int(run.run(["logits"], feeds)[0][0, -1].argmax()) == token
    assert agreed >= (7 if manifest.bits == 8 else 5)


class TestTarget:
    def test_stops_at_the_end_of_a_message(self) -> None:
        folder = model("target")
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
        tokens = {t["id"]: t["content"] for t in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
        assert tokens[2] == "<|im_end|>"

    def test_chat_template_and_tokens(self) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model("target"))
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
        )
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.eos_token_id == 2
        # Digits one by one, spaces before them together: as the model was trained.
        assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
        for sample in ["  1 in 2024\n\n   3 ", "naïve — 東京 🙂", "<|im_start|>x<|im_end|>"]:
            assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample

    def test_name_is_clean(self) -> None:
        assert (
            json.loads((model("target") / "config.json").read_text())["_model_name_or_path"] == "SmolLM2-135M-Instruct"
        )
