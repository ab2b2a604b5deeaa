"""From one worker's pages to another's: bytes, refusals that change nothing, and loads that are always reported."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.target.kv_connector import imports as imports_module
from deployments.target.kv_connector.exports import Exports
from deployments.target.kv_connector.imports import Imports
from deployments.target.kv_connector.prompts import Load, Place
from deployments.target.kv_connector.settings import Keys
from hw.kv.digests import Algorithm
from hw.kv.manifest import Manifest
from hw.kv.record import Clock, encode_header, parse
from hw.kv.rows import payload_nbytes, plan_rows
from hw.kv.transports.base import Fetched, Stale
from hw.kv.transports.choose import Facts
from hw.kv.vllm_cache import PagedCache
from tests.unit.kv.connector_samples import (
    BLOCK_TOKENS,
    EPOCH,
    PROMPT,
    SETTINGS,
    Crafted,
    changed,
    everything,
    export,
    fetch_record,
    load,
    own_manifest,
    pages,
    resealed,
    subject,
)

REFUSED = "import_refused:"


class Pair:
    """A producer with random pages and a consumer with other ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.keys = Keys.read("")
        self.manifest = own_manifest(str(dtype).removeprefix("torch."))
        self.source, self.target = pages(1, dtype), pages(2, dtype)
        self.exports = Exports(SETTINGS, self.keys, "127.0.0.1", EPOCH)
        self.exports.open(self.source, self.manifest)
        self.imports = Imports(SETTINGS, self.keys, 0, BLOCK_TOKENS)
        self.imports.open(self.target, self.manifest)

    def take(self, asked: Load) -> set[int]:
        """Load and wait; blocks that are to be computed."""
        self.imports.start([asked])
        over, bad = wait(self.imports)
        assert over == {asked.request}
        return bad

    def close(self) -> None:
        self.imports.close()
        self.exports.close()


def wait(imports: Imports, ended: set[str] | None = None) -> tuple[set[str], set[int]]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        over, bad = imports.poll(ended or set())
        if over:
            return over, bad
        time.sleep(0.002)
    raise AssertionError("the load was never reported")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def crafted(pair: Pair) -> Iterator[Crafted]:
    made = Crafted(pair.keys)
    yield made
    made.close()


