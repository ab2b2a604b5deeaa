"""``scripts/kv capture``: a real draft reads a prompt, and what it then holds becomes a file."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from hw.kv.container import write_file
from hw.kv.digests import Algorithm
from hw.kv.manifest import Manifest
from hw.kv.prefix import Subject
from hw.kv.record import Clock, Header, Record, header_nbytes, parse, seal_into
from hw.kv.rows import payload_nbytes, plan_rows
from hw.onnx.checkpoint import CheckpointError
from scripts.kv_lib.problem import Problem
from scripts.kv_lib.tokens import tokens_file

PROMPT = (
    "Keys and values of a prompt are what a transformer remembers of it. One engine computed them; "
    "another one that needs them can read them instead of computing them again."
)


@dataclass(frozen=True)
class Prompt:
    """Text to read, at most ``most`` tokens of it."""

    text: str
    most: int


def capture(draft: Path, prompt: Prompt, out: Path, salt: bytes, console: Console) -> int:
    """Write ``out`` and, beside it, the prompt's token ids; 0. Raises Problem, OSError."""
    from hw.onnx.session import OnnxModel, UnsupportedModel  # loading ONNX Runtime takes seconds; --help should not

    tokens = _encode(draft, prompt)
    try:
        manifest = manifest_of(draft)
        model = OnnxModel(draft, slots=1, context=len(tokens), warm_up=False)
    except UnsupportedModel as error:
        raise Problem(str(error)) from None
    if len(tokens) > model.context:
        raise Problem(f"{draft} reads at most {model.context} tokens, not {len(tokens)}: give --max-tokens")
    model.prefill(0, tokens, 0)
    size = write_file(out, manifest, [record_of(manifest, tokens, model.read_kv(0, 0, len(tokens)), salt)])
    beside = tokens_file(out)
    beside.write_text(json.dumps(tokens) + "\n", encoding="utf-8")
    console.print(
        f"{out}: {size:,} bytes, keys and values of {len(tokens)} tokens by {draft}\n"
        f"{beside}: the tokens\n"
        f"next:  scripts/kv inspect {out}\n       scripts/kv verify {out} --tokens {beside}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def manifest_of(draft: Path) -> Manifest:
    """What a session over the folder computes. Raises Problem."""
    from hw.onnx.kv_identity import draft_manifest

    try:
        return draft_manifest(draft, "cpu")
    except CheckpointError as error:
        raise Problem(f"{error} (scripts/prepare_models fills models/)") from None


def record_of(manifest: Manifest, tokens: list[int], kv: npt.NDArray[Any], salt: bytes) -> Record:
    """A record, with digests and without a lease, of ``kv`` ``[2 * layers, heads, len(tokens), dim]`` from position 0 on."""
    rows = plan_rows(manifest, 0, len(tokens))
    at = header_nbytes(len(rows))
    buffer = bytearray(at + payload_nbytes(rows))
    np.frombuffer(buffer, kv.dtype, kv.size, at).reshape(kv.shape)[...] = kv
    subject = Subject.of(tokens, 0, salt=salt, adapter=manifest.identity.adapter)
    header = Header(
        manifest.digest(), subject, 1, secrets.token_bytes(16), Clock.NONE, bytes(16), 0, Algorithm.BLAKE3
    )  # fmt: skip
    seal_into(buffer, header, rows)
    return parse(buffer)


def _encode(draft: Path, prompt: Prompt) -> list[int]:
    from tokenizers import Tokenizer

    path = draft / "tokenizer.json"
    if not path.is_file():
        raise Problem(f"{path} is missing: run scripts/prepare_models, or name another folder with --draft")
    tokens = list(Tokenizer.from_file(str(path)).encode(prompt.text).ids)[: prompt.most]
    if not tokens:
        raise Problem("the prompt has no tokens: write something after --prompt")
    return tokens
