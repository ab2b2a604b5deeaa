"""From an engine that has started to drafts that take its KV or hidden states: the offer every draft is shown, and what they answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.chain.faults import FaultPolicy
from deployments.target.hidden_states import HiddenStates
from deployments.target.kv_cache import NotMovable, fingerprints, open_cache, target_manifest
from deployments.target.kv_export import KvExport
from deployments.target.settings import ChainSettings
from hw.kv import kernels
from hw.kv.codes import Refused
from hw.kv.vllm_cache import CacheError
from hw.onnx.checkpoint import CheckpointError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

Offer = dict[str, Any]
NO_OFFER: Offer = {}


class KvLink:
    """One engine's KV. Used from the engine's thread; only the checkpoint's fingerprints are made beside it.

    ``hidden``: its hidden states, where drafts may ask for them.
    """

    def __init__(
        self,
        runner: GPUModelRunner,
        settings: ChainSettings,
        faults: FaultPolicy,
        hidden: HiddenStates | None = None,
    ) -> None:
        self.export: KvExport | None = None
        self._moves_kv = settings.kv_mib > 0 and _ranks(runner) == 1
        self._hidden = hidden
        self._runner = runner
        self._settings = settings
        self._faults = faults
        self._offer: Offer | None = None if self._moves_kv or hidden is not None else NO_OFFER
        self._fingerprints: tuple[str, str] | Exception | None = None
        self._thread: threading.Thread | None = None  # before the offer

    def offer(self) -> Offer | None:
        """``{"manifest": bytes, "arena": name}`` for KV, ``{"hidden": {"size": H, "weights": fingerprint}}`` for hidden states.

        None while it is not known yet, ``NO_OFFER`` when nothing of it goes anywhere.
        """
        if self._offer is not None:
            return self._offer
        if self._thread is None:  # every weight of a checkpoint that was not prepared is read, and loops are compiled
            self._thread = threading.Thread(target=self._read, name="kv fingerprints", daemon=True)
            self._thread.start()
            self._thread.join(self._faults.kv_lease_s / 2)  # else it takes milliseconds
        if self._fingerprints is None:
            return None
        self._offer = self._open(self._fingerprints) if self._moves_kv else NO_OFFER
        if self._hidden is not None:
            self._offer = self._offer | self._hidden_offer(self._hidden, self._fingerprints)
        return self._offer

    def connect(self, endpoints: Collection[Mapping[str, Any]]) -> None:
        """Take note of which drafts take what, and how."""
        if self._hidden is not None:
            self._hidden.connect(endpoints)
        if self.export is not None:
            self.export.connect({str(endpoint["name"]): str(endpoint.get("kv", "")) for endpoint in endpoints})

    def _read(self) -> None:
        try:
            if self._moves_kv:
                kernels.warm_up()
            self._fingerprints = fingerprints(Path(self._runner.model_config.model))
        except Exception as error:
            self._fingerprints = error

    def _open(self, found: tuple[str, str] | Exception) -> Offer:
        try:
            if isinstance(found, Exception):
                raise found
            cache = open_cache(self._runner)
            manifest = target_manifest(self._runner, cache, *found)
        except (NotMovable, CheckpointError, CacheError, Refused, OSError) as error:
            logger.warning("drafts read prompts themselves: %s", error)
            return NO_OFFER
        self.export = KvExport(
            cache,
            manifest,
            self._blocks,
            self._faults,
            memory_bytes=self._settings.kv_mib << 20,
            refresh=self._settings.kv_refresh,
        )
        return {"manifest": manifest.encode(), "arena": self.export.arena}

    @staticmethod
    def _hidden_offer(hidden: HiddenStates, found: tuple[str, str] | Exception) -> Offer:
        if isinstance(found, Exception):
            logger.warning("drafts do without hidden states: %s", found)
            return NO_OFFER
        return {"hidden": {"size": hidden.size, "weights": found[0]}}

    def _blocks(self, request: str) -> list[int] | None:
        batch = self._runner.input_batch
        row = batch.req_id_to_index.get(request)
        if row is None:
            return None
        table = batch.block_table[0]
        blocks: list[int] = table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()
        return blocks

    def close(self) -> None:
        if self.export is not None:
            self.export.close()


def _ranks(runner: GPUModelRunner) -> int:
    """A rank holds only its own heads and layers, and only the first talks to drafts."""
    parallel = runner.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
