"""Small model folders and children in the place of processes, for tests of scripts/select_draft."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hw.onnx.checkpoint import Manifest, tokenizer_fingerprint
from scripts.select_lib import drafts, measure
from scripts.select_lib.acceptance import DEPTH

WORDS = ["<end>", "a", "b", "c", "ab"]


def tokenizer(folder: Path, words: Sequence[str] = WORDS, merges: Sequence[str] = ("a b",), special: int = 0) -> None:
    content = {
        "model": {"type": "BPE", "vocab": {word: place for place, word in enumerate(words)}, "merges": list(merges)},
        "added_tokens": [{"id": special, "content": words[special], "special": True}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


def target(folder: Path) -> Path:
    """A checkpoint of 100 zeros."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "vocab_size": len(WORDS),
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [10, 10], "data_offsets": [0, 400]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(400))
    tokenizer(folder)
    return folder


def draft(folder: Path, nbytes: int = 40, **facts: Any) -> Path:
    """A prepared draft whose graph is no graph."""
    folder.mkdir(parents=True)
    tokenizer(folder, facts.pop("words", WORDS))
    (folder / "model.onnx").write_bytes(bytes(nbytes))
    given: dict[str, Any] = {
        "kind": "draft",
        "key": folder.name,
        "weights": "w",
        "tokenizer": tokenizer_fingerprint(folder),
        "architecture": "LlamaForCausalLM",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 4,
        "vocab_size": len(WORDS),
        "max_context": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": "",
        "created_by": {},
        **facts,
    }
    Manifest(**given).write(folder)
    return folder


class FakeChild:
    """Answers as the real children would, at once. ``asked``: every command of all of them, with who was asked."""

    asked: ClassVar[list[tuple[str, str]]] = []
    fails_at: ClassVar[str] = ""  # a command that ends in an error

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name
        self.log = Path("none.log")

    def ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.answer(timeout_s)

    def tell(self, **command: Any) -> None:
        self._last = command
        self.asked.append((self.name, command["command"]))
        if command["command"] == self.fails_at:
            raise RuntimeError(f"{self.name} is gone")

    def answer(self, timeout_s: float) -> dict[str, Any]:
        last = self._last
        match last["command"]:
            case "render":
                return {"prompts": [[1, 2, 3]] * len(last["chats"])}
            case "read":
                return {"seconds": [0.05] * len(last["prompts"])}
            case "answer":
                return {"answers": [[1, 2, 1, 2, 1, 2, 1, 2, 1, 2]] * len(last["prompts"])}
            case "kv_offer":
                return {"manifest": ""}
            case "time_steps":
                ms = 10.0 + last["verified"] * last["batch"] if "verified" in last else 10.0
                return {"ms": [ms] * last["steps"], "uneven": 0, "began": 0.0, "ended": 1.0}
            case "load":
                return {"load_s": 1.0, "memory_mib": 100.0, "kv_bytes": 64, "context": 2048}
            case "follow":
                count = len(last["answer"]) - 1
                depth = 3 if "good" in self.name else 1
                runs = "".join(str(min(depth, count - at)) for at in range(count))
                offered = "0" * count if self.name == "suffix" else str(DEPTH) * count
                right = "0" * count if self.name == "suffix" else runs
                return {"limit": last["limit"], "offered": offered, "right": right, "misses": 2, "runners": [1, 0, 0]}
            case "time_calls":
                return {"ms": [2.0 + 0.5 * last["batch"]] * last["calls"]}
            case "time_reading":
                return {"ms": [1.0 + 0.5 * last["tokens"]] * last["calls"]}
            case "compute" | "rest":
                return {"pieces": [(0.1, 0.003), (0.2, 0.003)]}
        raise AssertionError(last)

    def thaw(self) -> None: ...

    def freeze(self) -> None: ...

    def stop(self) -> None: ...


def use_fakes(monkeypatch: Any, results: Path) -> type[FakeChild]:
    """Put fakes in the place of all processes, and what is kept of answers under ``results``."""
    FakeChild.asked, FakeChild.fails_at = [], ""
    monkeypatch.setattr(measure, "Child", FakeChild)
    monkeypatch.setattr(drafts, "Child", FakeChild)
    monkeypatch.setattr(measure, "ROOT", results)
    return FakeChild
