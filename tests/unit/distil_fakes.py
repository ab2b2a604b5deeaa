"""A tiny llama with random weights, and answers nobody gave: what training can be tested with in a second."""

import json
from collections.abc import Callable
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


def answers(
    target: Target, count: int, seed: int, held: Callable[[str], bool] = held_out, *, both: bool = True
) -> list[Written]:
    """Greedy answers to random prompts; not ``both``: only to prompts that may be learned from."""
    random = np.random.default_rng(seed)
    found: list[Written] = []
    while len(found) < count:
        hashed = prompt_hash(f"prompt {seed} {random.integers(1 << 40)}")
        if held(hashed) and not both:
            continue
        prompt = random.integers(0, VOCABULARY, random.integers(3, 9))
        ids = torch.from_numpy(prompt)[None]
        with torch.inference_mode():
            for _ in range(int(random.integers(12, 24))):
                best = (target.features(ids)[:, -1] @ target.head.T).argmax(-1)
                ids = torch.cat([ids, best[:, None]], 1)
        found.append(Written(ids[0].numpy(), len(prompt), 0.0, hashed, "test"))
    return found


def shards(folder: Path, target: Target, count: int = 2, each: int = 12) -> Path:
    for number in range(count):
        written = answers(target, each, number)
        write_shard(folder, f"{number:05d}", written, weights=target.weights, vocabulary=VOCABULARY)
    return folder
