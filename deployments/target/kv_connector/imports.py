"""Prompts that other replicas have read, on their way into this worker's pages.

Asking, fetching and verifying happen in a thread of their own; only what was found good is written, between two steps.
"""

import logging
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.target.kv_connector.exports import NUMPY
from deployments.target.kv_connector.hand_off import HandOffClient
from deployments.target.kv_connector.prompts import Load, Place
from deployments.target.kv_connector.settings import ConnectorSettings, Keys
from hw.kv.codes import Refused
from hw.kv.manifest import Manifest
from hw.kv.record import parse
from hw.kv.transports.base import BlockError, Fetched, Malformed, Ref, Unreachable
from hw.kv.transports.choose import local_facts
from hw.kv.transports.shared_memory import ArenaReader
from hw.kv.transports.zeromq import BlockClient, Endpoint
from hw.kv.verdict import Expected, Local, Reject, check
from hw.kv.vllm_cache import CacheError, PagedCache

logger = logging.getLogger(__name__)

REFUSED = "import_refused:"
NOT_OPEN, ABORTED, ERROR = "not_open", "aborted", "error"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Good:
    """Verified bytes: ``kv`` is ``[2 * layers, heads, tokens, dim]`` of all the prompt's tokens."""

    kv: Array
    fetched: Fetched
    ref: Ref


@dataclass(frozen=True, slots=True)
class _Outcome:
    load: Load
    good: _Good | None
    code: str = ""  # why there is nothing good


