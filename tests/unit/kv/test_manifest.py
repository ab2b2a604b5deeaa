"""The manifest: one byte string for each, and nothing else is read as one."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given

from hw.kv.codes import Code
from hw.kv.manifest import (
    MAX_BYTES,
    MAX_LINEAGE,
    Manifest,
    ManifestError,
    compute_fingerprint,
    decimal,
    json_digest,
)
from tests.unit.kv.samples import OTHER, manifest, manifests

GOLDEN = (
    '{"attention":{"sinks":0,"softcap":"","window":0},"endian":"little","exactness":"bit_exact",'
    '"geometry":{"block_tokens":0,"first_head":0,"first_layer":0,"head_dim":32,"head_dim_v":32,"heads":2,"kv_heads":2,'
    '"layers":4},"identity":{"adapter":"","compute":"' + "4" * 64 + '","model":"sample","tokenizer":"' + "3" * 64 + '",'
    '"weights":"'
    + "1"
    * 64
    + '"},"layout":{"order":"HND","packing":"token_major"},"lineage":[],"numerics":{"k":"float32",'
    '"scale":"","scheme":"","v":"float32"},"role":"target_to_draft","rope":{"applied":true,"rotary_dim":32,"scaling":"",'
    '"style":"neox","theta":"10000"},"version":1}'
)
GOLDEN_DIGEST = "1f9ffc2d8054a10d7970990a2eb5e7904e5b133df1e8513968371db0728d7f8c"


def test_golden() -> None:
    """The worked example of docs/kv_block_format.md."""
    assert manifest().encode() == GOLDEN.encode()
    assert manifest().digest().hex() == GOLDEN_DIGEST


@given(manifests())
def test_round_trip(one: Manifest) -> None:
    data = one.encode()
    assert len(data) <= MAX_BYTES
    assert Manifest.decode(data) == one
    assert Manifest.decode(memoryview(bytearray(data))).encode() == data
    assert json.loads(data)["version"] == 1


def paths(value: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, entry in value.items():
        found.append((*before, key))
        if isinstance(entry, dict):
            found += paths(entry, (*before, key))
    return found


EVERY_FIELD = paths(json.loads(GOLDEN))


def spelled(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def at(value: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path[:-1]:
        value = value[key]
    return value


@pytest.mark.parametrize("path", EVERY_FIELD, ids=".".join)
def test_every_field_is_required_and_checked(path: tuple[str, ...]) -> None:
    value = json.loads(GOLDEN)
    del at(value, path)[path[-1]]
    with pytest.raises(ManifestError) as missing:
        Manifest.decode(spelled(value))
    assert (missing.value.code, missing.value.field) == (Code.MANIFEST_MALFORMED, ".".join(path))
    for wrong in (None, -1, 1.5, "?" * 300, [1], {"x": 1}, 2**40):
        value = json.loads(GOLDEN)
        at(value, path)[path[-1]] = wrong
        with pytest.raises(ManifestError) as refused:
            Manifest.decode(spelled(value))
        assert refused.value.field.startswith(path[0])
        assert refused.value.code in (Code.MANIFEST_MALFORMED, Code.MANIFEST_VERSION)
    value = json.loads(GOLDEN)
    at(value, path)["surplus"] = 1
    with pytest.raises(ManifestError) as unknown:
        Manifest.decode(spelled(value))
    assert unknown.value.field == ".".join((*path[:-1], "surplus"))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (GOLDEN.replace(":", ": ", 1), Code.MANIFEST_NOT_CANONICAL),
        (GOLDEN + "\n", Code.MANIFEST_NOT_CANONICAL),
        (" " + GOLDEN, Code.MANIFEST_NOT_CANONICAL),
        (GOLDEN.replace('"sinks":0', '"sinks":0,"sinks":0'), Code.MANIFEST_NOT_CANONICAL),
        (GOLDEN.replace('"sinks":0,"softcap":""', '"softcap":"","sinks":0'), Code.MANIFEST_NOT_CANONICAL),
        (GOLDEN.replace("sample", "s\\u0061mple"), Code.MANIFEST_NOT_CANONICAL),
        (GOLDEN.replace('"window":0', '"window":-0'), Code.MANIFEST_NOT_CANONICAL),
        (GOLDEN.replace('"layers":4', '"layers":4.5'), Code.MANIFEST_MALFORMED),
        (GOLDEN.replace('"layers":4', '"layers":4.0'), None),
        (GOLDEN.replace('"layers":4', '"layers":4e0'), None),
    ],
)
def test_one_spelling(data: str, code: Code | None) -> None:
    """None: which of the two it is may depend on the JSON library."""
    with pytest.raises(ManifestError) as refused:
        Manifest.decode(data.encode())
    assert refused.value.code in ((code,) if code else (Code.MANIFEST_MALFORMED, Code.MANIFEST_NOT_CANONICAL))


def test_no_other_bytes() -> None:
    data = GOLDEN.encode()
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            Manifest.decode(data[:length])
    for place in range(len(data)):
        for flip in (1, 0x80):
            changed = bytearray(data)
            changed[place] ^= flip
            try:
                other = Manifest.decode(changed)
            except ManifestError:
                continue
            assert other.digest() != manifest().digest()  # another value, then: a record of this one does not fit it
    with pytest.raises(ManifestError) as refused:
        Manifest.decode(b" " * (MAX_BYTES + 1))
    assert refused.value.code is Code.MANIFEST_TOO_LONG
    for hostile in (b"[" * MAX_BYTES, b'{"lineage":' + b"[" * 50_000, b"\xff", b'{"endian":"\xed\xa0\x80"}'):
        with pytest.raises(ManifestError):
            Manifest.decode(hostile)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("identity.weights", {"identity__weights": ""}),
        ("identity.compute", {"identity__compute": "A" * 64}),
        ("identity.tokenizer", {"identity__tokenizer": "3" * 63}),
        ("identity.adapter", {"identity__adapter": "my-adapter"}),
        ("identity.model", {"identity__model": "a\nb"}),
        ("geometry.layers", {"geometry__layers": True}),
        ("geometry.heads", {"geometry__first_head": 1}),
        ("geometry.block_tokens", {"geometry__block_tokens": 2**16 + 1}),
        ("numerics.k", {"numerics__k": "float8"}),
        ("numerics.scheme", {"numerics__k": "int8"}),
        ("numerics.scheme", {"numerics__scheme": "per_token_head_symmetric"}),
        ("numerics.scale", {"numerics__k": "int8", "numerics__scheme": "per_token_head_symmetric"}),
        ("layout.packing", {"layout__packing": "opaque:"}),
        ("layout.order", {"layout__packing": "k_transposed", "layout__order": "NHD"}),
        ("rope.rotary_dim", {"rope__rotary_dim": 31}),
        ("rope", {"rope__rotary_dim": 64}),
        ("rope.theta", {"rope__theta": "1e4"}),
        ("rope.theta", {"rope__theta": "10000.0"}),
        ("rope.theta", {"rope__theta": ""}),
        ("rope.applied", {"rope__rotary_dim": 0, "rope__theta": ""}),
        ("attention.softcap", {"attention__softcap": "-1"}),
        ("exactness", {"lineage": ("cast(k,float32,float16)",)}),
        ("lineage", {"lineage": ("x",) * (MAX_LINEAGE + 1), "exactness": "approximate"}),
        ("lineage", {"lineage": ("not a step",), "exactness": "approximate"}),
        ("lineage", {"lineage": ["x"], "exactness": "approximate"}),
        ("role", {"role": "sideways"}),
        ("numerics", {"layout__packing": "amx_vnni", "geometry__block_tokens": 32}),
        (
            "geometry",
            {"layout__packing": "amx_vnni", "numerics__k": "bfloat16", "numerics__v": "bfloat16", "geometry__block_tokens": 8},
        ),
        ("geometry", {"layout__packing": "opaque:neon"}),
    ],
)  # fmt: skip
def test_facts_that_do_not_fit(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as refused:
        manifest(**changes)
    assert refused.value.field == field
    assert field in str(refused.value)


def test_int4_needs_even_dims() -> None:
    changes = {"numerics__k": "int4", "numerics__scheme": "per_token_head_symmetric", "numerics__scale": "float16"}
    with pytest.raises(ManifestError, match="even"):
        manifest(geometry__head_dim=33, **changes)


def test_other_version() -> None:
    with pytest.raises(ManifestError) as refused:
        Manifest.decode(GOLDEN.replace('"version":1', '"version":2').encode())
    assert refused.value.code is Code.MANIFEST_VERSION
    with pytest.raises(ManifestError):
        msgspec.structs.replace(manifest(), version=2)


def test_compute_fingerprint() -> None:
    facts: dict[str, Any] = {
        "engine": "vllm", "engine_version": "0.29.0", "dtype": "bfloat16", "attention": "CPU_ATTN", "isa": "amx",
        "packing": "amx_vnni", "batch_invariant": True,
    }  # fmt: skip
    seen = {compute_fingerprint(**facts)}
    for name, value in facts.items():
        seen.add(compute_fingerprint(**{**facts, name: not value if isinstance(value, bool) else value + "x"}))
        if isinstance(value, str):
            with pytest.raises(ManifestError, match=name):
                compute_fingerprint(**{**facts, name: ""})
    assert len(seen) == 1 + len(facts)
    assert OTHER not in seen
    assert all(len(found) == 64 for found in seen)


def test_decimal_and_json() -> None:
    written = {10000.0: "10000", 500000: "500000", 0.5: "0.5", 1e6: "1000000", 1e-7: "0.0000001", 0.1: "0.1", 0: "0"}
    assert {value: decimal(value) for value in written} == written
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ManifestError):
            decimal(bad)
    assert json_digest({"b": 1, "a": "é"}) == json_digest({"a": "é", "b": 1}) != json_digest({"a": "e", "b": 1})
    with pytest.raises(ValueError):
        json_digest(float("nan"))
