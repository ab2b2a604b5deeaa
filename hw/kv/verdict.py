"""What a receiver does with a block set it is offered: take it, convert it, or refuse it and compute for itself.

``check_manifest`` depends on producer and receiver only, so its answer can be kept for each manifest digest;
``check_record`` looks at one record. Both fail closed: what is missing or unknown is refused, and a refusal changes
nothing. The digests of the payload are verified by ``Record.verify`` where the rows are read.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from hw.kv.codes import Code, Refused
from hw.kv.coverage import check_coverage
from hw.kv.digests import Algorithm
from hw.kv.manifest import MAX_LINEAGE, Attention, Geometry, Manifest, Numerics, Rope
from hw.kv.plan import plan_steps
from hw.kv.prefix import Subject
from hw.kv.record import Clock, Header, Record
from hw.kv.steps import Step

_ROLES = {"target": ("draft_to_target", "migrate"), "draft": ("target_to_draft", "migrate")}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Accept:
    """Use the bytes as they are."""

    result: Manifest

    @property
    def label(self) -> str:
        return "accept"


@dataclass(frozen=True, slots=True)
class Convert:
    """Run the steps in order; ``result`` describes the bytes then, with its exactness and lineage."""

    steps: tuple[Step, ...]
    result: Manifest

    @property
    def label(self) -> str:
        return "convert"


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not use it: compute instead, and count ``label``."""

    code: Code
    field: str
    got: object
    want: object

    @property
    def label(self) -> str:
        return self.code.value


Verdict = Accept | Convert | Reject


@dataclass(frozen=True, slots=True)
class Local:
    """What a receiver is. Only ``identity``, ``geometry``, ``numerics``, ``layout``, ``rope`` and ``attention`` of
    ``holds`` count; its geometry says which layers and heads it needs.

    A target takes only bytes it would have computed itself. A draft takes what its target computed, whose weights it knows
    as ``source_weights`` (the checkpoint it was derived from, "" when unknown), and what an equal draft hands over.
    """

    receiver: Literal["target", "draft"]
    holds: Manifest
    source_weights: str = ""
    convertible: frozenset[str] = frozenset()  # names of the steps it can execute, see ``steps.ALL_STEPS``


@dataclass(frozen=True, slots=True)
class Now:
    """The receiver's clocks, in ns. ``boot`` names the boot of this host (16 bytes), without which no monotonic deadline
    of another process means anything; zeros when the system does not say."""

    monotonic_ns: int
    wall_ns: int
    boot: bytes

    @classmethod
    def read(cls) -> "Now":
        return cls(time.monotonic_ns(), time.time_ns(), boot_id())


@dataclass(frozen=True, slots=True)
class Expected:
    """What the receiver asked for, from its own tokens and salt (``hw/kv/prefix.py``), and when it looks."""

    subject: Subject
    epoch: bytes | None  # None: any start of the producer
    generation: int | None  # None: the bytes are the receiver's own copy and cannot be reused under it
    now: Now = field(default_factory=Now.read)
    lease_left_ns: int = 0  # reading takes so long: a lease must last longer
    allow_missing_digest: bool = False
    allow_no_lease: bool = False  # for bytes that are the receiver's own copy


def check(manifest: Manifest, local: Local, record: Record, expected: Expected) -> Verdict:
    """The verdict on one record: :func:`check_manifest`, then :func:`check_record`."""
    verdict = check_manifest(manifest, local)
    return verdict if isinstance(verdict, Reject) else check_record(record, manifest, local, expected) or verdict


def check_manifest(manifest: Manifest, local: Local) -> Verdict:
    """The verdict as far as it depends on the manifest alone."""
    holds = local.holds
    try:
        _check_identity(manifest, local)
        _check_geometry(manifest.geometry, holds.geometry)
        _check_equal(Code.ROPE, manifest.rope, holds.rope)
        _check_equal(Code.ATTENTION, manifest.attention, holds.attention)
        if local.receiver == "target":
            _check_equal(Code.NUMERICS, manifest.numerics, holds.numerics)
        steps = plan_steps(manifest, holds)
        for step in steps:
            if step.name not in local.convertible:
                raise Refused(Code.CANNOT_CONVERT, "convertible", str(step), tuple(sorted(local.convertible)))
        lineage = manifest.lineage + tuple(str(step) for step in steps if step.lossy)
        if len(lineage) > MAX_LINEAGE:
            raise Refused(Code.LINEAGE, "lineage", len(lineage), MAX_LINEAGE)
    except Refused as error:
        return Reject(error.code, error.field, error.got, error.want)
    result = msgspec.structs.replace(
        manifest,
        geometry=holds.geometry,
        numerics=holds.numerics,
        layout=holds.layout,
        exactness="approximate" if lineage else manifest.exactness,
        lineage=lineage,
    )
    return Convert(steps, result) if steps else Accept(result)


