"""Manifests, records and receivers that the tests of the KV plane start from."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from hw.kv.digests import Algorithm
from hw.kv.manifest import Attention, Geometry, Identity, Layout, Manifest, Numerics, Rope, manifest_for
from hw.kv.prefix import Subject
from hw.kv.record import Clock, Header
from hw.kv.steps import ALL_STEPS
from hw.kv.verdict import Expected, Local, Now

TARGET_WEIGHTS, DRAFT_WEIGHTS, TOKENIZER, COMPUTE, OTHER = ("1" * 64, "2" * 64, "3" * 64, "4" * 64, "5" * 64)
SALT = b"tenant-a"
BOOT = bytes(range(16))
EPOCH = b"producer-epoch-1"
NOW = Now(monotonic_ns=1_000_000_000, wall_ns=1_700_000_000_000_000_000, boot=BOOT)


def manifest(**changes: Any) -> Manifest:
    """A small target's KV for its draft; ``part__field=value`` changes a field, ``field=value`` one of the top level."""
    parts: dict[str, Any] = {
        "identity": Identity("sample", TARGET_WEIGHTS, "", TOKENIZER, COMPUTE),
        "geometry": Geometry(0, 4, 2, 0, 2, 32, 32, 0),
        "numerics": Numerics("float32", "float32", "", ""),
        "layout": Layout("HND", "token_major"),
        "rope": Rope(True, "neox", 32, "10000", ""),
        "attention": Attention(0, 0, ""),
    }
    rest: dict[str, Any] = {"role": "target_to_draft", "exactness": "bit_exact"}
    within: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            within.setdefault(part, {})[field] = value
        elif part in parts:
            parts[part] = value
        else:
            rest[part] = value
    for part, fields in within.items():
        parts[part] = msgspec.structs.replace(parts[part], **fields)
    return manifest_for(**parts, **rest)


def draft(**changes: Any) -> Local:
    """A draft of the sample target, which holds what :func:`manifest` describes."""
    holds = manifest(identity__weights=DRAFT_WEIGHTS, identity__compute=OTHER, exactness="approximate", **changes)
    return Local("draft", holds, TARGET_WEIGHTS, ALL_STEPS)


def target(**changes: Any) -> Local:
    return Local("target", manifest(**changes), convertible=ALL_STEPS)


TOKENS = [5, 6, 7, 8, 9]
SUBJECT = Subject.of(TOKENS, 1, salt=SALT, adapter="")


def header(of: Manifest, **changes: Any) -> Header:
    facts: dict[str, Any] = {
        "manifest_digest": of.digest(),
        "subject": SUBJECT,
        "generation": 7,
        "epoch": EPOCH,
        "clock": Clock.MONOTONIC,
        "clock_id": BOOT,
        "lease_deadline_ns": 2_000_000_000,
        "algorithm": Algorithm.BLAKE3,
    }
    return Header(**{**facts, **changes})


def expected(**changes: Any) -> Expected:
    facts: dict[str, Any] = {"subject": SUBJECT, "epoch": EPOCH, "generation": 7, "now": NOW}
    return Expected(**{**facts, **changes})


hexes = st.binary(min_size=32, max_size=32).map(bytes.hex)
decimals = st.sampled_from(["1", "10000", "500000", "0.5", "1000000.25"])


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest that is well formed."""
    floats, dtypes = (
        st.sampled_from(["float32", "float16", "bfloat16"]),
        ["float32", "float16", "bfloat16", "int8", "int4"],
    )
    packing = draw(st.sampled_from(["token_major", "k_transposed", "amx_vnni", "opaque:neon"]))
    words = st.sampled_from(["float16", "bfloat16"])
    k: Any
    v: Any
    k, v = (draw(words if packing == "amx_vnni" else st.sampled_from(dtypes)) for _ in range(2))
    quantised = k.startswith("int") or v.startswith("int")
    blocks = (
        st.sampled_from([16, 32, 128]) if packing in ("amx_vnni", "opaque:neon") else st.sampled_from([0, 1, 16, 48])
    )
    heads = draw(st.integers(1, 8))
    first_head = draw(st.integers(0, 8))
    dim, dim_v = (draw(st.sampled_from([16, 32, 64, 80])) for _ in range(2))
    rotary = draw(st.sampled_from([0, 8, 16]))
    lineage = tuple(
        draw(st.lists(st.sampled_from(["cast(k,float32,float16)", "quantise(v,float16,int8)"]), max_size=3))
    )
    exactness: Any = "approximate" if lineage else draw(st.sampled_from(["bit_exact", "same_function", "approximate"]))
    return manifest_for(
        Identity(
            draw(st.text(st.characters(exclude_categories=["Cs"], min_codepoint=0x20), max_size=40).filter(lambda t: "\x7f" not in t)),
            draw(hexes), draw(st.one_of(st.just(""), hexes)), draw(hexes), draw(hexes),
        ),
        Geometry(
            draw(st.integers(0, 100)), draw(st.integers(1, 100)), first_head + heads + draw(st.integers(0, 3)), first_head,
            heads, dim, dim_v, draw(blocks),
        ),
        Numerics(k, v, "per_token_head_symmetric" if quantised else "", draw(floats.filter(lambda f: f != "bfloat16")) if quantised else ""),
        Layout("HND" if packing in ("k_transposed", "amx_vnni") else draw(st.sampled_from(["NHD", "HND"])), packing),
        Rope(
            draw(st.booleans()) if rotary else False, draw(st.sampled_from(["neox", "interleaved"])), rotary,
            draw(decimals) if rotary else "", draw(st.one_of(st.just(""), hexes)),
        ),
        Attention(draw(st.integers(0, 2**31 - 1)), draw(st.integers(0, 64)), draw(st.one_of(st.just(""), decimals))),
        role=draw(st.sampled_from(["target_to_draft", "draft_to_target", "migrate"])),
        exactness=exactness,
        lineage=lineage,
    )  # fmt: skip