class Imports:
    """One worker's. The engine's thread calls everything here."""

    def __init__(self, settings: ConnectorSettings, keys: Keys, rank: int, block_tokens: int) -> None:
        self.counts: Counter[str] = Counter()
        self._settings = settings
        self._keys = keys
        self._rank = rank
        self._block_tokens = block_tokens
        self._cache: PagedCache | None = None
        self._local: Local | None = None
        self._pending: dict[str, Load] = {}
        self._dropped: set[str] = set()  # aborted: what comes for them is let go
        self._failed: list[Load] = []
        self._asked: queue.SimpleQueue[tuple[Load, Local] | tuple[Load, Ref] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, cache: PagedCache, manifest: Manifest) -> None:
        """From now on prompts can be taken."""
        self._cache = cache
        self._local = Local("target", manifest)

    def start(self, loads: list[Load]) -> None:
        """Begin to fetch. Each is reported by :meth:`poll` exactly once, whatever happens."""
        for load in loads:
            self._pending[load.request] = load
            if self._local is None:
                self._outcomes.put(_Outcome(load, None, NOT_OPEN))
                continue
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv imports", daemon=True)
                self._thread.start()
            self._asked.put((load, self._local))

    def poll(self, ended: set[str]) -> tuple[set[str], set[int]]:
        """Write what has come. Requests whose loads are over, and blocks that have to be computed after all.

        ``ended``: requests that were aborted or finished. Loads of theirs are over at once, and nothing of them is written.
        """
        if not self._pending and not self._dropped:
            return set(), set()
        over: set[str] = set()
        bad: set[int] = set()
        for request in ended & self._pending.keys():
            del self._pending[request]
            self._dropped.add(request)
            self.counts[REFUSED + ABORTED] += 1
            over.add(request)
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except queue.Empty:
                return over, bad
            load = outcome.load
            if load.request in self._dropped:
                self._dropped.discard(load.request)
                self._let_go(outcome)
                continue
            del self._pending[load.request]
            over.add(load.request)
            code = self._write(outcome.load, outcome.good) if outcome.good is not None else outcome.code
            if code:
                self.counts[REFUSED + code] += 1
                bad.update(self._blocks(load))
            else:
                self.counts["imports"] += 1
                self.counts["import_tokens"] += load.subject.valid_tokens - load.start
            self._let_go(outcome)

    @property
    def pending(self) -> int:
        """Loads under way."""
        return len(self._pending)

    def close(self) -> None:
        """Take nothing more."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(2 * self._settings.fetch_s)

    # --- inside: the engine's thread --------------------------------------------------------------------------------

    def _blocks(self, load: Load) -> tuple[int, ...]:
        """Those a load fills; what comes before is shared with other requests."""
        size = self._block_tokens
        return load.blocks[load.start // size : -(-load.subject.valid_tokens // size)]

    def _write(self, load: Load, good: _Good) -> str:
        """Put verified bytes into the pages; why they turned out not to be good, the blocks then being zero."""
        assert self._cache is not None
        began = time.perf_counter_ns()
        blocks = self._blocks(load)
        stop = load.subject.valid_tokens
        try:
            good.fetched.check()  # before anything is written
            if stop % self._block_tokens and stop - stop % self._block_tokens >= load.start:
                self._cache.zero(blocks[-1:])  # nothing of an earlier request stays behind the last token
            self._cache.write(load.blocks, load.start, good.kv[:, :, load.start :])
        except BlockError as error:
            return error.code
        except CacheError as error:
            logger.warning("a prompt does not fit the pages: %s", error)
            return "cache"
        try:
            good.fetched.check()  # and was it one block set all the while?
        except BlockError as error:
            self._cache.zero(blocks)
            return error.code
        self.counts["import_us"] += (time.perf_counter_ns() - began) // 1000
        return ""

    def _let_go(self, outcome: _Outcome) -> None:
        if outcome.good is not None:
            outcome.good.fetched.release()
            self._asked.put((outcome.load, outcome.good.ref))

    # --- inside: the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        limits = self._settings.limits()
        client = HandOffClient(self._keys, local_facts(zeromq=True), limits, self._settings.pause_s)
        arenas = ArenaReader(limits)
        blocks = BlockClient(self._keys.client, limits)
        try:
            while (asked := self._asked.get()) is not None:
                load, what = asked
                if isinstance(what, Ref):
                    client.done(self._place(load), load.salt, load.subject.prefix_hash, what.lease)
                    continue
                try:
                    good = self._fetch(load, what, client, arenas, blocks)
                except (Refused, BlockError) as error:
                    logger.info("request %s reads its prompt itself: %s", load.request, error)
                    self._outcomes.put(_Outcome(load, None, str(error.code)))
                except Exception:  # a load that is never reported keeps its blocks for ever
                    logger.exception("request %s reads its prompt itself", load.request)
                    self._outcomes.put(_Outcome(load, None, ERROR))
                else:
                    self._outcomes.put(_Outcome(load, good))
        finally:
            client.close()
            blocks.close()
            arenas.close()

    def _fetch(
        self, load: Load, local: Local, client: HandOffClient, arenas: ArenaReader, blocks: BlockClient
    ) -> _Good:
        """Ask, fetch, check. Raises Refused or a BlockError."""
        place = self._place(load)
        encoded, ref, address = client.find(place, load.salt, load.subject.prefix_hash)
        if ref.kind == "shared_memory":
            fetched = arenas.fetch(ref)
        elif ref.kind == "zeromq":
            fetched = self._over_sockets(place, ref, address, blocks)
        else:
            raise Malformed(f"no transport {ref.kind} here")
        manifest = Manifest.decode(encoded)
        record = parse(fetched.view)
        epoch = bytes.fromhex(place.epoch)
        verdict = check(manifest, local, record, Expected(load.subject, epoch, ref.generation))
        if isinstance(verdict, Reject):
            raise Refused(verdict.code, verdict.field, verdict.got, verdict.want)
        record.verify()
        fetched.check()
        geometry = manifest.geometry
        shape = (2 * geometry.layers, geometry.heads, load.subject.valid_tokens, geometry.head_dim)
        kv = np.frombuffer(record.row(0), NUMPY[manifest.numerics.k]).reshape(shape)
        return _Good(kv, fetched, ref)

    def _over_sockets(self, place: Place, ref: Ref, address: str, blocks: BlockClient) -> Fetched:
        if not address.startswith("tcp://") or address.rpartition(":")[0] != place.address.rpartition(":")[0]:
            raise Unreachable("the block server is on another machine than who named it")
        blocks.connect(Endpoint(ref.handle, address, self._keys.server.public))
        return blocks.fetch(ref)

    def _place(self, load: Load) -> Place:
        return load.places[self._rank]
