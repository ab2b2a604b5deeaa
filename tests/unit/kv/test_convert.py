"""Conversions as the verdict plans them: lossless ones come back byte for byte, lossy ones say how far they moved."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hw.kv.codecs import STORAGE, dequantise, pack_nibbles, quantise
from hw.kv.convert import ConvertError, convert, join_heads, run
from hw.kv.manifest import Geometry, Layout, Manifest, Numerics
from hw.kv.payload import Held, load, store
from hw.kv.plan import plan_steps
from hw.kv.rows import RecordError, payload_nbytes, plan_rows
from hw.kv.steps import Cast, Quantise, Reblock, Reorder, Repack, SelectHeads, SelectLayers
from tests.unit.kv.samples import manifest

LAYERS, HEADS, START = 3, 4, 64
FORMS = [
    (order, packing, block)
    for order, packing in (("NHD", "token_major"), ("HND", "token_major"), ("HND", "k_transposed"), ("HND", "amx_vnni"))
    for block in (0, 16, 32, 48, 128)
    if block or packing == "token_major"
]


def made(order: str, packing: str, block: int, k: str = "bfloat16", v: str = "", **geometry: Any) -> Manifest:
    v = v or k
    quantised = "int" in k + v
    sizes = {"first_head": 0, "heads": HEADS, "first_layer": 0, "layers": LAYERS, "kv_heads": HEADS} | geometry
    return manifest(
        geometry=Geometry(head_dim=32, head_dim_v=32, block_tokens=block, **sizes),
        numerics=Numerics(k, v, "per_token_head_symmetric" if quantised else "", "float16" if quantised else ""),
        layout=Layout(order, packing),
    )


def payload_of(of: Manifest, keys: np.ndarray, values: np.ndarray, layers_per_row: int = 0) -> tuple[Any, memoryview]:
    """Rows and payload of canonical ``[layers, heads, tokens, dim]`` arrays, through steps from the canonical form."""
    tokens = keys.shape[2]
    plain = made("HND", "token_major", 0, of.numerics.k)
    held = Held(tokens, plain.geometry, plain.numerics, plain.layout, keys[:, None], values[:, None])
    rows = plan_rows(of, START, tokens, layers_per_row)
    return rows, store(run(held, plan_steps(plain, of)), of, rows)


def random_bytes(tokens: int, dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (LAYERS, HEADS, tokens, 32)
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * np.dtype(STORAGE[dtype]).itemsize
    keys, values = (np.frombuffer(rng.bytes(size), STORAGE[dtype]).reshape(shape) for _ in range(2))
    return keys, values


def normal(tokens: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    both = np.random.default_rng(0).standard_normal((2, LAYERS, HEADS, tokens, 32)).astype(np.float32)
    if dtype == "bfloat16":
        both = torch.from_numpy(both).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return both[0], both[1]


@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from(FORMS),
    target=st.sampled_from(FORMS),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    tokens=st.integers(1, 150),
    ranks=st.sampled_from([1, 2, 4]),
    per_row=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_pair_of_layouts_comes_back_with_identical_bytes(
    source: Any, target: Any, dtype: str, tokens: int, ranks: int, per_row: int, seed: int
) -> None:
    if dtype == "float32":  # words of 32 bits have no AMX packing
        source, target = ((o, "k_transposed" if p == "amx_vnni" else p, b) for o, p, b in (source, target))
    first = made(*source, dtype)
    rows, payload = payload_of(first, *random_bytes(tokens, dtype, seed), per_row)
    parts = []
    for rank in range(ranks):  # every rank of the target takes its heads, in its own layout
        size = HEADS // ranks
        wanted = made(*target, dtype, first_head=rank * size, heads=size)
        there = convert(first, rows, payload, plan_steps(first, wanted), wanted, start=START, tokens=tokens)
        assert there.losses == ()
        back = load(wanted, there.rows, there.payload, START, tokens)
        parts.append(run(back, plan_steps(wanted, made(*source, dtype, first_head=rank * size, heads=size))))
    joined = join_heads(parts[::-1])
    assert joined.geometry == first.geometry
    assert bytes(store(joined, first, rows)) == bytes(payload)


def test_golden_bytes_of_a_row() -> None:
    """Two layers, one head, three tokens in blocks of two: where each byte of a KV row lies."""
    of = manifest(
        geometry=Geometry(0, 2, 1, 0, 1, 2, 2, 2),
        numerics=Numerics("float16", "float16", "", ""),
        layout=Layout("HND", "k_transposed"),
        rope__rotary_dim=2,
    )
    plain = manifest(geometry=Geometry(0, 2, 1, 0, 1, 2, 2, 0), numerics=of.numerics, rope__rotary_dim=2)
    keys = np.arange(1, 13, dtype=np.uint16).view(np.float16).reshape(2, 1, 1, 3, 2)
    values = np.arange(21, 33, dtype=np.uint16).view(np.float16).reshape(2, 1, 1, 3, 2)
    held = Held(3, plain.geometry, plain.numerics, plain.layout, keys, values)
    rows = plan_rows(of, 0, 3)
    words = np.frombuffer(store(run(held, plan_steps(plain, of)), of, rows), np.uint16)[:32]
    assert words.tolist() == [
        *(1, 3, 2, 4), *(5, 0, 6, 0), *(21, 22, 23, 24), *(25, 26, 0, 0),
        *(7, 9, 8, 10), *(11, 0, 12, 0), *(27, 28, 29, 30), *(31, 32, 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(("k", "v"), [("int8", "int8"), ("int4", "int4"), ("bfloat16", "int4"), ("int8", "bfloat16")])
@pytest.mark.parametrize("form", [("NHD", "token_major", 16), ("HND", "k_transposed", 32), ("HND", "token_major", 0)])
def test_quantised_payloads_travel_and_report_their_error(k: str, v: str, form: tuple[str, str, int]) -> None:
    tokens = 37
    keys, values = normal(tokens, "bfloat16")
    source, target = made("HND", "token_major", 0), made(*form, k, v)
    rows, payload = payload_of(source, keys, values)
    there = convert(source, rows, payload, plan_steps(source, target), target, start=START, tokens=tokens)
    assert len(there.losses) == (k != "bfloat16") + (v != "bfloat16")
    for found in there.losses:
        assert 0 < found.relative_rms < (0.012 if "int8" in found.step else 0.2)
    back = convert(target, there.rows, there.payload, plan_steps(target, source), source, start=START, tokens=tokens)
    held = load(source, back.rows, back.payload, START, tokens)
    for name, dtype, original in (("k", k, keys), ("v", v, values)):
        want = original
        if dtype != "bfloat16":
            want = dequantise(*quantise(original, "bfloat16", dtype, "float16"), dtype, "bfloat16")
        assert np.array_equal(getattr(held, name)[:, 0], want)


def test_quantised_bytes_are_moved_unchanged_by_lossless_steps() -> None:
    tokens = 21
    integers, scales = quantise(normal(tokens, "float32")[0], "float32", "int4", "float16")
    of = made("HND", "token_major", 0, "int4")
    held = Held(tokens, of.geometry, of.numerics, of.layout, *[integers[:, None]] * 2, *[scales[:, None]] * 2)
    rows = plan_rows(of, START, tokens)
    payload = store(held, of, rows)
    assert bytes(payload[: rows[0].nbytes // 2 // LAYERS]) == pack_nibbles(integers[0]).tobytes()
    blocked = made("NHD", "token_major", 16, "int4", first_head=1, heads=2, first_layer=1, layers=2)
    there = convert(of, rows, payload, plan_steps(of, blocked), blocked, start=START, tokens=tokens)
    got = load(blocked, there.rows, there.payload, START, tokens)
    assert np.array_equal(got.k.reshape(2, -1, 2, 32)[:, :tokens].swapaxes(1, 2), integers[1:, 1:3])
    assert got.v_scale is not None
    assert np.array_equal(got.v_scale.reshape(2, -1, 2)[:, :tokens].swapaxes(1, 2), scales[1:, 1:3])


def test_a_cast_to_float32_loses_nothing_and_one_to_16_bits_says_what() -> None:
    keys, values = normal(20, "float32")
    source, target = made("HND", "token_major", 0, "float32"), made("HND", "amx_vnni", 32, "bfloat16")
    rows, payload = payload_of(source, keys, values)
    there = convert(source, rows, payload, plan_steps(source, target), target, start=START, tokens=20)
    assert [loss.step for loss in there.losses] == ["cast(k,float32,bfloat16)", "cast(v,float32,bfloat16)"]
    assert all(0 < loss.relative_rms < 0.003 for loss in there.losses)
    back = convert(target, there.rows, there.payload, plan_steps(target, source), source, start=START, tokens=20)
    assert back.losses == ()
    want = torch.from_numpy(keys).to(torch.bfloat16).float().numpy()
    assert np.array_equal(load(source, back.rows, back.payload, START, 20).k[:, 0], want)


def test_rows_cut_at_heads_and_tokens_are_put_together() -> None:
    keys, values = random_bytes(48, "bfloat16", 5)
    of = made("HND", "amx_vnni", 16)
    whole_rows, whole = payload_of(of, keys, values)
    rows, data = [], bytearray()
    for heads in (slice(0, 1), slice(1, 4)):
        for low, high in ((0, 32), (32, 48)):
            part = made("HND", "amx_vnni", 16, first_head=heads.start, heads=heads.stop - heads.start)
            plain = made("HND", "token_major", 0, first_head=heads.start, heads=heads.stop - heads.start)
            pieces = (np.ascontiguousarray(a[:, heads, low:high])[:, None] for a in (keys, values))
            held = run(Held(high - low, plain.geometry, plain.numerics, plain.layout, *pieces), plan_steps(plain, part))
            (row,) = plan_rows(part, START + low, high - low)
            rows.append(replace(row, offset=len(data)))
            data += store(held, part, [row])
    held = load(of, rows, memoryview(data), START, 48)
    assert bytes(store(held, of, whole_rows)) == bytes(whole)


def test_one_row_is_looked_at_without_a_copy() -> None:
    of = made("HND", "token_major", 0)
    rows, payload = payload_of(of, *random_bytes(40, "bfloat16", 1))
    held = load(of, rows, payload, START, 40)
    before = int(held.k[0, 0, 0, 0, 0])
    payload[0] ^= 0xFF
    assert int(held.k[0, 0, 0, 0, 0]) != before


PLAIN = made("HND", "token_major", 0)
BAD: list[tuple[Callable[[Held], object], str]] = [
    (lambda h: run(h, [SelectLayers(0, LAYERS + 1)]), "only 0..2 are there"),
    (lambda h: run(h, [SelectHeads(HEADS, 1)]), "only 0..3 are there"),
    (lambda h: run(h, [SelectHeads(0, 0)]), "only 0..3"),
    (lambda h: run(h, [Repack("amx_vnni", "token_major")]), "finds token_major"),
    (lambda h: run(h, [Repack("token_major", "opaque:x")]), "opaque"),
    (lambda h: run(h, [Repack("token_major", "amx_vnni")]), "multiple of 16"),
    (lambda h: run(h, [Reblock(16, 32)]), "expected"),
    (lambda h: run(h, [Reorder("NHD", "HND")]), "expected"),
    (lambda h: run(h, [Cast("k", "float16", "float32")]), "finds bfloat16"),
    (
        lambda h: run(h, [Reblock(0, 32), Repack("token_major", "k_transposed"), Cast("k", "bfloat16", "float32")]),
        "form",
    ),
    (lambda h: run(h, [Reorder("HND", "NHD"), Repack("token_major", "k_transposed")]), "only HND"),
    (lambda h: join_heads([]), "nothing to join"),
    (lambda h: join_heads([h, h]), "missing or held twice"),
    (lambda h: join_heads([run(h, [SelectHeads(0, 1)]), run(h, [SelectHeads(2, 2)])]), "missing or held twice"),
    (lambda h: join_heads([run(h, [SelectHeads(0, 1)]), run(h, [SelectHeads(1, 3), Reblock(0, 16)])]), "different"),
]


@pytest.mark.parametrize(("attempt", "says"), BAD)
def test_steps_that_do_not_fit_are_refused(attempt: Callable[[Held], object], says: str) -> None:
    rows, payload = payload_of(PLAIN, *random_bytes(20, "bfloat16", 1))
    with pytest.raises(ValueError, match=says):
        attempt(load(PLAIN, rows, payload, START, 20))


def test_payloads_that_do_not_fit_are_refused_and_out_stays_as_it_was() -> None:
    rows, payload = payload_of(PLAIN, *random_bytes(20, "bfloat16", 1))
    wanted = made("NHD", "token_major", 16)
    steps = plan_steps(PLAIN, wanted)
    size = payload_nbytes(plan_rows(wanted, START, 20))
    out = memoryview(bytearray(b"\x07" * size))

    def attempt(**changes: Any) -> None:
        facts = {"rows": rows, "payload": payload, "steps": steps, "result": wanted, "out": out} | changes
        convert(PLAIN, start=START, tokens=20, **facts)

    with pytest.raises(ConvertError, match="in a payload of"):
        attempt(payload=payload[:-64])
    with pytest.raises(ConvertError, match="the steps lead to"):
        attempt(steps=steps[:-1])
    with pytest.raises(RecordError):
        attempt(rows=())
    with pytest.raises(ConvertError, match="writable"):
        attempt(out=out.toreadonly())
    with pytest.raises(ConvertError, match="writable"):
        attempt(out=out[:-1])
    nan = np.full((LAYERS, HEADS, 20, 32), 0x7FC0, np.uint16)
    bad_rows, bad = payload_of(PLAIN, nan, nan)
    lossy = [Quantise("k", "bfloat16", "int8", "per_token_head_symmetric", "float16")]
    with pytest.raises(ValueError, match="NaN"):
        attempt(rows=bad_rows, payload=bad, steps=lossy)
    assert bytes(out) == b"\x07" * size
    with pytest.raises(ConvertError, match="no row holds"):
        load(PLAIN, [], payload, START, 20)
    with pytest.raises(ConvertError, match="nothing to write"):
        store(
            load(PLAIN, rows, payload, START, 20),
            PLAIN,
            plan_rows(made("HND", "token_major", 0, "int8"), START, 20)[1:2],
        )
