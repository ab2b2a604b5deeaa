"""KV that a target computed, for a draft of the same weights: met once a target, then fetched, checked and put into slots.

A refusal changes nothing: the draft computes what it lacks itself.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deployments.draft.lines import Session
from deployments.draft.model import StepModel
from deployments.kv import INLINE, SHARED_MEMORY, salt_of
from hw.kv.codes import Refused
from hw.kv.manifest import Manifest
from hw.kv.prefix import Subject
from hw.kv.record import MAGIC, Record, parse
from hw.kv.steps import Cast
from hw.kv.transports.base import BlockError, Fetched, Ref
from hw.kv.transports.shared_memory import ArenaReader
from hw.kv.verdict import Expected, Local, Reject, check_manifest, check_record
from hw.onnx.checkpoint import CheckpointError
from hw.onnx.kv_identity import draft_manifest

logger = logging.getLogger(__name__)

TAKEN, REFUSED = "kv_taken", "kv_refused:"
_TARGETS = 64  # manifests remembered; each target's replicas share one
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

_GAP = "gap"  # it begins after what the draft has
_NOT_COMMITTED = "not_committed"  # it goes beyond what the target committed
_NOT_MET = "not_met"  # by a target whose manifest was never shown, or was refused


class KvIntake:
    """One draft's. ``meet`` may be called from any thread, the rest belongs to the drafting one.

    ``local``: what the draft holds. Its slots take any float type, so casts are the only conversion.
    """

    def __init__(self, model: StepModel, local: Manifest, source_weights: str) -> None:
        self._model = model
        self._local = Local("draft", local, source_weights, frozenset({Cast.name}))
        self._accepted: OrderedDict[bytes, Manifest] = OrderedDict()
        self._lock = threading.Lock()
        self._arenas = ArenaReader()

    def meet(self, offer: Mapping[str, Any]) -> str:
        """How a target that makes this offer should send its KV: a link, or empty for not at all (the log says why)."""
        if not offer:
            return ""
        try:
            manifest = Manifest.decode(offer["manifest"])
        except Refused as error:
            logger.warning("the target's KV is not taken: %s", error)
            return ""
        known = manifest.digest()
        if known not in self._accepted:
            verdict = check_manifest(manifest, self._local)
            if isinstance(verdict, Reject):
                logger.warning(
                    "the target's KV is not taken: %s: %s is %s, expected %s",
                    *(verdict.code, verdict.field, verdict.got, verdict.want),
                )
                return ""
            with self._lock:
                self._accepted[known] = manifest
                while len(self._accepted) > _TARGETS:
                    self._accepted.popitem(last=False)
        return SHARED_MEMORY if self._reaches(str(offer.get("arena", ""))) else INLINE

    def take(self, session: Session, reference: bytes) -> str:
        """Put the KV that a commit refers to into the session's slot; returns what to count."""
        try:
            if reference.startswith(MAGIC):
                return self._take(session, parse(reference), None)
            with self._lock:
                found = self._arenas.fetch(Ref.decode(reference))
            with found as fetched:
                return self._take(session, parse(fetched.view), fetched)
        except Refused as error:
            return REFUSED + error.code.value
        except BlockError as error:
            return REFUSED + error.code

    def _reaches(self, arena: str) -> bool:
        """Whether a target's shared memory can be mapped here, which only trying tells; then it is mapped for good."""
        if not arena:
            return False
        try:
            with self._lock:
                self._arenas.attach(arena)
        except BlockError as error:
            logger.info("the target's memory is not in reach, KV comes in messages: %s", error)
            return False
        return True

    def _take(self, session: Session, record: Record, fetched: Fetched | None) -> str:
        subject = record.header.subject
        start, stop = subject.start, subject.start + subject.valid_tokens
        manifest = self._accepted.get(record.header.manifest_digest)
        if manifest is None:
            return REFUSED + _NOT_MET
        if start > session.computed:
            return REFUSED + _GAP
        if stop >= len(session.tokens):
            return REFUSED + _NOT_COMMITTED
        wanted = Subject.of(session.tokens[:stop], start, salt=salt_of(session.tenant), adapter="")
        shared = fetched is not None
        # Shared memory is this machine's and under a lease; what came in the message is this draft's own copy.
        expected = Expected(wanted, None, None, allow_missing_digest=shared, allow_no_lease=not shared)
        refused = check_record(record, manifest, self._local, expected)
        if refused is not None:
            return REFUSED + refused.label
        if not shared:
            record.verify()
        kv = _array(manifest, record, self._local.holds)
        if fetched is not None:
            fetched.check()
        try:
            self._model.write_kv(session.slot, start, kv)
            if fetched is not None:
                fetched.check()
        except BaseException:
            session.lost(start)  # what is in the slot now is nobody's
            raise
        session.received(stop)
        return TAKEN


def make_intake(model: StepModel, folder: Path, provider: str) -> KvIntake | None:
    """The intake of a draft over ``folder``; None, with the reason in the log, for one whose KV is not known well enough."""
    try:
        local = draft_manifest(folder, provider)
    except (CheckpointError, Refused) as error:
        logger.warning("this draft reads prompts itself: %s", error)
        return None
    return KvIntake(model, local, local.identity.weights)


def _array(manifest: Manifest, record: Record, needs: Manifest) -> npt.NDArray[Any]:
    """A record's payload ``[2 * layers, heads, tokens, dim]``, cut to the layers and heads that are needed; no copy."""
    geometry, need = manifest.geometry, needs.geometry
    dtype = np.dtype(DTYPES[manifest.numerics.k])
    shape = (2 * geometry.layers, geometry.heads, record.header.subject.valid_tokens, geometry.head_dim)
    kv = np.frombuffer(record.row(0), dtype).reshape(shape)
    layer, head = need.first_layer - geometry.first_layer, need.first_head - geometry.first_head
    return kv[2 * layer : 2 * (layer + need.layers), head : head + need.heads]
