"""The connector beside the scheduler: which prompts it exports, which it loads, and that each is asked for once."""

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.kv import salt_of
from deployments.target.kv_connector.prompts import FIELD, HandOff, Place
from deployments.target.kv_connector.scheduler_side import SchedulerSide
from tests.unit.kv.connector_samples import PROMPT, subject

PLACES = (Place("0" * 32, "tcp://127.0.0.1:5000"),)
EXPORT = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def side(**changes: Any) -> SchedulerSide:
    facts: dict[str, Any] = {"producer": True, "consumer": True, "ranks": 1, "hosts": frozenset({"127.0.0.1"})}
    return SchedulerSide(**{**facts, "places": PLACES, **changes})


def request(params: Any, name: str = "r", tokens: list[int] = PROMPT, **changes: Any) -> Any:
    facts = {
        "request_id": name,
        "kv_transfer_params": params,
        "prompt_token_ids": tokens,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "pooling_params": None,
        "num_computed_tokens": 0,
    }
    return SimpleNamespace(**{**facts, **changes})


def offer(tokens: list[int] = PROMPT, tenant: str = "", **changes: Any) -> dict[str, Any]:
    named = {"version": 1, "prefix": subject(tokens, tenant).prefix_hash.hex(), "tokens": len(tokens), "places": PLACES}
    return HandOff(**{**named, **changes}).params()


def step(counts: dict[str, int], blocks: dict[str, list[int]] | None = None) -> Any:
    state = SimpleNamespace(block_ids={name: (ids,) for name, ids in (blocks or {}).items()})
    return SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=counts)


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


# --- exports --------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_exported_once_in_the_step_that_completes_it() -> None:
    scheduler = side()
    asked = request(EXPORT)
    scheduler.added(asked)
    assert not scheduler.plan(step({"r": 32}, {"r": [4]})).exports
    asked.num_computed_tokens = 32
    assert not scheduler.plan(step({"r": 32}, {"r": [4, 9]})).exports
    asked.num_computed_tokens = 64
    (export,) = scheduler.plan(step({"r": 6}, {"r": [4, 9, 1]})).exports
    assert (export.request, export.blocks, export.subject) == ("r", (4, 9, 1), subject())
    asked.num_computed_tokens = 70
    assert not scheduler.plan(step({"r": 1})).exports
    params = scheduler.finished(asked)
    assert params is not None
    assert HandOff.of(params) == HandOff(1, subject().prefix_hash.hex(), len(PROMPT), PLACES)
    assert scheduler.finished(asked) is None


def test_blocks_of_a_preempted_prompt_are_those_it_has_in_the_end() -> None:
    scheduler = side()
    asked = request(EXPORT)
    scheduler.added(asked)
    scheduler.plan(step({"r": 64}, {"r": [4, 9]}))
    scheduler.plan(step({}))  # preempted: its blocks are somebody else's now
    scheduler.plan(step({"r": 64}, {"r": [2, 3]}))
    asked.num_computed_tokens = 64
    (export,) = scheduler.plan(step({"r": 6}, {"r": [2, 3, 5]})).exports
    assert export.blocks == (2, 3, 5)


def test_a_prompt_aborted_before_its_end_is_nowhere() -> None:
    scheduler = side()
    asked = request(EXPORT)
    scheduler.added(asked)
    scheduler.plan(step({"r": 32}, {"r": [4]}))
    assert scheduler.finished(asked) is None
    assert scheduler.counts == {"export_refused:not_read": 1}
    assert not scheduler.plan(step({"r": 38}, {"r": [4, 9, 1]})).exports


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_request": object()}, "adapter"),
        ({"mm_features": [object()]}, "not_tokens"),
        ({"prompt_embeds": object()}, "not_tokens"),
        ({"prompt_token_ids": None}, "not_tokens"),
        ({"pooling_params": object()}, "pooling"),
    ],
)
def test_kv_of_more_than_tokens_is_neither_exported_nor_loaded(changes: dict[str, Any], reason: str) -> None:
    scheduler = side()
    for params in (EXPORT, offer()):
        asked = request(params, **changes)
        scheduler.added(asked)
        assert scheduler.matched(asked, 0) == (0, False)
        assert not scheduler.plan(step({"r": 70}, {"r": [1, 2, 3]})).exports
        assert scheduler.finished(asked) is None
    assert scheduler.counts == {f"export_refused:{reason}": 1, f"import_refused:{reason}": 1}


