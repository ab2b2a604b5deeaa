"""A record written straight into an arena, verified, published, and parsed by a reader without a copy."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hw.kv.lease import Staged
from hw.kv.record import RecordError, header_nbytes, parse, seal_into
from hw.kv.rows import payload_nbytes, plan_rows
from hw.kv.store import Store
from hw.kv.transports.base import BlockKey, Limits, Missing
from hw.kv.transports.offers import StoreProducer
from hw.kv.transports.shared_memory import FOLDER, Arena, ArenaReader
from tests.unit.kv.samples import header, manifest

MANIFEST = manifest()
HEADER = header(MANIFEST)
ROWS = plan_rows(MANIFEST, HEADER.subject.start, HEADER.subject.valid_tokens)
KEY = BlockKey(HEADER.manifest_digest, HEADER.subject.prefix_hash, HEADER.subject.tenant_digest)
AT, NBYTES = header_nbytes(len(ROWS)), header_nbytes(len(ROWS)) + payload_nbytes(ROWS)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[StoreProducer, ArenaReader]]:
    folder = FOLDER / f"kv-test-{os.getpid()}-{tmp_path.name}"
    folder.mkdir(mode=0o700)
    arena = Arena(4 * NBYTES, folder)
    limits = Limits(tenant_share=1.0)
    producer = StoreProducer(Store(arena, limits), "shared_memory", arena.name)
    yield producer, ArenaReader(limits, folder)
    producer.close()
    folder.rmdir()


def verify(view: memoryview) -> None:
    parse(view).verify()


def write(staged: Staged) -> None:
    staged.array[AT:] = np.random.default_rng(0).integers(0, 256, NBYTES - AT, dtype=np.uint8)
    seal_into(staged.view, dataclasses.replace(HEADER, generation=staged.generation), ROWS)


def test_in_place_at_both_ends(ends: tuple[StoreProducer, ArenaReader]) -> None:
    producer, reader = ends
    staged = producer.store.stage(NBYTES, KEY.salt)
    write(staged)
    generation = producer.store.publish(staged, KEY, verify)
    with reader.fetch(producer.refer(KEY)) as block:
        record = parse(block.view)
        record.verify()
        assert record.header.generation == generation
        assert record.header.subject == HEADER.subject
        assert np.shares_memory(np.frombuffer(record.payload, np.uint8), block.array)


@pytest.mark.parametrize("at", [0, AT - 1, AT, NBYTES // 2])
def test_damage_is_found_before_anybody_can_read_it(ends: tuple[StoreProducer, ArenaReader], at: int) -> None:
    producer, _ = ends
    with producer.store.stage(NBYTES, KEY.salt) as staged:
        write(staged)
        staged.array[at] ^= 1
        with pytest.raises(RecordError):
            producer.store.publish(staged, KEY, verify)
    with pytest.raises(Missing):
        producer.refer(KEY)
    assert producer.store.stats()["staged"] == 0
    producer.store.check_integrity()
