"""Verdicts on records: each thing a header says has its code, and what is missing is refused unless allowed by name."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from hw.kv.codes import Code
from hw.kv.digests import Algorithm
from hw.kv.manifest import Manifest
from hw.kv.prefix import Subject
from hw.kv.record import Clock, Header, Record, header_nbytes, parse, seal_into
from hw.kv.rows import Row, payload_nbytes, plan_rows
from hw.kv.verdict import Accept, Now, Reject, Verdict, boot_id, check, check_record
from tests.unit.kv.samples import BOOT, EPOCH, NOW, OTHER, SALT, SUBJECT, TOKENS, draft, expected, header, manifest


def code(verdict: Verdict | None) -> Code | None:
    return verdict.code if isinstance(verdict, Reject) else None


def record(of: Manifest, rows: Iterable[Row] | None = None, **changes: Any) -> Record:
    """A record as it comes out of ``parse``; the payload does not matter here."""
    return Record(header(of, **changes), tuple(rows or plan_rows(of, 1, 4)), memoryview(b""))


HEADER_ANSWERS: dict[str, tuple[Any, Code]] = {
    "manifest_digest": (bytes(32), Code.MANIFEST_DIGEST),
    "generation": (6, Code.GENERATION),
    "epoch": (b"producer-epoch-2", Code.EPOCH),
    "clock": (Clock.NONE, Code.NO_LEASE),
    "clock_id": (b"another boot id.", Code.CLOCK),
    "lease_deadline_ns": (NOW.monotonic_ns, Code.LEASE_EXPIRED),
    "algorithm": (Algorithm.NONE, Code.MISSING_DIGEST),
}
SUBJECT_ANSWERS: dict[str, tuple[Any, Code]] = {
    "tenant_digest": (bytes(16), Code.TENANT),
    "prefix_hash": (bytes(32), Code.PREFIX),
    "prefix_block_tokens": (32, Code.PREFIX_BLOCK),
    "token_digest": (bytes(16), Code.TOKENS),
    "start": (0, Code.START),
    "valid_tokens": (3, Code.VALID_TOKENS),
}


def test_every_header_field() -> None:
    one = manifest()
    assert isinstance(check(one, draft(), record(one), expected()), Accept)
    assert {field.name for field in fields(Header)} == {*HEADER_ANSWERS, "subject"}
    assert {field.name for field in fields(Subject)} == set(SUBJECT_ANSWERS)
    for name, (value, want) in HEADER_ANSWERS.items():
        verdict = check(one, draft(), record(one, **{name: value}), expected())
        assert code(verdict) is want
        assert isinstance(verdict, Reject)
        assert verdict.field == name
    for name, (value, want) in SUBJECT_ANSWERS.items():
        verdict = check(one, draft(), record(one, subject=replace(SUBJECT, **{name: value})), expected())
        assert code(verdict) is want
        assert isinstance(verdict, Reject)
        assert verdict.field == name


def test_other_tenant_adapter_and_tokens() -> None:
    one = manifest()
    for subject, want in (
        (Subject.of(TOKENS, 1, salt=b"tenant-b", adapter=""), Code.TENANT),
        (Subject.of(TOKENS, 1, salt=SALT, adapter=OTHER), Code.PREFIX),
        (Subject.of([*TOKENS[:-1], 3], 1, salt=SALT, adapter=""), Code.PREFIX),
        (Subject.of([1, *TOKENS[1:]], 1, salt=SALT, adapter=""), Code.PREFIX),  # only what came before differs
        (Subject.of(TOKENS[1:], 0, salt=SALT, adapter=""), Code.START),  # shifted reuse
    ):
        assert code(check(one, draft(), record(one, subject=subject), expected())) is want
    assert code(check(manifest(identity__adapter=OTHER), draft(), record(one), expected())) is Code.ADAPTER


def test_leases_on_a_fake_clock() -> None:
    one = manifest()
    offered = record(one, lease_deadline_ns=1000)
    for now, left, want in ((999, 0, None), (1000, 0, Code.LEASE_EXPIRED), (2**63, 0, Code.LEASE_EXPIRED), (990, 9, None), (990, 10, Code.LEASE_EXPIRED)):  # fmt: skip
        when = expected(now=Now(now, 0, BOOT), lease_left_ns=left)
        assert code(check_record(offered, one, draft(), when)) is want
    wall = record(one, clock=Clock.WALL, clock_id=bytes(16), lease_deadline_ns=NOW.wall_ns + 5)
    assert code(check_record(wall, one, draft(), expected())) is None
    late = replace(NOW, wall_ns=NOW.wall_ns + 5, monotonic_ns=0)
    assert code(check_record(wall, one, draft(), expected(now=late))) is Code.LEASE_EXPIRED
    copy = record(one, clock=Clock.NONE, clock_id=bytes(16), lease_deadline_ns=0)
    assert code(check_record(copy, one, draft(), expected(allow_no_lease=True))) is None


def test_own_copies_and_missing_digests_are_allowed_only_by_name() -> None:
    one = manifest()
    bare = record(one, algorithm=Algorithm.NONE)
    assert code(check_record(bare, one, draft(), expected())) is Code.MISSING_DIGEST
    assert check_record(bare, one, draft(), expected(allow_missing_digest=True)) is None
    stale = record(one, generation=8, epoch=b"x" * 16)
    assert check_record(stale, one, draft(), expected(epoch=None, generation=None)) is None
    assert code(check_record(stale, one, draft(), expected(epoch=None))) is Code.GENERATION
    assert code(check_record(record(one), one, draft(), expected(epoch=b""))) is Code.EPOCH
    assert EPOCH != b"x" * 16


def test_this_host() -> None:
    now = Now.read()
    assert len(now.boot) == 16
    assert now.boot == boot_id()
    assert Now.read().monotonic_ns >= now.monotonic_ns


def test_from_bytes() -> None:
    """A record that went over a wire, whole: accepted as it is; with a row missing or of another manifest, refused."""
    one = manifest()
    rows = plan_rows(one, 1, 4, layers_per_row=1)
    for offered, kept, want in (
        (one, rows, None),
        (one, rows[:-1], Code.ROWS_INCOMPLETE),
        (manifest(rope__theta="500000"), rows, Code.MANIFEST_DIGEST),
    ):
        buffer = bytearray(header_nbytes(len(kept)) + payload_nbytes(kept))
        seal_into(buffer, header(offered), kept)
        assert code(check(one, draft(), parse(buffer), expected())) is want