def test_roles_decide() -> None:
    consumer, producer = side(producer=False), side(consumer=False)
    consumer.added(request(EXPORT))
    assert not consumer.plan(step({"r": 70}, {"r": [1, 2, 3]})).exports
    asked = request(offer())
    producer.added(asked)
    assert producer.matched(asked, 0) == (0, False)


def test_a_request_that_is_not_handed_over_leaves_nothing() -> None:
    scheduler = side()
    for params in (None, {}, {"other": 1}, {"do_remote_decode": False, "do_remote_prefill": False}):
        asked = request(params)
        scheduler.added(asked)
        assert scheduler.matched(asked, 0) == (0, False)
        scheduler.allocated(asked, blocks(1, 2, 3), 0)
        meta = scheduler.plan(step({"r": 70}, {"r": [1, 2, 3]}))
        assert not meta.exports
        assert not meta.loads
        assert scheduler.finished(asked) is None
    assert not scheduler.counts


# --- loads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [0, 32, 64])
def test_what_is_not_cached_is_loaded_in_the_background_and_asked_for_once(local: int) -> None:
    scheduler = side()
    asked = request(offer(tenant="t"), cache_salt="t")
    scheduler.added(asked)
    assert scheduler.matched(asked, local) == scheduler.matched(asked, local) == (70 - local, True)
    scheduler.allocated(asked, blocks(8, 6, 7), 70 - local)
    (load,) = scheduler.plan(step({})).loads
    assert (load.start, load.blocks, load.places, load.salt) == (local, (8, 6, 7), PLACES, salt_of("t"))
    assert load.subject == subject(PROMPT, "t")
    assert not scheduler.plan(step({})).loads
    scheduler.allocated(asked, blocks(8, 6, 7), 0)  # once more when the load is over
    assert not scheduler.plan(step({"r": 1})).loads
    assert scheduler.matched(asked, 0) == (0, False)  # it failed, or the request was preempted: it is computed


def test_nothing_is_loaded_that_is_here_already() -> None:
    scheduler = side()
    asked = request(offer(PROMPT[:32]))
    scheduler.added(asked)
    assert scheduler.matched(asked, 0) == (32, True)
    assert scheduler.matched(asked, 32) == scheduler.matched(asked, 64) == (0, False)


@pytest.mark.parametrize(
    ("params", "changes", "reason"),
    [
        (offer(tenant="a"), {"cache_salt": "b"}, "prefix_mismatch"),
        (offer(tenant="a"), {}, "prefix_mismatch"),
        (offer([1, *PROMPT[1:]]), {}, "prefix_mismatch"),
        (offer([*PROMPT, 5]), {}, "valid_tokens_mismatch"),
        (offer(places=PLACES * 2), {}, "ranks"),
        (offer(places=(Place("0" * 32, "tcp://10.9.9.9:5000"),)), {}, "host_not_allowed"),
        ({"do_remote_prefill": True}, {}, "malformed"),
        ({"do_remote_prefill": True, FIELD: "here"}, {}, "malformed"),
        (offer(version=2), {}, "malformed"),
        ({**offer(), FIELD: {**offer()[FIELD], "more": 1}}, {}, "malformed"),
        ({**offer(), FIELD: {**offer()[FIELD], "prefix": "zz"}}, {}, "malformed"),
        ({**offer(), FIELD: {**offer()[FIELD], "tokens": 0}}, {}, "malformed"),
        ({**offer(), FIELD: {**offer()[FIELD], "places": []}}, {}, "malformed"),
        (
            {**offer(), FIELD: {**offer()[FIELD], "places": [{"epoch": "0" * 32, "address": "ipc:///etc/x:1"}]}},
            {},
            "malformed",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anybody_is_asked(
    params: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    scheduler = side()
    asked = request(params, **changes)
    scheduler.added(asked)
    assert scheduler.counts == {f"import_refused:{reason}": 1}
    assert scheduler.matched(asked, 0) == (0, False)
    assert not scheduler.plan(step({"r": 70})).loads


def test_a_request_aborted_before_it_was_scheduled_is_forgotten() -> None:
    scheduler = side()
    asked = request(offer())
    scheduler.added(asked)
    scheduler.finished(asked)
    assert not scheduler._wanted
    assert scheduler.matched(asked, 0) == (0, False)
