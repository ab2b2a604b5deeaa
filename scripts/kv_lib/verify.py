"""``scripts/kv verify``: is a file whole, does it hold what its manifest says, and is it about these tokens?"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from hw.kv import codecs
from hw.kv.codecs import CodecError
from hw.kv.codes import Refused
from hw.kv.container import read_file
from hw.kv.coverage import check_coverage
from hw.kv.manifest import QUANTISED, Manifest
from hw.kv.payload import ConvertError, load
from hw.kv.prefix import Subject
from hw.kv.record import Clock, Record
from hw.kv.verdict import Expected, Local, check_record
from scripts.kv_lib.problem import Problem, explain

Check = Callable[[Manifest, Record], str]  # what was found right; raises for what was not


def verify(path: Path, console: Console, *, tokens: list[int] | None, salt: bytes) -> int:
    """Run every check on every record and say what each found; 0 when all passed, else 1. Raises Refused for what cannot even
    be parsed, and OSError."""
    found = read_file(path)
    manifest = found.manifest
    _say(console, "file", f"head, manifest and {len(found.records)} record header(s) are canonical")
    checks: dict[str, Check] = {"digests": _digests, "rows": _rows, "numbers": _numbers}
    if tokens is not None:
        checks["tokens"] = lambda manifest, record: _tokens(manifest, record, tokens, salt)
    failed = 0
    for index, record in enumerate(found.records):
        for name, check in checks.items():
            label = f"record {index + 1}: {name}"
            try:
                _say(console, label, check(manifest, record))
            except (Refused, ConvertError, CodecError, Problem) as error:
                failed += 1
                console.print(
                    f"FAILED  {label}: {explain(error)}", style="red", highlight=False, markup=False, soft_wrap=True
                )
    if tokens is None:
        console.print(
            "Not checked: whose tokens these are (--tokens FILE compares them).", highlight=False, markup=False
        )
    return 1 if failed else 0


def _digests(_: Manifest, record: Record) -> str:
    record.verify()
    return f"{len(record.rows)} row(s) match their digests"


def _rows(manifest: Manifest, record: Record) -> str:
    subject = record.header.subject
    check_coverage(manifest, record.rows, subject.start, subject.valid_tokens, manifest.geometry)
    return f"{manifest.geometry.layers} layers x {manifest.geometry.heads} heads x {subject.valid_tokens} tokens, each once"


def _numbers(manifest: Manifest, record: Record) -> str:
    if manifest.layout.opaque:
        return "not looked at: the packing is opaque"
    subject, numerics = record.header.subject, manifest.numerics
    held = load(manifest, record.rows, record.payload, subject.start, subject.valid_tokens)
    looked = 0
    for name, array, scales, dtype in (
        ("K", held.k, held.k_scale, numerics.k),
        ("V", held.v, held.v_scale, numerics.v),
    ):
        looked += array.size
        if dtype not in QUANTISED:
            _finite(array, dtype, name)
            continue
        if np.abs(array, dtype=np.int16).max() > codecs.LIMIT[dtype]:
            raise CodecError(f"{name} holds integers that no encoder writes")
        if scales is None:
            raise CodecError(f"{name} is quantised and has no scales")
        _finite(scales, numerics.scale, f"scales of {name}")
    return f"all {looked:,} are finite"


def _finite(array: codecs.Array, dtype: str, name: str) -> None:
    exponent = np.uint16(0x7F80)  # of bfloat16, carried as words: all ones is NaN or infinity
    good = (array & exponent) != exponent if dtype == "bfloat16" else np.isfinite(array)
    if not good.all():
        raise CodecError(f"{name} holds NaN or infinity: whatever attends to it is lost. Compute it again")


def _tokens(manifest: Manifest, record: Record, tokens: list[int], salt: bytes) -> str:
    got = record.header.subject
    end = got.start + got.valid_tokens
    if len(tokens) < end:
        raise Problem(
            f"the record ends at position {end - 1}, and only {len(tokens)} tokens were given: name all of them"
        )
    wanted = Subject.of(
        tokens[:end],
        got.start,
        salt=salt,
        adapter=manifest.identity.adapter,
        block_tokens=got.prefix_block_tokens,
    )
    # A file is the reader's own copy, and what its producer promised about memory means nothing any more.
    copy = replace(record, header=replace(record.header, clock=Clock.NONE, clock_id=bytes(16), lease_deadline_ns=0))
    expected = Expected(wanted, None, None, allow_missing_digest=True, allow_no_lease=True)
    refused = check_record(copy, manifest, Local("draft", manifest), expected)
    if refused is not None:
        raise Refused(refused.code, refused.field, refused.got, refused.want)
    return f"prefix, tokens and tenant of positions {got.start}..{end - 1} are these"


def _say(console: Console, label: str, text: str) -> None:
    console.print(f"ok      {label}: {text}", highlight=False, markup=False, soft_wrap=True)
