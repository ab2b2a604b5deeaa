"""A draft leaves: its sessions go on at another one without reading anything twice, or are read there as if it never was."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deployments.chain.protocol import Commit
from deployments.draft.engine import DraftEngine
from deployments.draft.migration import MIGRATED, MIGRATION_REFUSED, SHELVED, Migration
from hw.kv.codes import Refused
from hw.kv.manifest import Manifest
from tests.unit.draft_fakes import FakeModel, check_kv, engine, opening, step
from tests.unit.kv_fakes import export, intake, manifest

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


class Readable(FakeModel):
    """Its KV is the token, twice."""

    def read_kv(self, slot: int, start: int, stop: int) -> npt.NDArray[Any]:
        tokens = self.kv[slot, start:stop].astype(np.float32)
        return np.broadcast_to(tokens[None, None, :, None], (2, 1, stop - start, 2))


def draft(holds: Manifest | None = None, **more: Any) -> tuple[Readable, DraftEngine]:
    model = Readable(context=256, slots=more.pop("slots", 4))
    arguments = {"shelf_bytes": more.pop("shelf_bytes", 1 << 20)}
    return model, engine(model, migration=Migration(model, holds or manifest("draft_to_target"), **arguments), **more)


def left(*sessions: tuple[str, list[int]], tenant: str = "", holds: Manifest | None = None) -> list[bytes]:
    """What a draft hands over that holds these sessions, the last one used last."""
    _, leaving = draft(holds, slots=8)
    for number, (name, tokens) in enumerate(sessions):
        step(leaving, [opening(name, tokens, 3, tenant=tenant)], number=number)
    records = leaving.export_sessions()
    assert len(records) == len(sessions)
    return records


def alone(tokens: list[int]) -> list[int]:
    return step(engine(FakeModel(context=256)), [opening("x", tokens, 3)]).drafts[0].tokens


@pytest.mark.parametrize("more", [0, 1, 5])
def test_what_a_draft_has_read_is_not_read_again(more: int) -> None:
    model, staying = draft()
    staying.adopt(left(("a", PROMPT)))
    tokens = PROMPT + [7] * more
    answer = step(staying, [opening("a", tokens, 3)]).drafts[0]
    assert answer.tokens == alone(tokens)
    assert staying.stats()[MIGRATED] == 1
    assert staying.stats()["migration_waiting"] == 0
    read = sum(count for kind, count in model.calls if kind == "prefill")
    assert model.calls[0] == ("write_kv", len(PROMPT) - 1)
    assert read <= more + 1


def test_only_committed_positions_are_handed_over() -> None:
    _, leaving = draft()
    step(leaving, [opening("a", PROMPT, 3)])
    assert leaving._store.sessions["t", "a"].computed > len(PROMPT)
    model, staying = draft()
    staying.adopt(leaving.export_sessions())
    other = [*PROMPT[:-1], (PROMPT[-1] + 1) % 10]  # the target went on otherwise after all that was handed over
    assert step(staying, [opening("b", other, 3)]).drafts[0].tokens == alone(other)
    assert staying.stats()[MIGRATED] == 1
    assert model.calls[0] == ("write_kv", len(PROMPT) - 1)


def test_sessions_that_hold_nothing_hand_nothing_over() -> None:
    _, leaving = draft()
    step(leaving, [opening("a", PROMPT, 0), opening("b", [1], 1)])
    assert leaving.export_sessions() == []
    assert engine().export_sessions() == []
    engine().adopt([b"x"])


def test_the_longest_record_is_taken_and_only_once() -> None:
    model, staying = draft()
    staying.adopt(left(("a", PROMPT[:9]), ("b", PROMPT), ("c", PROMPT[:13])))
    step(staying, [opening("a", PROMPT, 3)])
    assert model.calls[0] == ("write_kv", len(PROMPT) - 1)
    step(staying, [opening("b", PROMPT, 3)], number=2)
    assert [call for call in model.calls if call[0] == "write_kv"][1] == ("write_kv", 12)
    assert staying.stats()["migration_waiting"] == 1


def test_kv_of_the_target_is_preferred() -> None:
    sending = export({"a": PROMPT})
    try:
        model = Readable(context=256)
        holds = manifest("draft_to_target")
        taking = intake(model, holds)
        taking.meet({"manifest": sending.manifest.encode(), "arena": sending.arena})
        sending.connect({"d": "inline"})
        staying = engine(model, kv=taking, migration=Migration(model, holds, shelf_bytes=1 << 20))
        staying.adopt(left(("a", PROMPT)))
        step(staying, [opening("a", PROMPT, 3, kv=sending.export("d", "a", PROMPT[:-1], 0, ""))])
        assert staying.stats()["kv_taken"] == 1
        assert staying.stats().get(MIGRATED, 0) == 0
    finally:
        sending.close()


# --- what is not taken ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 39), min_size=2, max_size=60),
    st.lists(st.integers(0, 39), min_size=1, max_size=60),
    st.integers(0, 60),
    st.sampled_from(["", "other"]),
)
def test_only_kv_of_the_same_tokens_and_tenant_is_taken(
    had: list[int], then: list[int], shared: int, tenant: str
) -> None:
    _, staying = draft()
    staying.adopt(left(("a", had)))
    tokens = had[:shared] + then
    answer = step(staying, [opening("a", tokens, 3, tenant=tenant)]).drafts[0]
    assert answer.tokens == alone(tokens)  # each call checked that the slot holds the session's own tokens
    covered = len(had) - 1
    fits = not tenant and tokens[:covered] == had[:covered] and covered < len(tokens)
    assert staying.stats().get(MIGRATED, 0) == fits
    check_kv(staying)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "00" * 32},
        {"adapter": "11" * 32},
        {"tokenizer": "22" * 32},
        {"compute": "33" * 32},
        {"theta": "500000"},
        {"scaling": "44" * 32},
    ],
)
def test_kv_of_a_draft_that_computes_otherwise_is_refused(changed: dict[str, str]) -> None:
    model, staying = draft()
    before = model.kv.copy()
    staying.adopt(left(("a", PROMPT), holds=manifest("draft_to_target", **changed)))
    stats = staying.stats()
    assert stats[MIGRATION_REFUSED + "manifest_digest_mismatch"] == 1
    assert stats["migration_waiting"] == 0
    assert (model.kv == before).all()
    assert step(staying, [opening("a", PROMPT, 3)]).drafts[0].tokens == alone(PROMPT)


def test_every_damaged_or_cut_record_is_refused_and_changes_nothing() -> None:
    (record,) = left(("a", PROMPT))
    model, staying = draft()
    before = model.kv.copy()
    tried = 0
    for at in range(len(record)):
        damaged = bytearray(record)
        damaged[at] ^= 0x15
        staying.adopt([bytes(damaged), record[:at]])
        tried += 2
    staying.adopt([record + b"\0"])
    refused = {name: count for name, count in staying.stats().items() if name.startswith(MIGRATION_REFUSED)}
    assert sum(refused.values()) == tried + 1
    assert staying.stats()["migration_waiting"] == 0
    assert SHELVED not in staying.stats()
    assert {MIGRATION_REFUSED + code for code in ("bad_magic", "header_checksum", "row_digest", "truncated")} <= set(
        refused
    )
    assert (model.kv == before).all()


def test_a_shelf_keeps_what_was_used_last_and_refuses_what_is_larger_than_itself() -> None:
    sessions = [(f"s{n}", [n, *PROMPT]) for n in range(6)]
    records = left(*sessions)
    _, staying = draft(shelf_bytes=4 * 4096, slots=8)  # a tenant may fill half of it, a record takes a page
    staying.adopt(records)
    assert staying.stats()["migration_waiting"] == 2
    for number, (name, tokens) in enumerate(sessions):
        step(staying, [opening(name, tokens, 3)], number=number)
        assert staying.stats().get(MIGRATED, 0) == max(0, number - 3)
    _, small = draft(shelf_bytes=4096)
    small.adopt(left(("a", [*range(40)] * 6 + [1] * 12)))
    assert small.stats()[MIGRATION_REFUSED + "too_large"] == 1


def test_a_session_that_goes_on_is_not_looked_up() -> None:
    _, staying = draft()
    step(staying, [opening("a", PROMPT[:5], 3)])
    staying.adopt(left(("a", PROMPT)))
    step(staying, [Commit("a", 0, len(PROMPT), PROMPT[5:], 3)], number=2)
    assert MIGRATED not in staying.stats()


@pytest.mark.parametrize(
    "part",
    [
        {"geometry": {"block_tokens": 16}},
        {"layout": {"order": "NHD"}},
        {"numerics": {"k": "bfloat16", "v": "bfloat16"}},
    ],
)
def test_kv_that_is_not_kept_as_the_records_say_is_refused_at_once(part: dict[str, dict[str, Any]]) -> None:
    holds = manifest("draft_to_target")
    for name, changes in part.items():
        holds = replace(holds, **{name: replace(getattr(holds, name), **changes)})
    with pytest.raises(Refused, match="cannot_convert"):
        Migration(Readable(), holds)
