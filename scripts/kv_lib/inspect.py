"""``scripts/kv inspect``: what a file holds, as tables or JSON."""

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from hw.kv.container import Container, read_file
from hw.kv.manifest import Manifest
from hw.kv.record import Record

_DIGEST_SHOWN = 16  # hex digits in tables; --json has all
_PARTS = ("identity", "geometry", "numerics", "layout", "rope", "attention")
_ROWS_SHOWN = 12


def inspect(path: Path, console: Console, *, as_json: bool) -> int:
    """Print it; 0. Raises Refused and OSError."""
    found = read_file(path)
    if as_json:
        console.print_json(json.dumps(described(found)))
        return 0
    console.print(_manifest(found.manifest, path))
    for index, record in enumerate(found.records):
        console.print(_record(record, index, len(found.records)))
        console.print(_rows(record))
    console.print(
        f"{path.stat().st_size:,} bytes in all. scripts/kv verify {path} compares the digests.", highlight=False
    )
    return 0


def described(container: Container) -> dict[str, Any]:
    """All of it but the payload, as JSON has it; digests and ids in hex."""
    return {
        "manifest_digest": container.manifest.digest().hex(),
        "manifest": msgspec.to_builtins(container.manifest),
        "records": [_facts(record) for record in container.records],
    }


def _facts(record: Record) -> dict[str, Any]:
    header, subject = record.header, record.header.subject
    return {
        "start": subject.start,
        "valid_tokens": subject.valid_tokens,
        "payload_bytes": len(record.payload),
        "bytes_per_token": len(record.payload) / subject.valid_tokens,
        "prefix_hash": subject.prefix_hash.hex(),
        "prefix_block_tokens": subject.prefix_block_tokens,
        "token_digest": subject.token_digest.hex(),
        "tenant_digest": subject.tenant_digest.hex(),
        "generation": header.generation,
        "epoch": header.epoch.hex(),
        "digests": header.algorithm.name.lower(),
        "lease": header.clock.name.lower(),
        "lease_deadline_ns": header.lease_deadline_ns,
        "rows": [
            {
                "kind": row.kind.name,
                "first_layer": row.first_layer,
                "layers": row.layers,
                "first_token": row.first_token,
                "tokens": row.tokens,
                "first_head": row.first_head,
                "heads": row.heads,
                "offset": row.offset,
                "nbytes": row.nbytes,
                "digest": row.digest.hex(),
            }
            for row in record.rows
        ],
    }


def _manifest(manifest: Manifest, path: Path) -> Table:
    table = Table("Part", "Field", "Value", title=f"{path}: manifest", title_justify="left")
    table.add_row("", "digest", manifest.digest().hex())
    for name in ("role", "exactness", "lineage"):
        table.add_row("", name, _text(getattr(manifest, name)))
    for name in _PARTS:
        part = getattr(manifest, name)
        for index, field in enumerate(part.__struct_fields__):
            table.add_row("" if index else name, field, _text(getattr(part, field)))
    return table


def _record(record: Record, index: int, count: int) -> Table:
    facts = _facts(record)
    title = f"Record {index + 1} of {count}: positions {facts['start']}..{facts['start'] + facts['valid_tokens'] - 1}"
    table = Table("Field", "Value", title=title, title_justify="left")
    for name, value in facts.items():
        if name != "rows":
            table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else _text(value))
    return table


def _rows(record: Record) -> Table:
    headings = ("Kind", "Layers", "Heads", "Positions", "Offset", "Bytes", "Digest")
    hidden = len(record.rows) - _ROWS_SHOWN
    caption = f"and {hidden} more rows; --json has them" if hidden > 0 else None
    table = Table(*headings, title="Rows", title_justify="left", caption=caption, caption_justify="left")
    for row in record.rows[:_ROWS_SHOWN]:
        table.add_row(
            row.kind.name,
            _range(row.first_layer, row.layers),
            _range(row.first_head, row.heads),
            _range(row.first_token, row.tokens),
            f"{row.offset:,}",
            f"{row.nbytes:,}",
            row.digest.hex()[:_DIGEST_SHOWN],
        )
    return table


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}..{first + count - 1}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "\n".join(value) or "nothing lossy so far"
    return "none" if value == "" else str(value)
