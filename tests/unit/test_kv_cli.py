"""scripts/kv: what its commands say of good files and bad ones, and its benchmark over tiny sizes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from deployments.kv import salt_of
from hw.kv.container import parse_container, read_file, write_file
from hw.kv.manifest import Manifest
from hw.onnx.slots import KVBuffer
from scripts.kv_lib import bench, bench_path, bench_report, capture, cli
from tests.unit.kv.samples import manifest

TOKENS = list(range(7, 31))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def one(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        told = capsys.readouterr()
        return code, told.out, told.err

    return one


def numbers(of: Manifest, tokens: int, seed: int = 0) -> npt.NDArray[np.float32]:
    geometry = of.geometry
    shape = (2 * geometry.layers, geometry.heads, tokens, geometry.head_dim)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """KV of ``TOKENS`` in float32, of the tenant ``a``."""
    path = tmp_path / "a.kv"
    of = manifest()
    write_file(path, of, [capture.record_of(of, TOKENS, numbers(of, len(TOKENS)), salt_of("a"))])
    return path


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_shows_what_is_in_a_file(run: Run, file: Path) -> None:
    code, out, _ = run("inspect", file)
    assert code == 0
    for said in (manifest().digest().hex(), "token_major", "positions 0..23", "0..3", "blake3", "target_to_draft"):
        assert said in out


def test_inspect_as_json_has_every_field(run: Run, file: Path) -> None:
    found = json.loads(run("inspect", file, "--json")[1])
    record = read_file(file).records[0]
    assert found["manifest"] == json.loads(manifest().encode())
    assert found["records"][0]["valid_tokens"] == len(TOKENS)
    assert found["records"][0]["prefix_hash"] == record.header.subject.prefix_hash.hex()
    assert [row["digest"] for row in found["records"][0]["rows"]] == [row.digest.hex() for row in record.rows]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_passes_with_the_right_tokens_and_tenant(run: Run, file: Path, tmp_path: Path) -> None:
    listed = tmp_path / "tokens.json"
    listed.write_text(json.dumps([*TOKENS, 99]))  # what comes after the record does not matter
    for given_ in (listed, ",".join(map(str, TOKENS)), " ".join(map(str, TOKENS))):
        code, out, _ = run("verify", file, "--tokens", given_, "--tenant", "a")
        assert code == 0, out
        assert "FAILED" not in out
    assert run("verify", file, "--tokens", listed, "--salt", salt_of("a").hex())[0] == 0
    code, out, _ = run("verify", file)
    assert code == 0
    assert "Not checked" in out


@pytest.mark.parametrize(
    ("tokens", "tenant", "said"),
    [
        ([*TOKENS[:-1], 1], "a", "prefix_mismatch"),
        ([1, *TOKENS[1:]], "a", "prefix_mismatch"),
        (TOKENS, "b", "tenant_mismatch"),
        (TOKENS, "", "tenant_mismatch"),
        (TOKENS[:-1], "a", "only 23 tokens"),
    ],
)
def test_verify_fails_for_others(run: Run, file: Path, tokens: list[int], tenant: str, said: str) -> None:
    code, out, _ = run("verify", file, "--tokens", ",".join(map(str, tokens)), "--tenant", tenant)
    assert code == 1
    assert said in out


def test_verify_finds_damage_anywhere(run: Run, file: Path, tmp_path: Path) -> None:
    good, bad = file.read_bytes(), tmp_path / "bad.kv"
    for at in [*range(0, len(good), 997), len(good) - 1]:
        damaged = bytearray(good)
        damaged[at] ^= 0x10
        bad.write_bytes(damaged)
        code, out, error = run("verify", bad)
        assert code == 1, at
        assert "FAILED" in out or "scripts/kv verify:" in error
    bad.write_bytes(good[:-64])
    code, _, error = run("verify", bad)
    assert code == 1
    assert "truncated" in error
    assert "copy it again" in error


def test_verify_finds_numbers_that_are_none(run: Run, tmp_path: Path) -> None:
    for dtype, words in (("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        of = manifest(numerics__k=dtype, numerics__v=dtype)
        kv = numbers(of, len(TOKENS)).astype(words)
        for row, value in ((2, np.nan), (3, np.inf)):
            spoilt = kv.copy()
            spoilt[row, 1, 5, 3] = value
            path = tmp_path / "nan.kv"
            write_file(path, of, [capture.record_of(of, TOKENS, spoilt, b"")])
            code, out, _ = run("verify", path)
            assert code == 1
            assert f"{'KV'[row % 2]} holds NaN or infinity" in out
        write_file(path, of, [capture.record_of(of, TOKENS, kv, b"")])
        assert run("verify", path)[0] == 0


# --- convert ----------------------------------------------------------------------------------------------------------


def test_lossless_conversions_lead_back_to_the_same_payload(run: Run, file: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there.kv", tmp_path / "back.kv"
    for ways in (
        (["--block-tokens", 16], ["--block-tokens", 0]),
        (["--order", "NHD"], ["--order", "HND"]),
        (["--block-tokens", 16, "--packing", "k_transposed"], ["--block-tokens", 0, "--packing", "token_major"]),
    ):
        code, out, _ = run("convert", file, there, *ways[0], "--force")
        assert code == 0
        assert "lossless" in out
        assert "lossy" not in out
        assert run("verify", there, "--tokens", ",".join(map(str, TOKENS)), "--tenant", "a")[0] == 0
        assert run("convert", there, back, *ways[1], "--force")[0] == 0
        assert parse_container(back.read_bytes()) == parse_container(file.read_bytes())


def test_layers_and_heads_are_cut(run: Run, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "part.kv"
    assert run("convert", file, out, "--layers", "1:3", "--heads", "1:2")[0] == 0
    found = read_file(out)
    assert (found.manifest.geometry.first_layer, found.manifest.geometry.layers) == (1, 2)
    part = np.frombuffer(found.records[0].row(0), np.float32).reshape(4, 1, len(TOKENS), 32)
    assert np.array_equal(part, numbers(manifest(), len(TOKENS))[2:6, 1:2])


def test_lossy_conversions_say_what_they_lost(run: Run, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.kv"
    code, told, _ = run("convert", file, out, "--k-dtype", "int8", "--v-dtype", "bfloat16", "--scale", "float16")
    assert code == 0
    assert "largest error" in told
    assert "lossy     cast(v,float32,bfloat16)" in told
    found = read_file(out).manifest
    assert found.exactness == "approximate"
    assert len(found.lineage) == 2
    assert found.numerics.scale == "float16"
    assert run("verify", out)[0] == 0
    code, _, error = run("convert", out, tmp_path / "again.kv", "--dtype", "int4")
    assert code == 1
    assert "double_quantisation" in error
    assert "quantise the file it was made from" in error
    assert not (tmp_path / "again.kv").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--layers", "2:9"], 1, "layers_missing"),
        (["--heads", "1:3"], 1, "the model has 2"),
        (["--packing", "sideways"], 1, "layout.packing"),
        (["--packing", "k_transposed", "--order", "NHD"], 1, "HND"),
        (["--packing", "opaque:x", "--block-tokens", "16"], 1, "opaque_packing"),
        (["--layers", "3"], 2, "write 0:2"),
        (["--block-tokens", "-1"], 2, "--block-tokens"),
        (["--dtype", "int8", "--k-dtype", "int8"], 2, "--k-dtype"),
    ],
)
def test_what_cannot_be_converted(
    run: Run, file: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    out = tmp_path / "out.kv"
    got, _, error = run("convert", file, out, *arguments)
    assert got == code
    assert said in error
    assert not out.exists()


def test_damage_gets_no_new_digests_and_files_are_not_lost(run: Run, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.kv"
    out.write_bytes(b"mine")
    code, _, error = run("convert", file, out, "--order", "NHD")
    assert code == 2
    assert "--force" in error
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    code, _, error = run("convert", file, out, "--order", "NHD", "--force")
    assert code == 1
    assert "row_digest" in error
    assert out.read_bytes() == b"mine"


def test_what_is_no_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x" * 100)
    for name, said in (("none.kv", "is not there"), ("text", "scripts/kv capture"), (".", "directory")):
        for command in ("inspect", "verify"):
            code, _, error = run(command, tmp_path / name)
            assert code == 1
            assert said in error
    (tmp_path / "ids").write_text("one two")
    code, _, error = run("verify", tmp_path / "text", "--tokens", tmp_path / "ids")
    assert code == 1
    assert "token ids" in error


def test_help_teaches(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "scripts/kv capture --out prompt.kv" in out
    for command in ("inspect", "verify", "convert", "capture", "bench"):
        assert run(command, "--help")[0] == 0
        assert command in out
    assert run()[0] == 2


# --- capture and bench, over a model of nothing but slots -----------------------------------------------------------------


class Slots:
    """Reads prompts in no time."""

    vocab_size = 4

    def __init__(self, _: Path, *, slots: int = 1, context: int, **__: Any) -> None:
        self.context = context
        self.kv = KVBuffer(4, slots, 2, context, 32)
        self.write_kv = self.kv.write

    def prefill(self, slot: int, tokens: list[int], start: int) -> None:
        kv = numbers(manifest(), len(tokens), sum(tokens))
        self.kv.array[:, slot, :, start : start + len(tokens)] = kv

    def read_kv(self, slot: int, start: int, stop: int) -> npt.NDArray[Any]:
        return self.kv.array[:, slot, :, start:stop]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A draft's folder, and no draft."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "two": 1, "words": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = manifest(role="draft_to_target", exactness="approximate")
    for module in (capture, bench_path, bench):
        monkeypatch.setattr(module, "manifest_of", lambda _: own)
    for name in ("hw.onnx.session", "scripts.kv_lib.bench_path"):
        monkeypatch.setattr(f"{name}.OnnxModel", Slots)
    return tmp_path


def test_what_is_captured_can_be_verified(run: Run, folder: Path) -> None:
    out = folder / "p.kv"
    code, told, _ = run("capture", "--draft", folder, "--out", out, "--prompt", "two words two", "--tenant", "t")
    assert code == 0
    assert "scripts/kv verify" in told
    assert json.loads((folder / "p.kv.tokens.json").read_text()) == [1, 2, 1]
    assert run("verify", out, "--tokens", folder / "p.kv.tokens.json", "--tenant", "t")[0] == 0
    found = np.frombuffer(read_file(out).records[0].row(0), np.float32)
    assert np.array_equal(found, numbers(manifest(), 3, 4).reshape(-1))
    assert run("capture", "--draft", folder, "--out", out)[0] == 2  # it is there
    assert run("capture", "--draft", folder, "--out", out, "--force", "--prompt", "words", "--max-tokens", 1)[0] == 0
    code, _, error = run("capture", "--draft", folder, "--out", folder / "q.kv", "--prompt", "")
    assert code == 1
    assert "--prompt" in error


def test_bench_measures_and_writes_everything(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_QUICK_SIZES", (1, 16, 40))
    monkeypatch.setattr(bench_path, "_ARENA", 1 << 20)
    out = folder / "kv.json"
    code, told, error = run("bench", "--quick", "--draft", folder, "--tokens", 32, "--repetitions", 1, "--out", out)
    assert code == 0, error
    result = json.loads(out.read_text())
    assert {(cell["packing"], cell["block_tokens"]) for cell in result["pages"]} == {
        (packing, size) for packing in ("k_transposed", "amx_vnni") for size in (16, 128)
    }
    assert result["import"]["payload_bytes"] * 2 == result["import"]["slot_bytes"] == 8 * 2 * 32 * 32 * 4
    assert result["import"]["copies"] == {"export": 1, "transport": 0, "import": 1, "reader_sees_writes": True}
    assert result["import"]["import"]["of_prefill"] > 0
    assert [row["tokens"] for row in result["sizes"]["rows"]] == [1, 16, 40]
    page = out.with_suffix(".md").read_text()
    for part in bench_report.parts(result):
        assert f"## {part.title}" in page
        assert part.title in told
    assert "wanted: 100" in page


def test_bench_notices_kv_that_is_not_what_was_sent(folder: Path) -> None:
    with bench_path.Way(folder, 32, "k_transposed") as way:
        way.turn(32)()
        way.check(32)
        way.model.kv.array[0, 3, 0, 7, 0] += 1
        with pytest.raises(RuntimeError, match="not what was exported"):
            way.check(32)


def test_bench_refuses_wrong_options(run: Run, folder: Path) -> None:
    for arguments, said in (
        (("--only", "pages,nothing"), "no section nothing"),
        (("--only", ""), "there are: pages"),
        (("--tokens", "0"), "from 1 on"),
        (("--out", "x.md"), "JSON"),
    ):
        code, _, error = run("bench", "--draft", folder, *arguments)
        assert code == 2
        assert said in error
