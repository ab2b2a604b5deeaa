"""Prompts this worker has read, kept for the replicas that go on with them."""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.target.kv_connector.hand_off import HandOffServer
from deployments.target.kv_connector.prompts import Export, Place
from deployments.target.kv_connector.settings import MIB, ConnectorSettings, Keys
from hw.kv.digests import Algorithm
from hw.kv.manifest import Manifest
from hw.kv.memory import PrivateMemory
from hw.kv.record import Clock, Header, header_nbytes, seal_into
from hw.kv.rows import Row, payload_nbytes, plan_rows
from hw.kv.store import Memory, Store
from hw.kv.transports.base import BlockError, BlockKey, Missing, Ref, Unavailable
from hw.kv.transports.choose import Facts, choose_transport, local_facts
from hw.kv.transports.shared_memory import Arena
from hw.kv.transports.zeromq import BlockServer
from hw.kv.vllm_cache import CacheError, PagedCache

logger = logging.getLogger(__name__)

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class Exports:
    """One worker's. ``open`` and ``export`` are the engine thread's; others ask through the server's thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        keys: Keys,
        host: str,
        epoch: bytes,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._hand_off_s = settings.hand_off_s
        self._epoch = epoch
        self._wall_ns = wall_ns
        limits = settings.limits()
        memory, self._arena = _memory(int(settings.memory_mib * MIB))
        self._store = Store(memory, limits)
        self._facts = local_facts(zeromq=True) if self._arena else Facts(zeromq=True)
        self._lock = threading.Lock()
        self._held: dict[BlockKey, int] = {}  # leases for replicas that did not come yet
        self._cache: PagedCache | None = None
        self._manifest: tuple[Manifest, bytes, bytes] | None = None  # it, its bytes, its digest
        self._blocks = BlockServer(self._store, keys.server, host, epoch.hex(), limits)
        self._blocks.authorize(keys.client.public)
        self._blocks.start()
        self._server = HandOffServer(self, keys, host, epoch, limits)

    @property
    def place(self) -> Place:
        """Where they are given out."""
        return self._server.place

    def open(self, cache: PagedCache, manifest: Manifest) -> None:
        """From now on prompts can be exported."""
        self._cache = cache
        self._manifest = manifest, manifest.encode(), manifest.digest()

    def export(self, asked: Export) -> None:
        """Copy a prompt's KV out of the pages. What cannot be kept is counted; whoever goes on with it computes it."""
        if self._cache is None or self._manifest is None:
            self.counts["export_refused:not_open"] += 1
            return
        began = time.perf_counter_ns()
        manifest, _, digest = self._manifest
        key = BlockKey(digest, asked.subject.prefix_hash, asked.salt)
        try:
            rows = plan_rows(manifest, asked.subject.start, asked.subject.valid_tokens)
            nbytes = header_nbytes(len(rows)) + payload_nbytes(rows)
            with self._store.stage(nbytes, asked.salt) as staged:
                header = self._header(asked, digest, staged.generation)
                _fill(staged.view, self._cache, manifest, asked.blocks, header, rows)
                self._store.publish(staged, key)
            self._hold(key)
        except (BlockError, CacheError) as error:
            self.counts[f"export_refused:{getattr(error, 'code', 'cache')}"] += 1
            logger.debug("the prompt of request %s is not exported: %s", asked.request, error)
            return
        self.counts["exports"] += 1
        self.counts["export_tokens"] += asked.subject.valid_tokens
        self.counts["export_bytes"] += nbytes
        self.counts["export_us"] += (time.perf_counter_ns() - began) // 1000

    # --- for the server's thread ------------------------------------------------------------------------------------

    def find(self, salt: bytes, prefix: bytes, facts: Facts) -> tuple[bytes, Ref, str]:
        """Manifest, leased reference and block server of a prompt. Raises Missing, Full, or Unavailable without a transport."""
        if self._manifest is None:
            raise Missing("nothing was exported yet")
        _, encoded, digest = self._manifest
        kind = choose_transport(self._facts, facts).kind
        lease = self._store.lease(BlockKey(digest, prefix, salt))
        if kind == "shared_memory":
            return encoded, lease.ref(kind, self._arena), ""
        return encoded, lease.ref("zeromq", self._blocks.endpoint.name), self._blocks.endpoint.address

    def done(self, salt: bytes, prefix: bytes, lease: int) -> None:
        """A replica has what it asked for: from now on the prompt goes when others need the room."""
        self._store.release(lease)
        if self._manifest is not None:
            self._let_go(BlockKey(self._manifest[2], prefix, salt))

    # --- health -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """The store's gauges."""
        return self._store.stats()

    def check_integrity(self) -> None:
        """Raises IntegrityError where the store's books do not agree."""
        self._store.check_integrity()

    def close(self) -> None:
        """Give nothing out any more."""
        self._server.stop()
        self._blocks.stop()
        with contextlib.suppress(BufferError):
            self._store.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _hold(self, key: BlockKey) -> None:
        lease = self._store.lease(key, self._hand_off_s)
        with self._lock:
            earlier = self._held.pop(key, None)
            self._held[key] = lease.number
            over = [held for held in self._held if held not in self._store]
            for held in over:
                del self._held[held]
        if earlier is not None:
            self._store.release(earlier)

    def _let_go(self, key: BlockKey) -> None:
        with self._lock:
            number = self._held.pop(key, None)
        if number is not None:
            self._store.release(number)

    def _header(self, asked: Export, digest: bytes, generation: int) -> Header:
        return Header(
            manifest_digest=digest,
            subject=asked.subject,
            generation=generation,
            epoch=self._epoch,
            clock=Clock.WALL,  # the reader may be on another machine
            clock_id=bytes(16),
            lease_deadline_ns=self._wall_ns() + int(self._hand_off_s * 1e9),
            algorithm=Algorithm.BLAKE3,
        )


def _fill(
    view: memoryview, cache: PagedCache, manifest: Manifest, blocks: tuple[int, ...], header: Header, rows: tuple[Row, ...]
) -> None:  # fmt: skip
    """Write a record into ``view``: the payload straight from the pages, then its digests and header."""
    dtype = np.dtype(NUMPY[manifest.numerics.k])
    tokens = header.subject.valid_tokens
    out: npt.NDArray[Any] = np.frombuffer(
        view, dtype, rows[0].nbytes // dtype.itemsize, header_nbytes(len(rows))
    ).reshape(cache.shape(tokens))
    cache.read(blocks, 0, tokens, out)
    del out  # the bytes are published next: nothing may be able to write into them
    seal_into(view, header, rows)


def _memory(nbytes: int) -> tuple[Memory, str]:
    """Shared memory and its name, or private memory where there is none."""
    try:
        arena = Arena(nbytes)
    except Unavailable as error:
        logger.warning("prompts are handed over through sockets: %s", error)
        return PrivateMemory(nbytes), ""
    return arena, arena.name
