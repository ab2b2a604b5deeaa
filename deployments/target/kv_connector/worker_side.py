"""The connector in a worker: opens the pages once they are there, then exports and imports as the scheduler says."""

import logging
import secrets
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.target.kv_cache import NotMovable, fingerprints
from deployments.target.kv_connector.exports import Exports
from deployments.target.kv_connector.identity import Engine
from deployments.target.kv_connector.imports import Imports
from deployments.target.kv_connector.metadata import ChainMetadata
from deployments.target.kv_connector.prompts import Place
from deployments.target.kv_connector.settings import ConnectorSettings, Keys
from hw.kv import kernels
from hw.kv.codes import Refused
from hw.kv.manifest import Manifest
from hw.kv.vllm_cache import CacheError, PagedCache
from hw.onnx.checkpoint import CheckpointError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class WorkerSide:
    """One worker's. Used from the engine's thread; only the checkpoint's fingerprints are made beside it.

    Until those are known, and for good where the KV cannot be moved, every load is refused and nothing is exported.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        settings: ConnectorSettings,
        keys: Keys,
        *,
        producer: bool,
        consumer: bool,
    ) -> None:
        host = vllm_config.kv_transfer_config.kv_ip
        block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.exports = Exports(settings, keys, host, secrets.token_bytes(16)) if producer else None
        self.imports = Imports(settings, keys, vllm_config.parallel_config.rank, block_tokens) if consumer else None
        self.manifest: Manifest | None = None
        self._engine = Engine(vllm_config, kv_cache_config)
        self._folder = Path(vllm_config.model_config.model)
        self._cache: PagedCache | None = None
        self._fingerprints: tuple[str, str] | None = None
        self._reader: threading.Thread | None = None
        self._bad: set[int] = set()

    @property
    def place(self) -> Place | None:
        """Where this worker gives out what it exported."""
        return self.exports.place if self.exports is not None else None

    def registered(self) -> None:
        """The pages are allocated."""
        try:
            self._cache = self._engine.open()
        except (NotMovable, CacheError) as error:
            logger.warning("no prompt is handed over: %s", error)
            return
        # Every weight of a checkpoint that was not prepared is read, and loops are compiled.
        self._reader = threading.Thread(target=self._read, name="kv fingerprints", daemon=True)
        self._reader.start()

    def start(self, metadata: ChainMetadata) -> None:
        """Begin this step's loads."""
        if metadata.loads and self.imports is not None:
            self._open()
            self.imports.start(metadata.loads)

    def save(self, metadata: ChainMetadata) -> None:
        """Export the prompts that this step has completed."""
        if metadata.exports and self.exports is not None:
            self._open()
            for export in metadata.exports:
                self.exports.export(export)

    def finished(self, ended: set[str]) -> set[str] | None:
        """Requests whose loads are over; :meth:`bad_blocks` then says which blocks are to be computed."""
        if self.imports is None:
            return None
        over, bad = self.imports.poll(ended)
        self._bad |= bad
        return over or None

    def bad_blocks(self) -> set[int]:
        """Blocks of loads that failed since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    def take_counts(self) -> Counter[str]:
        """What happened since the last call."""
        taken: Counter[str] = Counter()
        for end in (self.exports, self.imports):
            if end is not None and end.counts:
                taken += end.counts
                end.counts.clear()
        return taken

    def close(self) -> None:
        """Nothing is given out or taken any more."""
        if self.exports is not None:
            self.exports.close()
        if self.imports is not None:
            self.imports.close()

    def wait(self, seconds: float) -> bool:
        """Wait until it is known whether prompts can be handed over; whether they can."""
        if self._reader is not None:
            self._reader.join(seconds)
        self._open()
        return self.manifest is not None

    def _read(self) -> None:
        try:
            kernels.warm_up()
            self._fingerprints = fingerprints(self._folder)
        except (CheckpointError, OSError) as error:
            logger.warning("no prompt is handed over: %s", error)

    def _open(self) -> None:
        """Once the fingerprints are known: the manifest, and both ends with it."""
        if self._cache is None or self._fingerprints is None:
            return
        cache, known, self._fingerprints = self._cache, self._fingerprints, None
        try:
            self.manifest = self._engine.manifest(cache, *known)
        except (NotMovable, CheckpointError, Refused) as error:
            logger.warning("no prompt is handed over: %s", error)
            return
        for end in (self.exports, self.imports):
            if end is not None:
                end.open(cache, self.manifest)