def check_record(record: Record, manifest: Manifest, local: Local, expected: Expected) -> Reject | None:
    """What in a record's header and rows forbids using it; None when nothing does."""
    header = record.header
    try:
        _check_subject(header, manifest, expected)
        if header.algorithm is Algorithm.NONE and not expected.allow_missing_digest:
            raise Refused(Code.MISSING_DIGEST, "algorithm", "none", "a digest for each row")
        _check_lease(header, expected)
        subject = header.subject
        check_coverage(manifest, record.rows, subject.start, subject.valid_tokens, local.holds.geometry)
    except Refused as error:
        return Reject(error.code, error.field, error.got, error.want)
    return None


def boot_id() -> bytes:
    """16 bytes that name this boot of this host; zeros where the system has no such name."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def _check_identity(manifest: Manifest, local: Local) -> None:
    got, own = manifest.identity, local.holds.identity
    if manifest.role not in _ROLES[local.receiver]:
        raise Refused(Code.ROLE, "role", manifest.role, _ROLES[local.receiver])
    weights = own.weights
    if manifest.role == "target_to_draft":
        weights = local.source_weights
        if not weights:
            raise Refused(Code.SOURCE_UNKNOWN, "source_weights", "", got.weights)
    if got.weights != weights:
        raise Refused(Code.WEIGHTS, "identity.weights", got.weights, weights)
    if got.adapter != own.adapter:
        raise Refused(Code.ADAPTER, "identity.adapter", got.adapter, own.adapter)
    if got.tokenizer != own.tokenizer:
        raise Refused(Code.TOKENIZER, "identity.tokenizer", got.tokenizer, own.tokenizer)
    if local.receiver == "target":
        if got.compute != own.compute:
            raise Refused(Code.COMPUTE, "identity.compute", got.compute, own.compute)
        if manifest.exactness != "bit_exact":
            raise Refused(Code.EXACTNESS, "exactness", manifest.exactness, "bit_exact")


def _check_geometry(got: Geometry, need: Geometry) -> None:
    if got.kv_heads != need.kv_heads:
        raise Refused(Code.KV_HEADS, "geometry.kv_heads", got.kv_heads, need.kv_heads)
    for name in ("head_dim", "head_dim_v"):
        if getattr(got, name) != getattr(need, name):
            raise Refused(Code.HEAD_DIM, f"geometry.{name}", getattr(got, name), getattr(need, name))
    for code, first, count in ((Code.LAYERS, "first_layer", "layers"), (Code.HEADS, "first_head", "heads")):
        have = range(getattr(got, first), getattr(got, first) + getattr(got, count))
        want = range(getattr(need, first), getattr(need, first) + getattr(need, count))
        if want[0] not in have or want[-1] not in have:
            raise Refused(code, f"geometry.{first if want[0] not in have else count}", have, want)


def _check_equal(code: Code, got: Rope | Attention | Numerics, want: Rope | Attention | Numerics) -> None:
    for name in got.__struct_fields__:
        if getattr(got, name) != getattr(want, name):
            raise Refused(code, f"{type(got).__name__.lower()}.{name}", getattr(got, name), getattr(want, name))


def _check_subject(header: Header, manifest: Manifest, expected: Expected) -> None:
    """Is it about the tokens, the tenant and the memory that were asked for?"""
    got, want = header.subject, expected.subject
    facts: list[tuple[Code, str, object, object]] = [
        (Code.MANIFEST_DIGEST, "manifest_digest", header.manifest_digest, manifest.digest()),
        (Code.TENANT, "tenant_digest", got.tenant_digest, want.tenant_digest),
        (Code.PREFIX_BLOCK, "prefix_block_tokens", got.prefix_block_tokens, want.prefix_block_tokens),
        (Code.START, "start", got.start, want.start),
        (Code.VALID_TOKENS, "valid_tokens", got.valid_tokens, want.valid_tokens),
        (Code.PREFIX, "prefix_hash", got.prefix_hash, want.prefix_hash),
        (Code.TOKENS, "token_digest", got.token_digest, want.token_digest),
    ]
    if expected.epoch is not None:
        facts.append((Code.EPOCH, "epoch", header.epoch, expected.epoch))
    if expected.generation is not None:
        facts.append((Code.GENERATION, "generation", header.generation, expected.generation))
    for code, name, have, need in facts:
        if have != need:
            raise Refused(code, name, have, need)


def _check_lease(header: Header, expected: Expected) -> None:
    if header.clock is Clock.NONE:
        if not expected.allow_no_lease:
            raise Refused(Code.NO_LEASE, "clock", "none", "a lease")
        return
    if header.clock is Clock.MONOTONIC and header.clock_id != expected.now.boot:
        raise Refused(Code.CLOCK, "clock_id", header.clock_id, expected.now.boot)
    now = expected.now.monotonic_ns if header.clock is Clock.MONOTONIC else expected.now.wall_ns
    need = now + expected.lease_left_ns
    if header.lease_deadline_ns <= need:
        raise Refused(Code.LEASE_EXPIRED, "lease_deadline_ns", header.lease_deadline_ns, f"above {need}")
