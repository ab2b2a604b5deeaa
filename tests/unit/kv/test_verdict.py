"""Verdicts: each cause has its code, conversions are those that are needed, and what is missing is refused."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given

from hw.kv.codes import Code, Refused
from hw.kv.manifest import MAX_LINEAGE, QUANTISED, Manifest
from hw.kv.plan import plan_steps
from hw.kv.steps import (
    ALL_STEPS,
    Cast,
    Dequantise,
    Quantise,
    Reblock,
    Reorder,
    Repack,
    SelectHeads,
    SelectLayers,
    Step,
)
from hw.kv.verdict import (
    Accept,
    Convert,
    Local,
    Reject,
    Verdict,
    check_manifest,
)
from tests.unit.kv.samples import (
    DRAFT_WEIGHTS,
    OTHER,
    draft,
    manifest,
    manifests,
    target,
)

INT8: dict[str, Any] = {
    "numerics__k": "int8", "numerics__v": "int8", "numerics__scheme": "per_token_head_symmetric",
    "numerics__scale": "float16",
}  # fmt: skip


def code(verdict: Verdict | None) -> Code | None:
    return verdict.code if isinstance(verdict, Reject) else None


def steps(verdict: Verdict) -> tuple[Step, ...]:
    assert isinstance(verdict, Convert), verdict
    return verdict.steps


# --- the manifest, field by field ---------------------------------------------------------------------------------------

# What one changed field of the producer's manifest does at a draft that holds the sample: a code, or the steps.
DRAFT_ANSWERS: dict[str, tuple[dict[str, Any], Code | tuple[Step, ...]]] = {
    "version": ({}, ()),  # another version cannot be built or decoded, see test_manifest
    "endian": ({}, ()),
    "lineage": ({"lineage": ("cast(k,float32,float16)",), "exactness": "approximate"}, ()),
    "exactness": ({"exactness": "same_function"}, ()),
    "role": ({"role": "draft_to_target"}, Code.ROLE),
    "identity.model": ({"identity__model": "another name"}, ()),
    "identity.weights": ({"identity__weights": OTHER}, Code.WEIGHTS),
    "identity.adapter": ({"identity__adapter": OTHER}, Code.ADAPTER),
    "identity.tokenizer": ({"identity__tokenizer": OTHER}, Code.TOKENIZER),
    "identity.compute": ({"identity__compute": "6" * 64}, ()),
    "geometry.first_layer": ({"geometry__first_layer": 1}, Code.LAYERS),
    "geometry.layers": ({"geometry__layers": 3}, Code.LAYERS),
    "geometry.kv_heads": ({"geometry__kv_heads": 3}, Code.KV_HEADS),
    "geometry.first_head": ({"geometry__first_head": 1, "geometry__heads": 1}, Code.HEADS),
    "geometry.heads": ({"geometry__heads": 1}, Code.HEADS),
    "geometry.head_dim": ({"geometry__head_dim": 64}, Code.HEAD_DIM),
    "geometry.head_dim_v": ({"geometry__head_dim_v": 64}, Code.HEAD_DIM),
    "geometry.block_tokens": ({"geometry__block_tokens": 16}, (Reblock(16, 0),)),
    "numerics.k": ({"numerics__k": "bfloat16"}, (Cast("k", "bfloat16", "float32"),)),
    "numerics.v": ({"numerics__v": "float16"}, (Cast("v", "float16", "float32"),)),
    "numerics.scheme": (
        INT8,
        (
            Dequantise("k", "int8", "float32", "per_token_head_symmetric"),
            Dequantise("v", "int8", "float32", "per_token_head_symmetric"),
        ),
    ),
    "numerics.scale": (
        {**INT8, "numerics__scale": "float32", "numerics__k": "float32"},
        (Dequantise("v", "int8", "float32", "per_token_head_symmetric"),),
    ),
    "layout.order": ({"layout__order": "NHD"}, (Reorder("NHD", "HND"),)),
    "layout.packing": ({"layout__packing": "k_transposed"}, (Repack("k_transposed", "token_major"),)),
    "rope.applied": ({"rope__applied": False}, Code.ROPE),
    "rope.style": ({"rope__style": "interleaved"}, Code.ROPE),
    "rope.rotary_dim": ({"rope__rotary_dim": 16}, Code.ROPE),
    "rope.theta": ({"rope__theta": "500000"}, Code.ROPE),
    "rope.scaling": ({"rope__scaling": OTHER}, Code.ROPE),
    "attention.window": ({"attention__window": 4096}, Code.ATTENTION),
    "attention.sinks": ({"attention__sinks": 4}, Code.ATTENTION),
    "attention.softcap": ({"attention__softcap": "50"}, Code.ATTENTION),
}
# At a target everything is refused but another name, layout or block size of the very same numbers.
TARGET_ANSWERS: dict[str, Code | tuple[Step, ...]] = {
    "lineage": Code.EXACTNESS,
    "exactness": Code.EXACTNESS,
    "identity.compute": Code.COMPUTE,
    "numerics.k": Code.NUMERICS,
    "numerics.v": Code.NUMERICS,
    "numerics.scheme": Code.NUMERICS,
    "numerics.scale": Code.NUMERICS,
    "role": Code.ROLE,
}


def test_every_field_has_an_answer() -> None:
    parts = {name: getattr(manifest(), name) for name in Manifest.__struct_fields__}
    names = {
        name if not isinstance(part, msgspec.Struct) else f"{name}.{field}"
        for name, part in parts.items()
        for field in (part.__struct_fields__ if isinstance(part, msgspec.Struct) else ("",))
    }
    assert names == set(DRAFT_ANSWERS)


@pytest.mark.parametrize("field", DRAFT_ANSWERS)
def test_draft_receives(field: str) -> None:
    changes, answer = DRAFT_ANSWERS[field]
    offered = manifest(**changes)
    verdict = check_manifest(offered, draft())
    if isinstance(answer, Code):
        assert code(verdict) is answer
        assert isinstance(verdict, Reject)
        assert verdict.field.split(".")[0] == field.split(".")[0]
        assert verdict.got != verdict.want
        return
    assert (steps(verdict) if answer else code(verdict)) == (answer or None)
    assert isinstance(verdict, Accept | Convert)
    holds = draft().holds
    assert (verdict.result.geometry, verdict.result.numerics, verdict.result.layout) == (
        holds.geometry, holds.numerics, holds.layout,
    )  # fmt: skip
    assert verdict.result.identity == offered.identity
    lossy = tuple(str(step) for step in answer if step.lossy)
    assert verdict.result.lineage == offered.lineage + lossy
    assert verdict.result.exactness == ("approximate" if lossy else offered.exactness)


@pytest.mark.parametrize("field", DRAFT_ANSWERS)
@pytest.mark.parametrize("role", ["draft_to_target", "migrate"])
def test_target_receives(field: str, role: str) -> None:
    changes, at_draft = DRAFT_ANSWERS[field]
    answer = TARGET_ANSWERS.get(field, at_draft)
    verdict = check_manifest(
        manifest(**{"role": role, **changes, **({"role": "target_to_draft"} if field == "role" else {})}), target()
    )
    if isinstance(answer, Code):
        assert code(verdict) is answer
    else:
        assert (steps(verdict) if answer else code(verdict)) == (answer or None)
        assert isinstance(verdict, Accept | Convert)
        assert verdict.result.exactness == "bit_exact"


# --- policies ------------------------------------------------------------------------------------------------------------


def test_source_of_the_draft() -> None:
    assert isinstance(check_manifest(manifest(), draft()), Accept)
    unknown = replace(draft(), source_weights="")
    assert code(check_manifest(manifest(), unknown)) is Code.SOURCE_UNKNOWN
    # what a draft computed is not what its source computed
    assert code(check_manifest(manifest(identity__weights=DRAFT_WEIGHTS), draft())) is Code.WEIGHTS


def test_draft_to_draft() -> None:
    offered = manifest(role="migrate", identity__weights=DRAFT_WEIGHTS, exactness="approximate")
    assert isinstance(check_manifest(offered, draft()), Accept)
    assert code(check_manifest(manifest(role="migrate"), draft())) is Code.WEIGHTS  # the target's KV is not its own


def test_draft_to_target_only_bit_exact_and_equal() -> None:
    assert isinstance(check_manifest(manifest(role="draft_to_target"), target()), Accept)
    for changes, want in (
        ({"exactness": "same_function"}, Code.EXACTNESS),
        ({"exactness": "approximate"}, Code.EXACTNESS),
        ({"identity__compute": OTHER}, Code.COMPUTE),
        ({"identity__weights": DRAFT_WEIGHTS}, Code.WEIGHTS),
    ):
        assert code(check_manifest(manifest(role="draft_to_target", **changes), target())) is want
    # the same function in another precision, honestly described, is refused although the cast would lose nothing
    other = manifest(role="draft_to_target", numerics__k="bfloat16", numerics__v="bfloat16")
    assert code(check_manifest(other, target())) is Code.NUMERICS


def test_lossy_conversions_are_said() -> None:
    verdict = check_manifest(manifest(), draft(numerics__k="bfloat16", numerics__v="bfloat16"))
    assert steps(verdict) == (Cast("k", "float32", "bfloat16"), Cast("v", "float32", "bfloat16"))
    assert isinstance(verdict, Convert)
    assert verdict.result.exactness == "approximate"
    assert verdict.result.lineage == ("cast(k,float32,bfloat16)", "cast(v,float32,bfloat16)")
    assert Manifest.decode(verdict.result.encode()) == verdict.result


def test_double_quantisation() -> None:
    assert isinstance(check_manifest(manifest(**INT8), draft(**INT8)), Accept)
    once = check_manifest(manifest(), draft(**INT8))
    assert isinstance(once, Convert)
    assert [type(step) for step in once.steps] == [Quantise, Quantise]
    # the result again, after somebody made floats of it: quantising those would round twice
    back = check_manifest(once.result, draft())
    assert isinstance(back, Convert)
    assert len(back.result.lineage) == 4
    for offered, receiver, field in (
        (back.result, draft(**INT8), "lineage"),
        (manifest(**INT8), draft(**{**INT8, "numerics__k": "int4"}), "numerics.k"),
        (manifest(**INT8), draft(**{**INT8, "numerics__scale": "float32"}), "numerics.scale"),
    ):
        verdict = check_manifest(offered, receiver)
        assert code(verdict) is Code.DOUBLE_QUANTISATION
        assert isinstance(verdict, Reject)
        assert verdict.field == field


def test_lineage_is_bounded() -> None:
    many = manifest(lineage=("cast(k,float32,float16)",) * MAX_LINEAGE, exactness="approximate")
    assert isinstance(check_manifest(many, draft()), Accept)
    assert code(check_manifest(many, draft(numerics__k="float16"))) is Code.LINEAGE


@pytest.mark.parametrize(
    "field", [name for name, (_, answer) in DRAFT_ANSWERS.items() if isinstance(answer, tuple) and answer]
)
def test_only_conversions_the_receiver_has(field: str) -> None:
    changes, answer = DRAFT_ANSWERS[field]
    assert isinstance(answer, tuple)
    able = replace(draft(), convertible=ALL_STEPS - {answer[-1].name})
    assert code(check_manifest(manifest(**changes), able)) is Code.CANNOT_CONVERT
    assert (
        code(check_manifest(manifest(**changes), Local("draft", draft().holds, draft().source_weights)))
        is Code.CANNOT_CONVERT
    )


def test_slices() -> None:
    offered = manifest(geometry__layers=8, geometry__kv_heads=4, geometry__heads=4)
    wanted = draft(geometry__first_layer=2, geometry__layers=3, geometry__kv_heads=4, geometry__first_head=2)
    assert steps(check_manifest(offered, wanted)) == (SelectLayers(2, 3), SelectHeads(2, 2))


def test_opaque_moves_whole_or_not_at_all() -> None:
    opaque: dict[str, Any] = {"layout__packing": "opaque:neon", "geometry__block_tokens": 32}
    assert isinstance(check_manifest(manifest(**opaque), draft(**opaque)), Accept)
    assert steps(check_manifest(manifest(**opaque), draft(**opaque, geometry__layers=2))) == (SelectLayers(0, 2),)
    for changes in (
        {"layout__packing": "token_major"},
        {"layout__packing": "opaque:rvv"},
        {"layout__order": "NHD"},
        {"geometry__block_tokens": 64},
        {"geometry__heads": 1},
        {"numerics__k": "float16"},
    ):
        assert code(check_manifest(manifest(**opaque), draft(**{**opaque, **changes}))) is Code.OPAQUE
        assert code(check_manifest(manifest(**{**opaque, **changes}), draft(**opaque))) in (Code.OPAQUE, Code.HEADS)


def applied(step: Step, state: dict[str, Any]) -> None:
    """What a step does to a description, refusing one that does not find what it says it finds."""
    match step:
        case SelectLayers(first, layers):
            state |= {"first_layer": first, "layers": layers}
        case SelectHeads(first, heads):
            state |= {"first_head": first, "heads": heads}
        case Repack(source, wanted):
            assert state["packing"] == source != wanted
            assert "token_major" in (source, wanted)
            state["packing"] = wanted
        case Reblock(source, wanted):
            assert (state["block_tokens"], state["packing"]) == (source, "token_major")
            state["block_tokens"] = wanted
        case Reorder(source, wanted):
            assert (state["order"], state["packing"]) == (source, "token_major")
            state["order"] = wanted
        case Dequantise(tensor, source, wanted) | Cast(tensor, source, wanted) | Quantise(tensor, source, wanted):
            assert (state[tensor], state["packing"]) == (source, "token_major")
            assert (source in QUANTISED, wanted in QUANTISED) == {
                Dequantise: (True, False), Cast: (False, False), Quantise: (False, True),
            }[type(step)]  # fmt: skip
            state[tensor] = wanted


def description(one: Manifest) -> dict[str, Any]:
    geometry, numerics, layout = (msgspec.structs.asdict(part) for part in (one.geometry, one.numerics, one.layout))
    sizes = {name: geometry[name] for name in ("first_layer", "layers", "first_head", "heads", "block_tokens")}
    return {**sizes, "k": numerics["k"], "v": numerics["v"], **layout}


@given(manifests(), manifests())
def test_steps_lead_there(source: Manifest, wanted: Manifest) -> None:
    try:
        planned = plan_steps(source, wanted)
    except Refused as error:
        assert error.code in (Code.DOUBLE_QUANTISATION, Code.OPAQUE)  # noqa: PT017
        return
    state = description(source)
    for step in planned:
        applied(step, state)
    assert state == description(wanted)
    assert len({str(step) for step in planned}) == len(planned)
    assert plan_steps(source, source) == ()
