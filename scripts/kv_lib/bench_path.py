"""A prompt's KV on its way: out of a target's pages, through shared memory, into a slot of a real draft.

The two ends are those that serve: ``KvExport`` of the target and ``KvIntake`` of the draft.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as changed

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Sampling
from deployments.draft.kv_intake import TAKEN, KvIntake
from deployments.draft.lines import Session
from deployments.kv import INLINE, SHARED_MEMORY
from deployments.target.kv_export import KvExport
from hw.kv.manifest import Manifest, Numerics
from hw.kv.store import Store
from hw.kv.transports.base import BlockKey
from hw.kv.transports.offers import StoreProducer
from hw.kv.transports.shared_memory import Arena, ArenaReader
from hw.onnx.session import OnnxModel, UnsupportedModel
from scripts.kv_lib.bench_pages import Pages
from scripts.kv_lib.capture import manifest_of
from scripts.kv_lib.problem import Problem
from scripts.kv_lib.turns import Taken, Tell, Work, line, speed, take_turns, timed

BLOCK_TOKENS = 128  # vLLM's default on CPUs
SIZES = (1, 16, 64, 128, 256, 500, 512, 1024)  # 500 ends inside a block, as most prompts do
_SLOTS = 8
_SLOT, _OWN = 3, 1  # where KV is imported, and where the draft reads the prompt itself
_DRAFT, _REQUEST = "draft", "request"
_ARENA = 256 << 20


class Way:
    """Both ends, and a prompt whose KV lies in the target's pages. As a context manager: it gives the shared memory back."""

    def __init__(self, draft: Path, longest: int, packing: str) -> None:
        self.holds = manifest_of(draft)
        try:
            self.model = OnnxModel(draft, slots=_SLOTS, context=max(2048, longest + 1), warm_up=False)
        except (UnsupportedModel, FileNotFoundError) as error:
            raise Problem(str(error)) from None
        if longest >= self.model.context:
            raise Problem(f"--tokens: {draft} reads at most {self.model.context - 1}")
        self.geometry = self.holds.geometry
        self.prompt = [int(n) for n in np.random.default_rng(0).integers(0, self.model.vocab_size, longest + 1)]
        self.model.prefill(_OWN, self.prompt[:-1], 0)
        self.pages = Pages(self.geometry, longest, BLOCK_TOKENS, packing)
        own = np.ascontiguousarray(self.model.read_kv(_OWN, 0, longest)).astype(ml_dtypes.bfloat16)
        self.pages.cache.write(self.pages.ids, 0, own.view(np.uint16))
        self.computed = own  # what the target is taken to have computed
        shown = _target_manifest(self.holds)
        self.export = KvExport(
            self.pages.cache, shown, lambda _: self.pages.ids, FaultPolicy(kv_inline_bytes=_ARENA), memory_bytes=_ARENA
        )
        self.intake = KvIntake(self.model, self.holds, self.holds.identity.weights)
        if not self.export.arena:
            raise Problem("there is no shared memory here: give /dev/shm 300 MB, or bench with --only pages")
        if self.intake.meet({"manifest": shown.encode(), "arena": self.export.arena}) != SHARED_MEMORY:
            raise Problem("the draft refuses this KV: the log above says why")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.export.close()

    def bytes_of(self, tokens: int) -> int:
        """Of the payload as it travels: bfloat16."""
        return int(self.computed[:, :, :tokens].nbytes)

    def turn(self, tokens: int, link: str = SHARED_MEMORY, prefix: str = "") -> Work:
        """Export ``tokens`` and import them: times ``export``, ``import`` and ``both``."""
        session = Session((_DRAFT, _REQUEST), _SLOT, 0, Sampling(0.0, 0), self.prompt[: tokens + 1], 0.0)

        def once() -> dict[str, float]:
            self.export.connect({_DRAFT: link})
            self.export.forget(_REQUEST)  # a new prompt: its names are hashed, its memory is staged
            session.computed = 0
            began = time.perf_counter_ns()
            reference = self.export.export(_DRAFT, _REQUEST, self.prompt[:tokens], 0, "")
            between = time.perf_counter_ns()
            outcome = self.intake.take(session, reference)
            ended = time.perf_counter_ns()
            if outcome != TAKEN:
                raise RuntimeError(f"the KV was not taken: {outcome or 'nothing was exported'}")
            times = {"export": between - began, "import": ended - between, "both": ended - began}
            return {prefix + name: ns / 1e6 for name, ns in times.items()}

        return once

    def check(self, tokens: int) -> None:
        """Is in the slot what the target computed? RuntimeError if not."""
        there = self.model.read_kv(_SLOT, 0, tokens)
        if not np.array_equal(there, self.computed[:, :, :tokens].astype(np.float32)):
            raise RuntimeError("what arrived in the slot is not what was exported")