def read(cache: PagedCache, blocks: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    return cache.read(blocks, start, stop)


@pytest.mark.parametrize("link", ["shared_memory", "zeromq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 70])
def test_the_prompt_arrives_as_it_was(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, link: str, tokens: int
) -> None:
    if link == "zeromq":
        monkeypatch.setattr(imports_module, "local_facts", lambda **_: Facts(zeromq=True))
    pair = Pair(dtype)
    prompt = PROMPT[:tokens]
    pair.exports.export(export(prompt))
    assert pair.take(load(pair.exports.place, prompt)) == set()
    got, want = (read(c, b, 0, tokens) for c, b in ((pair.target, (3, 1, 6)), (pair.source, (5, 2, 7))))
    assert torch.equal(got, want)
    rest = tokens % BLOCK_TOKENS
    if rest:  # nothing of an earlier request is left behind the last token
        last = (3, 1, 6)[tokens // BLOCK_TOKENS]
        assert not read(pair.target, (last,), rest, BLOCK_TOKENS).any()
    assert pair.imports.counts["import_tokens"] == tokens
    assert pair.exports.counts["exports"] == 1
    pair.close()


def test_blocks_that_are_shared_already_are_not_written(pair: Pair) -> None:
    before = read(pair.target, (3,), 0, BLOCK_TOKENS)
    pair.exports.export(export())
    assert pair.take(load(pair.exports.place, start=BLOCK_TOKENS)) == set()
    assert torch.equal(read(pair.target, (3,), 0, BLOCK_TOKENS), before)
    got = read(pair.target, (3, 1, 6), BLOCK_TOKENS, len(PROMPT))
    assert torch.equal(got, read(pair.source, (5, 2, 7), BLOCK_TOKENS, len(PROMPT)))


def test_a_prompt_that_was_taken_gives_its_room_back_first(pair: Pair) -> None:
    pair.exports.export(export())
    assert pair.exports.stats()["leases"] == 1
    pair.take(load(pair.exports.place))
    until = time.monotonic() + 5
    while pair.exports.stats()["leases"] and time.monotonic() < until:
        time.sleep(0.005)
    assert pair.exports.stats()["leases"] == 0
    assert pair.exports.stats()["blocks"] == 1  # still there for another one
    pair.exports.check_integrity()


def test_what_does_not_fit_is_not_exported_and_not_held(pair: Pair) -> None:
    for seed in range(60):  # each about 280 KiB of 8 MiB, all of them promised
        pair.exports.export(export([seed, *PROMPT[1:]]))
    counts = pair.exports.counts
    assert counts["exports"] + counts["export_refused:refused_share"] == 60
    assert counts["export_refused:refused_share"] > 0
    pair.exports.check_integrity()


def refusals(pair: Pair, crafted: Crafted) -> dict[str, Callable[[], object]]:
    """Code -> what makes the crafted producer's answer one that is refused with it."""
    pair.exports.export(export())
    of, record = fetch_record(pair.keys, pair.exports.place, subject())
    asked = subject().prefix_hash
    other = "a" * 64

    def put(manifest: Manifest = of, flip: int | None = None, cut: int = 0, **changes: Any) -> None:
        data = resealed(manifest, record, 1, **changes)
        if flip is not None:
            data[flip] ^= 1
        crafted.put(asked, manifest, data[: len(data) - cut])

    return {
        "row_digest": lambda: put(flip=5000),
        "header_checksum": lambda: put(flip=60),
        "bad_magic": lambda: put(flip=0),
        "truncated": lambda: put(cut=64),
        "tenant_mismatch": lambda: put(subject=subject(tenant="somebody")),
        "prefix_mismatch": lambda: put(subject=subject(adapter=other)),
        "valid_tokens_mismatch": lambda: crafted.put(asked, of, shorter(of, record)),
        "adapter_mismatch": lambda: put(changed(of, identity__adapter=other)),
        "weights_mismatch": lambda: put(changed(of, identity__weights=other)),
        "compute_mismatch": lambda: put(changed(of, identity__compute=other)),
        "not_bit_exact": lambda: put(changed(of, exactness="same_function")),
        "role_not_accepted": lambda: put(changed(of, role="target_to_draft")),
        "rope_mismatch": lambda: put(changed(of, rope__theta="20000")),
        "lease_expired": lambda: put(lease_deadline_ns=1),
        "missing_digest": lambda: put(algorithm=Algorithm.NONE),
        "no_lease": lambda: put(clock=Clock.NONE, lease_deadline_ns=0),
        "epoch_mismatch": lambda: put(epoch=b"another epoch..."),
        "manifest_digest_mismatch": lambda: crafted.put(
            asked, changed(of, identity__model="b"), resealed(of, record, 1)
        ),
    }


def shorter(of: Manifest, record: bytes) -> bytes:
    """A record of one token less than the prompt has."""
    covered = subject(PROMPT[:-1])
    rows = plan_rows(of, 0, covered.valid_tokens)
    found = parse(record)
    header = replace(found.header, subject=covered, generation=1)
    return encode_header(header, rows) + bytes(found.payload[: payload_nbytes(rows)])


CODES = [
    "row_digest", "header_checksum", "bad_magic", "truncated", "tenant_mismatch", "prefix_mismatch",
    "valid_tokens_mismatch", "adapter_mismatch", "weights_mismatch", "compute_mismatch", "not_bit_exact",
    "role_not_accepted", "rope_mismatch", "lease_expired", "missing_digest", "no_lease", "epoch_mismatch",
    "manifest_digest_mismatch",
]  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_a_refusal_is_counted_and_changes_no_byte(pair: Pair, crafted: Crafted, code: str) -> None:
    refusals(pair, crafted)[code]()
    before = everything(pair.target)
    assert pair.take(load(crafted.place)) == {3, 1, 6}
    assert pair.imports.counts == {REFUSED + code: 1}
    assert everything(pair.target) == before


def test_a_drafts_kv_is_refused_as_another_computation(pair: Pair, crafted: Crafted) -> None:
    pair.exports.export(export())
    of, record = fetch_record(pair.keys, pair.exports.place, subject())
    drafts = changed(of, role="draft_to_target", exactness="approximate", identity__compute="d" * 64)
    crafted.put(subject().prefix_hash, drafts, resealed(drafts, record, 1))
    before = everything(pair.target)
    assert pair.take(load(crafted.place)) == {3, 1, 6}
    assert pair.imports.counts == {REFUSED + "compute_mismatch": 1}
    assert everything(pair.target) == before


def test_memory_given_to_another_block_before_it_was_read(pair: Pair, crafted: Crafted) -> None:
    pair.exports.export(export())
    of, record = fetch_record(pair.keys, pair.exports.place, subject())
    crafted.put(subject().prefix_hash, of, resealed(of, record, 1))
    for block in list(crafted.store._blocks.values()):
        for number in list(block.leases):
            crafted.store.release(number)
        crafted.store.drop(block.key)
    before = everything(pair.target)
    assert pair.take(load(crafted.place)) == {3, 1, 6}
    assert pair.imports.counts == {REFUSED + "stale_generation": 1}
    assert everything(pair.target) == before


def test_memory_given_to_another_block_while_it_was_copied_leaves_zeros(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.exports.export(export())
    untouched = read(pair.target, (0, 2, 4, 5, 7, 8), 0, 6 * BLOCK_TOKENS)
    checks = iter([None, None])  # after verifying, before writing; then it is gone

    def check(self: Fetched) -> None:
        try:
            next(checks)
        except StopIteration:
            raise Stale("given away") from None

    monkeypatch.setattr(Fetched, "check", check)
    assert pair.take(load(pair.exports.place, start=BLOCK_TOKENS)) == {1, 6}
    assert pair.imports.counts == {REFUSED + "stale_generation": 1}
    assert not read(pair.target, (1, 6), 0, 2 * BLOCK_TOKENS).any()
    assert read(pair.target, (3,), 0, BLOCK_TOKENS).any()
    assert torch.equal(read(pair.target, (0, 2, 4, 5, 7, 8), 0, 6 * BLOCK_TOKENS), untouched)


def test_a_prompt_nobody_exported_and_a_producer_that_is_gone(pair: Pair) -> None:
    place = pair.exports.place
    assert pair.take(load(place)) == {3, 1, 6}
    pair.exports.close()
    gone = Place(place.epoch, place.address)
    first = time.monotonic()
    assert pair.take(load(gone, name="request-2")) == {3, 1, 6}
    waited = time.monotonic() - first
    began = time.monotonic()
    assert pair.take(load(gone, name="request-3")) == {3, 1, 6}  # at once: it is known to be away
    assert time.monotonic() - began < waited
    assert pair.imports.counts == {REFUSED + "missing": 1, REFUSED + "unreachable": 2}
    pair.exports = Exports(SETTINGS, pair.keys, "127.0.0.1", EPOCH)


@pytest.mark.parametrize("knows_the_server", [True, False])
def test_who_does_not_share_the_secret_gets_nothing(pair: Pair, tmp_path: Path, knows_the_server: bool) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 32)
    keys = Keys.read(str(path))
    keys = Keys(pair.keys.server, keys.client) if knows_the_server else keys
    stranger = Imports(SETTINGS, keys, 0, BLOCK_TOKENS)
    stranger.open(pair.target, pair.manifest)
    pair.exports.export(export())
    stranger.start([load(pair.exports.place)])
    assert wait(stranger) == ({"request-1"}, {3, 1, 6})
    assert stranger.counts == {REFUSED + "unreachable": 1}
    assert bool(pair.exports._server.counts["unauthorised"]) == knows_the_server
    stranger.close()


def test_an_aborted_load_is_over_at_once_and_never_written(pair: Pair, crafted: Crafted) -> None:
    pair.exports.export(export())
    before = everything(pair.target)
    pair.imports.start([load(pair.exports.place)])
    assert pair.imports.poll({"request-1", "somebody-else"}) == ({"request-1"}, set())
    assert pair.imports.counts == {REFUSED + "aborted": 1}
    until = time.monotonic() + 20
    while pair.imports._dropped and time.monotonic() < until:
        assert pair.imports.poll(set()) == (set(), set())
        time.sleep(0.002)
    assert not pair.imports._dropped
    assert everything(pair.target) == before


def test_before_the_pages_are_open_everything_is_refused() -> None:
    keys = Keys.read("")
    imports = Imports(SETTINGS, keys, 0, BLOCK_TOKENS)
    imports.start([load(Place(EPOCH.hex(), "tcp://127.0.0.1:1"), start=BLOCK_TOKENS)])
    assert imports.poll(set()) == ({"request-1"}, {1, 6})
    assert imports.counts == {REFUSED + "not_open": 1}
