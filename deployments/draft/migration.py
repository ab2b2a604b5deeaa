"""KV of sessions from a draft that leaves to one that stays: records on one side, a shelf of them on the other.

Only a draft that computes the same way finds them: the name of a block holds the digest of the manifest, with the compute
fingerprint in it, the hash of all its tokens, and the tenant. What is found goes through the checks of
:class:`deployments.draft.kv_intake.KvIntake`. How records get from one process to the other is the caller's; what that can and
cannot do when Serve stops a replica is in ``docs/kv_plane.md``.
"""

from __future__ import annotations

import secrets
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.draft.kv_intake import REFUSED, TAKEN, KvIntake
from deployments.draft.lines import Session
from deployments.draft.model import StepModel
from deployments.kv import salt_of
from hw.kv.codes import Code, Refused
from hw.kv.digests import Algorithm
from hw.kv.manifest import Layout, Manifest
from hw.kv.memory import PrivateMemory
from hw.kv.prefix import PrefixChain, Subject, tenant_digest
from hw.kv.record import Clock, Header, header_nbytes, parse, seal_into
from hw.kv.rows import payload_nbytes, plan_rows
from hw.kv.store import Store
from hw.kv.transports.base import BlockError, BlockKey, Limits

SHELVED = "migration_shelved"
MIGRATED = "migrated"
MIGRATION_REFUSED = "migration_refused:"
SHELF_BYTES = 512 << 20  # 16 sessions of 700 positions of a 135M draft in float32; committed as records come

_LAYOUT, _DTYPES = Layout("HND", "token_major"), ("float32", "float16")  # what a model's slots are


class ReadableModel(StepModel, Protocol):
    """A model whose KV can be read: :class:`hw.onnx.session.OnnxModel` is one."""

    def read_kv(self, slot: int, start: int, stop: int) -> npt.NDArray[Any]:
        """KV of positions ``[start, stop)`` of a slot, ``[2 * layers, kv_heads, positions, head_dim]``."""


class Migration:
    """One draft's, for both directions. Belongs to the drafting thread.

    ``holds`` is the manifest of what the draft computes (:func:`hw.onnx.kv_identity.draft_manifest`). Raises Refused for one
    that says that slots are kept otherwise than they are. ``shelf_bytes``: memory for records that wait; one tenant fills at
    most half of it.
    """

    def __init__(self, model: ReadableModel, holds: Manifest, *, shelf_bytes: int = SHELF_BYTES) -> None:
        kept = (holds.layout, holds.geometry.block_tokens, holds.numerics.k == holds.numerics.v)
        if kept != (_LAYOUT, 0, True) or holds.numerics.k not in _DTYPES:
            raise Refused(
                Code.CANNOT_CONVERT, "layout", holds.layout, f"{_LAYOUT}, unblocked, of {' or '.join(_DTYPES)}"
            )
        self._model = model
        self._manifest = msgspec.structs.replace(holds, role="migrate")
        self._digest = self._manifest.digest()
        self._intake = KvIntake(model, holds, holds.identity.weights)
        self._intake.meet({"manifest": self._manifest.encode()})
        self._shelf = Store(PrivateMemory(shelf_bytes), Limits(block_bytes=shelf_bytes))
        self._stops: dict[BlockKey, int] = {}  # positions that a record on the shelf covers, from 0 on
        self._epoch = secrets.token_bytes(16)
        self._generation = 0

    # --- leaving --------------------------------------------------------------------------------------------------

    def export(self, session: Session) -> bytes:
        """KV of a session's committed positions as one record, digests in it; empty where there is none.

        The last committed token is left out: who opens the session computes it anyway, to guess the next.
        """
        stop = min(session.computed, len(session.tokens) - 1)
        if stop < 1:
            return b""
        rows = plan_rows(self._manifest, 0, stop)
        at = header_nbytes(len(rows))
        buffer = bytearray(at + payload_nbytes(rows))
        kv = self._model.read_kv(session.slot, 0, stop)
        dtype = np.dtype(self._manifest.numerics.k)
        np.frombuffer(buffer, dtype, kv.size, at).reshape(kv.shape)[:] = kv
        self._generation += 1
        header = Header(
            manifest_digest=self._digest,
            subject=Subject.of(session.tokens[:stop], salt=salt_of(session.tenant), adapter=""),
            generation=self._generation,
            epoch=self._epoch,
            clock=Clock.NONE,
            clock_id=bytes(16),
            lease_deadline_ns=0,
            algorithm=Algorithm.BLAKE3,
        )
        seal_into(buffer, header, rows)
        return bytes(buffer)

    # --- staying --------------------------------------------------------------------------------------------------

    def shelve(self, data: bytes) -> str:
        """Keep a record of a draft that left until its session is opened here; returns what to count.

        A record that is damaged, or of a draft that computes otherwise, is refused and changes nothing. The least recently
        used ones make room.
        """
        try:
            record = parse(data)
            header, subject = record.header, record.header.subject
            if header.manifest_digest != self._digest:
                return MIGRATION_REFUSED + Code.MANIFEST_DIGEST.value
            if subject.start:
                return MIGRATION_REFUSED + Code.START.value
            key = BlockKey(self._digest, subject.prefix_hash, subject.tenant_digest)
            self._shelf.put(key, memoryview(data), lambda view: parse(view).verify())
        except Refused as error:
            return MIGRATION_REFUSED + error.code.value
        except BlockError as error:
            return MIGRATION_REFUSED + error.code
        self._stops[key] = subject.valid_tokens
        self._stops = {known: stop for known, stop in self._stops.items() if known in self._shelf}
        return SHELVED

    def take(self, session: Session) -> str:
        """Put what the shelf has of a session's tokens into its slot; returns what to count, empty where it has nothing.

        Of several records the longest is taken. It leaves the shelf: a session moves once.
        """
        salt = salt_of(session.tenant)
        tenant = tenant_digest(salt)
        known = range(session.computed + 1, len(session.tokens))
        stops = sorted({stop for key, stop in self._stops.items() if key.salt == tenant and stop in known})
        chain = PrefixChain(salt=salt, adapter="")
        found = None
        for stop in stops:
            chain.extend(session.tokens[len(chain) : stop])
            key = BlockKey(self._digest, chain.hash(), tenant)
            found = key if key in self._shelf else found
        if found is None:
            return ""
        with self._shelf.read(found) as fetched:
            record = bytes(fetched.view)
        self._shelf.drop(found)
        del self._stops[found]
        result = self._intake.take(session, record)
        return MIGRATED if result == TAKEN else MIGRATION_REFUSED + result.removeprefix(REFUSED)

    def stats(self) -> dict[str, float]:
        """Gauges: records on the shelf."""
        return {"migration_waiting": float(len(self._shelf))}