def measure_import(way: Way, tokens: int, repetitions: int, calls: int, tell: Tell) -> dict[str, Any]:
    """The draft's import of a prompt beside plain copies and its own prefill; the export, and both end to end."""
    nbytes = way.bytes_of(tokens)
    kv = np.array(way.computed[:, :, :tokens])
    slot_bytes = kv.size * way.model.kv.array.itemsize
    way.turn(tokens)()
    way.check(tokens)
    works = [
        _memcpy("memcpy", nbytes),
        _memcpy("memcpy_slot", slot_bytes),
        _memcpy("memcpy_traffic", (nbytes + slot_bytes) // 2),
        timed("write_kv", lambda: way.model.write_kv(_SLOT, 0, kv)),
        way.turn(tokens),
    ]
    prompt = way.prompt[:tokens]
    prefill = timed("prefill", lambda: way.model.prefill(_OWN, prompt, 0))
    taken = take_turns(works, repetitions, calls, tell, f"{tokens} tokens", [prefill])
    way.check(tokens)
    copies = ("memcpy", "memcpy_slot", "memcpy_traffic")
    return {
        "tokens": tokens,
        "block_tokens": BLOCK_TOKENS,
        "packing": way.pages.cache.packing,
        "payload_bytes": nbytes,
        "slot_bytes": slot_bytes,
        "slot_dtype": str(way.model.kv.array.dtype),
        **{name: speed(taken, name, nbytes) for name in copies},
        **{name: speed(taken, name, nbytes, *copies, "prefill") for name in ("write_kv", "import", "export", "both")},
        "prefill": speed(taken, "prefill", nbytes),
        "copies": {"export": 1, "transport": 0, "import": 1, "reader_sees_writes": reads_without_copy()},
    }


def measure_sizes(way: Way, sizes: Sequence[int], repetitions: int, calls: int, tell: Tell) -> dict[str, Any]:
    """Export and import by number of tokens, and straight lines through the medians.

    Tokens of a partial block leave the pages by another, slower way: lines of the export go through whole blocks only, where
    there are enough of them.
    """
    names = ("export", "import", "both")
    taken: Taken = take_turns(
        [way.turn(size, prefix=f"{size}:") for size in sizes], repetitions, calls, tell, "numbers of tokens"
    )
    rows = [
        {"tokens": size, **{name: speed(taken, f"{size}:{name}", way.bytes_of(size)) for name in names}}
        for size in sizes
    ]
    found: dict[str, Any] = {"rows": rows}
    whole = [row for row in rows if row["tokens"] % BLOCK_TOKENS == 0]  # type: ignore[operator]
    for name in names:
        through: list[Any] = rows if name == "import" or len(whole) < 2 else whole
        medians = [row[name]["ms"]["median"] for row in through]
        fixed, slope = line([way.bytes_of(row["tokens"]) for row in through], medians)
        found[name] = {"fixed_ms": fixed, "gb_per_s": 1 / slope / 1e6, "through": [row["tokens"] for row in through]}
    return found


def measure_digests(way: Way, tokens: int, repetitions: int, calls: int, tell: Tell) -> dict[str, Any]:
    """The same path with digests: inside the message, as to another machine; beside shared memory, which needs none."""
    nbytes = way.bytes_of(tokens)
    works = [
        _memcpy("memcpy", nbytes),
        way.turn(tokens, SHARED_MEMORY, "off:"),
        way.turn(tokens, INLINE, "on:"),
    ]
    taken = take_turns(works, repetitions, calls, tell, "digests off and on")
    names = [f"{mode}:{name}" for mode in ("off", "on") for name in ("export", "import", "both")]
    return {"tokens": tokens, **{name: speed(taken, name, nbytes, "memcpy") for name in names}}


def reads_without_copy() -> bool:
    """Whether a reader of shared memory sees what the producer writes after the fetch: then nothing was copied."""
    arena = Arena(1 << 16)
    producer = StoreProducer(Store(arena), "shared_memory", arena.name)
    try:
        reference = producer.offer(BlockKey(bytes(32), bytes(32)), memoryview(bytes(64)))
        fetched = ArenaReader().fetch(reference)
        arena.data[reference.offset] = 1
        return fetched.view[0] == 1
    finally:
        producer.close()


def _memcpy(name: str, nbytes: int) -> Work:
    source: npt.NDArray[np.uint8] = np.ones(nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    return timed(name, lambda: np.copyto(target, source))


def _target_manifest(draft: Manifest) -> Manifest:
    """What a bfloat16 target of the draft's own weights would say of its KV."""
    return changed(
        draft,
        role="target_to_draft",
        exactness="same_function",
        lineage=(),
        numerics=Numerics("bfloat16", "bfloat16", "", ""),
        identity=changed(draft.identity, compute="0" * 64),
    )
