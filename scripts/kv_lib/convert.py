"""``scripts/kv convert``: another dtype, block size, layout, or fewer layers and heads, as a receiver would do it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed
from rich.console import Console

from hw.kv.codes import Refused
from hw.kv.container import read_file, write_file
from hw.kv.convert import convert as run_steps
from hw.kv.digests import Algorithm
from hw.kv.manifest import QUANTISED, Geometry, Manifest, Numerics
from hw.kv.record import Clock, Record, header_nbytes, parse, seal_into
from hw.kv.rows import payload_nbytes
from hw.kv.steps import ALL_STEPS, Step
from hw.kv.verdict import Convert, Local, Reject, check_manifest
from scripts.kv_lib.problem import Problem


@dataclass(frozen=True)
class Wish:
    """What the result should be; None leaves a thing as it is. ``heads`` and ``layers`` are half-open ranges."""

    k: str | None = None
    v: str | None = None
    scale: str | None = None  # of what gets quantised; float32 where nothing was so far
    block_tokens: int | None = None
    order: str | None = None
    packing: str | None = None
    heads: tuple[int, int] | None = None
    layers: tuple[int, int] | None = None


def convert(path: Path, out: Path, wish: Wish, console: Console) -> int:
    """Write ``out`` and say which steps led to it and what they lost; 0. Raises Refused, ConvertError, CodecError, OSError."""
    found = read_file(path)
    steps, result = plan(found.manifest, wish)
    records = [_converted(found.manifest, record, steps, result, console) for record in found.records]
    size = write_file(out, result, records)
    for step in steps:
        console.print(f"{'lossy   ' if step.lossy else 'lossless'}  {step}", highlight=False, markup=False)
    if not steps:
        console.print("nothing to convert: it is like that already", highlight=False)
    before = path.stat().st_size
    console.print(
        f"{out}: {size:,} bytes ({size / before:.2f} of {before:,}), {result.exactness}, manifest {result.digest().hex()}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def plan(manifest: Manifest, wish: Wish) -> tuple[tuple[Step, ...], Manifest]:
    """The steps and the manifest that they lead to, by the verdict of a receiver that wants it so. Raises Refused."""
    # Between equal engines only what is wished for decides; in which direction it goes stays as it was.
    offered = changed(manifest, role="migrate")
    holds = changed(
        offered,
        geometry=_geometry(manifest.geometry, wish),
        numerics=_numerics(manifest.numerics, wish),
        layout=changed(
            manifest.layout,
            order=wish.order or manifest.layout.order,
            packing=wish.packing or manifest.layout.packing,
        ),
    )
    verdict = check_manifest(offered, Local("draft", holds, convertible=ALL_STEPS))
    if isinstance(verdict, Reject):
        raise Refused(verdict.code, verdict.field, verdict.got, verdict.want)
    steps = verdict.steps if isinstance(verdict, Convert) else ()
    return steps, changed(verdict.result, role=manifest.role)


def _geometry(geometry: Geometry, wish: Wish) -> Geometry:
    changes: dict[str, Any] = {}
    if wish.block_tokens is not None:
        changes["block_tokens"] = wish.block_tokens
    for given, first, count in ((wish.layers, "first_layer", "layers"), (wish.heads, "first_head", "heads")):
        if given is not None:
            changes |= {first: given[0], count: given[1] - given[0]}
    last = changes.get("first_head", 0) + changes.get("heads", 1)
    if last > geometry.kv_heads:
        raise Problem(f"--heads ends at {last}, and the model has {geometry.kv_heads}")
    return changed(geometry, **changes)


def _numerics(numerics: Numerics, wish: Wish) -> Numerics:
    k, v = wish.k or numerics.k, wish.v or numerics.v
    if k not in QUANTISED and v not in QUANTISED:
        return Numerics(k, v, "", "")  # type: ignore[arg-type]
    scale = wish.scale or numerics.scale or "float32"
    return Numerics(k, v, "per_token_head_symmetric", scale)  # type: ignore[arg-type]


def _converted(
    manifest: Manifest, record: Record, steps: tuple[Step, ...], result: Manifest, console: Console
) -> Record:
    if record.header.algorithm is not Algorithm.NONE:
        record.verify()  # damage must not get new digests
    subject = record.header.subject
    done = run_steps(
        manifest,
        record.rows,
        record.payload,
        steps,
        result,
        start=subject.start,
        tokens=subject.valid_tokens,
    )
    for loss in done.losses:
        console.print(
            f"{loss.step} at {subject.start}: {loss.elements:,} elements, largest error {loss.max_abs:.3g}, "
            f"RMS error {loss.relative_rms:.3%} of the RMS",
            highlight=False,
            markup=False,
        )
    at = header_nbytes(len(done.rows))
    buffer = bytearray(at + payload_nbytes(done.rows))
    buffer[at:] = done.payload
    header = replace(
        record.header,
        manifest_digest=result.digest(),
        algorithm=Algorithm.BLAKE3,
        clock=Clock.NONE,
        clock_id=bytes(16),
        lease_deadline_ns=0,
    )
    seal_into(buffer, header, done.rows)
    return parse(buffer)
