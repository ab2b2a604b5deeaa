"""A tiny llama with random weights, and answers nobody gave: what training can be tested with in a second."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from scripts.distil_lib.held_out import held_out, prompt_hash
from scripts.distil_lib.shards import Written, write_shard
from scripts.distil_lib.target import Target

VOCABULARY, HEAD = 96, 48


def tiny_checkpoint(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A checkpoint with a tokenizer whose words are w0, w1, …"""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.normal_(0, 0.3) if weight.ndim > 1 else weight.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    vocab = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def tiny_target(folder: Path, seed: int = 0) -> Target:
    torch.set_num_threads(1)
    return Target(tiny_checkpoint(folder / "target", seed), dtype=torch.float32)


def answers(count: int, seed: int, *, held: bool | None = None) -> list[Written]:
    """Random sequences, called greedy answers. ``held``: only to prompts that are held out, or only to others."""
    random = np.random.default_rng(seed)
    found: list[Written] = []
    while len(found) < count:
        hashed = prompt_hash(f"prompt {seed} {random.integers(1 << 40)}")
        if held is None or held_out(hashed) == held:
            prompt, length = random.integers(3, 9), random.integers(20, 32)
            found.append(Written(random.integers(0, VOCABULARY, length), int(prompt), 0.0, hashed, "test"))
    return found


def greedy(target: Target, count: int, seed: int) -> list[Written]:
    """The target's greedy answers to random prompts that may be learned from."""
    found = []
    for each in answers(count, seed, held=False):
        ids = torch.from_numpy(each.ids[: each.prompt])[None]
        with torch.inference_mode():
            for _ in range(len(each.ids) - each.prompt):
                best = (target.features(ids)[:, -1] @ target.head.T).argmax(-1)
                ids = torch.cat([ids, best[:, None]], 1)
        found.append(Written(ids[0].numpy(), each.prompt, 0.0, each.hashed, each.kind))
    return found


def shards(folder: Path, target: Target, written: Sequence[Sequence[Written]]) -> Path:
    """A folder with one shard for each list."""
    for number, sequences in enumerate(written):
        write_shard(folder, f"{number:05d}", sequences, weights=target.weights, vocabulary=VOCABULARY)
    return folder
