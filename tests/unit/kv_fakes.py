"""A target's and a draft's end of the KV plane over a cache whose keys and values are the tokens themselves."""

from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.chain.faults import FaultPolicy
from deployments.draft.kv_intake import KvIntake
from deployments.target.kv_export import KvExport
from hw.kv.manifest import (
    Attention,
    Geometry,
    Identity,
    Layout,
    Manifest,
    Numerics,
    Rope,
    compute_fingerprint,
    manifest_for,
)
from tests.unit.draft_fakes import FakeModel

WEIGHTS = "ab" * 32


def manifest(role: str = "target_to_draft", **changes: Any) -> Manifest:
    """Of KV of one layer, one head and two numbers a token, by a target of these weights; ``changes`` to parts of it."""
    identity = {"model": "m", "weights": WEIGHTS, "adapter": "", "tokenizer": "cd" * 32, "compute": _compute(role)}
    rope = {"applied": True, "style": "neox", "rotary_dim": 2, "theta": "10000", "scaling": ""}
    for part in (identity, rope):
        part.update({name: value for name, value in changes.items() if name in part})
    return manifest_for(
        Identity(**identity),
        Geometry(0, 1, 1, 0, 1, 2, 2, 0),
        Numerics(k="float32", v="float32", scheme="", scale=""),
        Layout("HND", "token_major"),
        Rope(**rope),  # type: ignore[arg-type]
        Attention(0, 0, ""),
        role=role,  # type: ignore[arg-type]
        exactness="same_function",
    )


def _compute(engine: str) -> str:
    return compute_fingerprint(
        engine=engine, engine_version="1", dtype="float32", attention="a", isa="i", packing="p", batch_invariant=False
    )


class TokenCache:
    """Stands for vLLM's pages: a sequence's KV at a position is its token there. ``block_ids`` is the sequence itself."""

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        return (2, 1, tokens, 2)

    def read(self, block_ids: list[int], start: int, stop: int, out: npt.NDArray[Any]) -> None:
        out[:] = np.asarray(block_ids[start:stop], np.float32)[None, None, :, None]


def export(sequences: dict[str, list[int]], *, shown: Manifest | None = None, **more: Any) -> KvExport:
    """Exports of sequences by request name, read at the time of the export."""
    arguments: dict[str, Any] = {"memory_bytes": 1 << 20, **more}
    return KvExport(
        TokenCache(), shown or manifest(), sequences.get, arguments.pop("faults", FaultPolicy()), **arguments
    )  # type: ignore[arg-type]


def intake(model: FakeModel, holds: Manifest | None = None) -> KvIntake:
    return KvIntake(model, holds or manifest("draft_to_target"), WEIGHTS)
