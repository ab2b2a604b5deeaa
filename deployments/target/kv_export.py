"""KV of committed positions for drafts, out of the engine's pages: into memory that a draft on this machine maps, or into the
message for a draft elsewhere.

Nothing here can fail a step: what cannot be exported is counted and the draft computes it itself.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.chain.faults import FaultPolicy
from deployments.kv import INLINE, SHARED_MEMORY, salt_of
from hw.kv.digests import Algorithm
from hw.kv.manifest import Manifest
from hw.kv.prefix import PrefixChain, Subject, tenant_digest, token_digest
from hw.kv.record import Clock, Header, header_nbytes, seal_into
from hw.kv.rows import Row, payload_nbytes, plan_rows
from hw.kv.store import Store
from hw.kv.transports.base import BlockError, BlockKey, Limits, Ref
from hw.kv.transports.offers import StoreProducer
from hw.kv.transports.shared_memory import Arena
from hw.kv.verdict import boot_id
from hw.kv.vllm_cache import CacheError, PagedCache

logger = logging.getLogger(__name__)

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

Blocks = Callable[[str], "list[int] | None"]  # a request's blocks, in the order of its positions


class KvExport:
    """One engine's exports. Used from the engine's thread.

    ``links``: how each draft replica that takes KV is reached. ``refresh``: drafts get the KV of every committed position, not
    only of those they lack.
    """

    def __init__(
        self,
        cache: PagedCache,
        manifest: Manifest,
        blocks: Blocks,
        faults: FaultPolicy,
        *,
        memory_bytes: int,
        refresh: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.refresh = refresh
        self.links: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.manifest = manifest
        self._digest = manifest.digest()
        self._cache = cache
        self._blocks = blocks
        self._faults = faults
        self._clock_ns = clock_ns
        self._boot = boot_id()
        self._epoch = secrets.token_bytes(16)
        self._generation = 0
        self._inline_left = faults.kv_inline_bytes  # of the messages of this step
        self._chains: dict[str, PrefixChain] = {}
        self._shared_blocks: dict[str, tuple[BlockKey, Ref]] = {}  # by request: what a draft may be reading
        self._store: StoreProducer | None = None
        try:
            arena = Arena(memory_bytes)
        except BlockError as error:
            logger.warning("no shared memory for KV: %s", error)
            return
        limits = Limits(block_bytes=memory_bytes, lease_s=faults.kv_lease_s)
        self._store = StoreProducer(Store(arena, limits, clock_ns=clock_ns), "shared_memory", arena.name)

    @property
    def arena(self) -> str:
        """Name of the shared memory; empty where there is none."""
        return self._store.handle if self._store is not None else ""

    def connect(self, links: Mapping[str, str]) -> None:
        """Make ``links`` the drafts that take KV, and how."""
        self.links = {name: link for name, link in links.items() if link in (SHARED_MEMORY, INLINE)}

    def reaches(self, draft: str) -> bool:
        """Whether a draft replica takes KV."""
        return draft in self.links

    def next_step(self) -> None:
        """A new message goes to each draft: it has room for KV again."""
        self._inline_left = self._faults.kv_inline_bytes

    def export(self, draft: str, request: str, tokens: list[int], start: int, tenant: str) -> bytes:
        """KV of positions ``[start, len(tokens))`` for a draft: what goes into the commit; empty when it cannot be had."""
        blocks = self._blocks(request)
        if blocks is None:
            self.counts["no_blocks"] += 1
            return b""
        rows = plan_rows(self.manifest, start, len(tokens) - start)
        nbytes = header_nbytes(len(rows)) + payload_nbytes(rows)
        began = self._clock_ns()
        try:
            if self.links[draft] == SHARED_MEMORY:
                reference = self._shared(blocks, request, tokens, rows, nbytes, salt_of(tenant))
            elif nbytes > self._inline_left:
                self.counts["too_large" if nbytes > self._faults.kv_inline_bytes else "message_full"] += 1
                return b""
            else:
                self._inline_left -= nbytes
                reference = self._inline(blocks, request, tokens, rows, nbytes, salt_of(tenant))
        except (BlockError, CacheError) as error:
            self.counts[getattr(error, "code", "cache")] += 1
            logger.debug("KV of request %s not exported: %s", request, error)
            return b""
        self.counts["exports"] += 1
        self.counts["positions"] += len(tokens) - start
        self.counts["bytes"] += nbytes
        self.counts["ns"] += self._clock_ns() - began
        return reference

    def forget(self, request: str) -> None:
        """A request ended."""
        self._chains.pop(request, None)
        self.settled(request)

    def settled(self, request: str) -> None:
        """The draft has answered, so it reads no more: the memory is free at once, and warm for whoever is next."""
        held = self._shared_blocks.pop(request, None)
        if held is not None and self._store is not None:
            self._store.release(held[1])
            self._store.store.drop(held[0])

    def stats(self) -> dict[str, float]:
        """Exports, positions, bytes and ms; what was not sent, by reason."""
        totals = {name: self.counts[name] for name in ("exports", "positions", "bytes", "ns")}
        missed = {f"kv_not_sent:{name}": float(n) for name, n in self.counts.items() if name not in totals}
        return missed | {
            "kv_exports": float(totals["exports"]),
            "kv_export_positions": float(totals["positions"]),
            "kv_export_bytes": float(totals["bytes"]),
            "kv_export_ms": totals["ns"] / 1e6,
        }

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _shared(
        self, blocks: list[int], request: str, tokens: list[int], rows: tuple[Row, ...], nbytes: int, salt: bytes
    ) -> bytes:
        assert self._store is not None
        # This machine's memory, a lease and a generation to check: digests would cost several times the copy itself.
        self.settled(request)
        header = self._header(request, tokens, rows, salt, Algorithm.NONE, Clock.MONOTONIC)
        with self._store.store.stage(nbytes, salt) as staged:
            self._fill(staged.view, blocks, header, rows)
            key = BlockKey(self._digest, header.subject.prefix_hash, salt)
            self._store.store.publish(staged, key)
        reference = self._store.refer(key, self._faults.kv_lease_s)
        self._shared_blocks[request] = key, reference
        return reference.encode()

    def _inline(
        self, blocks: list[int], request: str, tokens: list[int], rows: tuple[Row, ...], nbytes: int, salt: bytes
    ) -> bytes:
        buffer = bytearray(nbytes)
        header = self._header(request, tokens, rows, salt, Algorithm.BLAKE3, Clock.NONE)
        self._fill(memoryview(buffer), blocks, header, rows)
        return bytes(buffer)

    def _fill(self, view: memoryview, blocks: list[int], header: Header, rows: tuple[Row, ...]) -> None:
        dtype = np.dtype(_NUMPY[self.manifest.numerics.k])
        subject = header.subject
        shape = self._cache.shape(subject.valid_tokens)
        out: npt.NDArray[Any] = np.frombuffer(
            view, dtype, rows[0].nbytes // dtype.itemsize, header_nbytes(len(rows))
        ).reshape(shape)
        self._cache.read(blocks, subject.start, subject.start + subject.valid_tokens, out)
        del out  # the bytes are published next: nothing may be able to write into them
        seal_into(view, header, rows)

    def _header(
        self,
        request: str,
        tokens: list[int],
        rows: tuple[Row, ...],
        salt: bytes,
        algorithm: Algorithm,
        clock: Clock,
    ) -> Header:
        chain = self._chains.get(request)
        if chain is None or len(chain) > len(tokens):
            chain = self._chains[request] = PrefixChain(salt=salt, adapter="")
        chain.extend(tokens[len(chain) :])
        self._generation += 1
        start = rows[0].first_token
        leased = clock is Clock.MONOTONIC
        return Header(
            manifest_digest=self._digest,
            subject=Subject(
                tenant_digest=tenant_digest(salt),
                prefix_hash=chain.hash(),
                prefix_block_tokens=chain.block_tokens,
                token_digest=token_digest(tokens[start:], salt=salt),
                start=start,
                valid_tokens=len(tokens) - start,
            ),
            generation=self._generation,
            epoch=self._epoch,
            clock=clock,
            clock_id=self._boot if leased else bytes(16),
            lease_deadline_ns=self._clock_ns() + int(self._faults.kv_lease_s * 1e9) if leased else 0,
            algorithm=algorithm,
        )
