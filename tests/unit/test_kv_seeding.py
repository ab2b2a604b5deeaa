"""Drafts that start from the target's KV: nothing is read twice, nothing wrong is ever taken, whatever is lost on the way."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.controller import Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Sampling
from deployments.channel.inprocess import InProcessChannel
from deployments.draft.engine import DraftEngine
from deployments.draft.kv_intake import TAKEN
from deployments.kv import INLINE, SHARED_MEMORY
from deployments.target.kv_export import KvExport
from deployments.target.rounds import DraftRounds
from deployments.target.sequence import DraftKnows, Running
from tests.unit.draft_fakes import VOCAB, FakeModel, check_kv, engine, opening, step
from tests.unit.kv_fakes import export, intake, manifest

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LINKS = [SHARED_MEMORY, INLINE]

Make = Callable[..., tuple[KvExport, FakeModel, DraftEngine]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[KvExport] = []

    def both(
        link: str, shown: Any = None, holds: Any = None, sequences: Any = None, **more: Any
    ) -> tuple[KvExport, FakeModel, DraftEngine]:
        sending = export({"a": PROMPT} if sequences is None else sequences, shown=shown, **more)
        made.append(sending)
        model = FakeModel(context=256)
        taking = intake(model, holds)
        taking.meet({"manifest": sending.manifest.encode(), "arena": sending.arena})
        sending.connect({"d": link})
        return sending, model, engine(model, kv=taking)

    yield both
    for sending in made:
        sending.close()


@pytest.mark.parametrize("link", LINKS)
def test_a_prompt_is_not_read_twice(make: Make, link: str) -> None:
    sending, model, drafter = make(link)
    reference = sending.export("d", "a", PROMPT[:-1], 0, "")
    draft = step(drafter, [opening("a", PROMPT, 3, kv=reference)]).drafts[0]
    assert drafter.stats()[TAKEN] == 1
    assert model.calls[0] == ("write_kv", len(PROMPT) - 1)
    assert {kind for kind, _ in model.calls} == {"write_kv", "decode"}
    assert draft.tokens == step(engine(FakeModel()), [opening("a", PROMPT, 3)]).drafts[0].tokens
    assert draft.have == len(PROMPT) + 2  # the last guess has none yet


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"weights": "00" * 32}, "weights_mismatch"),
        ({"adapter": "11" * 32}, "adapter_mismatch"),
        ({"tokenizer": "22" * 32}, "tokenizer_mismatch"),
        ({"theta": "500000"}, "rope_mismatch"),
        ({"scaling": "33" * 32}, "rope_mismatch"),
        ({"role": "draft_to_target"}, "role_not_accepted"),
    ],
)
def test_another_models_kv_is_refused_when_it_is_met_and_when_it_comes(
    make: Make, link: str, changed: dict[str, str], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    sending, model, drafter = make(link, shown=manifest(**changed))
    assert code in caplog.text
    reference = sending.export("d", "a", PROMPT[:-1], 0, "")
    before = model.kv.copy()
    assert drafter._kv is not None
    session, _ = drafter._store.apply("t", opening("a", PROMPT, 0), 0.0)
    assert session is not None
    assert drafter._kv.take(session, reference) == "kv_refused:not_met"
    assert (model.kv == before).all()
    assert session.computed == 0


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    ("tokens", "start", "tenant", "code"),
    [
        (PROMPT[:-1], 0, "other", "tenant_mismatch"),
        ([9, *PROMPT[1:-1]], 0, "", "prefix_mismatch"),
        (PROMPT[:-1], 2, "", "gap"),
        (PROMPT, 0, "", "not_committed"),
    ],
)
def test_kv_of_other_tokens_or_tenants_is_refused(
    make: Make, link: str, tokens: list[int], start: int, tenant: str, code: str
) -> None:
    sending, model, drafter = make(link, sequences={"a": tokens})
    reference = sending.export("d", "a", tokens, start, tenant)
    assert drafter._kv is not None
    session, _ = drafter._store.apply("t", opening("a", PROMPT, 0), 0.0)
    assert session is not None
    before = model.kv.copy()
    assert drafter._kv.take(session, reference) == f"kv_refused:{code}"
    assert (model.kv == before).all()


@pytest.mark.parametrize("link", LINKS)
def test_damaged_references_are_refused_and_the_draft_reads_itself(make: Make, link: str) -> None:
    sending, _, _ = make(link)
    reference = sending.export("d", "a", PROMPT[:-1], 0, "")
    plain = step(engine(FakeModel(context=256)), [opening("a", PROMPT, 3)]).drafts[0].tokens
    for at in range(0, len(reference), max(1, len(reference) // 60)):
        _, model, drafter = make(link)
        damaged = bytearray(reference)
        damaged[at] ^= 0x15
        draft = step(drafter, [opening("a", PROMPT, 3, kv=bytes(damaged))]).drafts[0]
        assert draft.tokens == plain, at  # every call checks that the slot holds the session's own tokens
        assert drafter.stats().get(TAKEN, 0) == 0 or ("prefill", len(PROMPT)) not in model.calls


def test_a_lease_that_ended_is_refused(make: Make) -> None:
    now = 10**18
    faults = replace(FaultPolicy(), kv_lease_s=1.0)
    sending, _, drafter = make(SHARED_MEMORY, faults=faults, clock_ns=lambda: now)
    reference = sending.export("d", "a", PROMPT[:-1], 0, "")
    step(drafter, [opening("a", PROMPT, 3, kv=reference)])
    assert drafter.stats().get(TAKEN, 0) == 1  # a deadline in the far future of the real clock
    now = 0
    reference = sending.export("d", "a", PROMPT[:-1], 0, "")
    answer = step(drafter, [opening("b", PROMPT, 3, kv=reference)], number=2)
    assert drafter.stats()["kv_refused:lease_expired"] == 1
    assert answer.drafts[0].tokens


def test_what_does_not_fit_is_counted_and_read(make: Make) -> None:
    sending, _, _ = make(INLINE, faults=replace(FaultPolicy(), kv_inline_bytes=64))
    assert sending.export("d", "a", PROMPT[:-1], 0, "") == b""
    assert sending.counts["too_large"] == 1
    sending, _, _ = make(SHARED_MEMORY, memory_bytes=1)
    assert sending.export("d", "a", list(range(40)) * 40, 0, "") == b""
    assert sum(sending.counts.values()) == 1
    assert sending.export("d", "nobody", PROMPT, 0, "") == b""
    assert sending.counts["no_blocks"] == 1


def test_a_message_holds_so_much_kv_and_the_next_one_again(make: Make) -> None:
    sequences = {"a": PROMPT, "b": PROMPT}
    sending, _, _ = make(INLINE, sequences=sequences, faults=replace(FaultPolicy(), kv_inline_bytes=500))
    first = sending.export("d", "a", PROMPT[:-1], 0, "")
    assert 250 < len(first) <= 500
    assert sending.export("d", "b", PROMPT[:-1], 0, "") == b""
    assert sending.counts["message_full"] == 1
    sending.next_step()
    assert len(sending.export("d", "b", PROMPT[:-1], 0, "")) == len(first)


def test_what_a_draft_knows() -> None:
    tokens = list(range(100))
    slice_of = lambda start, stop: tokens[start:stop]  # noqa: E731
    knows = DraftKnows()
    assert knows.after(slice_of, 10) == 0
    knows.sent(10)
    assert knows.after(slice_of, 10) == 9
    assert knows.after(slice_of, 14) == 9  # four tokens of another source
    knows.answered(10, [10, 11, 99], 12)
    assert knows.after(slice_of, 13) == 12  # two of its own were right, the third token was the target's
    knows.answered(10, [], 7)
    assert knows.after(slice_of, 13) == 7  # it was still reading


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("refresh", [False, True])
@given(
    faults=st.lists(st.sampled_from(["ok", "ok", "ok", "lose", "mute", "late", "hold"]), min_size=1, max_size=10),
    own=st.lists(st.integers(1, 6), min_size=15, max_size=15),
    wants=st.lists(st.integers(0, 4), min_size=15, max_size=15),
)
@settings(max_examples=25, deadline=None)
def test_any_loss_delay_or_reordering_keeps_kv_right(
    link: str, refresh: bool, faults: list[str], own: list[int], wants: list[int]
) -> None:
    """The target commits what it likes; every model call checks that the slot holds the tokens of its line."""
    tokens = {name: list(PROMPT) for name in ("a", "b")}
    sending = export(tokens, refresh=refresh)
    model = FakeModel(context=256)
    taking = intake(model)
    taking.meet({"manifest": sending.manifest.encode(), "arena": sending.arena})
    drafter = engine(model, kv=taking)
    quick = FaultPolicy(draft_deadline_s=0.001, answer_slack_s=0.0, circuit_failures=1000)
    rounds = DraftRounds("t", VOCAB, quick, Unconditional())
    rounds.set_channels({"d": InProcessChannel(drafter, fault=lambda number: faults[number % len(faults)])})
    sending.connect({"d": link})
    rounds.send_kv(sending)
    try:
        for name in tokens:
            rounds.begin(name, name, PROMPT, True)
        rounds.announce([(name, PROMPT, Sampling(0.0, 1), 100) for name in tokens])
        drafts: dict[str, list[int]] = {}
        for index, (count, want) in enumerate(zip(own, wants, strict=True)):
            running = []
            for name, known in tokens.items():
                new = [*drafts.get(name, [])[: count - 1], (7 * index + len(known)) % VOCAB]
                known += new
                running.append(Running(name, new, len(known), lambda a, b, t=known: t[a:b], want, Sampling(0.0, 1)))
            drafts = rounds.round(running)
            drafter.check_integrity()
            check_kv(drafter)
            drafter.idle(0.001)
        if faults == ["ok"] and any(wants):
            assert drafter.stats()["kv_taken"]
            assert not drafter.stats().get("prefills", 0)
    finally:
        sending.close()
