"""Blocks as Ray objects on a private Ray: the contract with the reader in an actor of its own, and what a forger may try."""

import base64
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from cluster.local import private_ray
from deployments.config.load import REPOSITORY
from hw.kv.transports import base
from hw.kv.transports.base import BlockError, Late, Limits, Malformed, Missing, Ref, Unavailable
from hw.kv.transports.ray_objects import RayProducer, RayReader
from tests.unit.kv.transport_contract import BLOCK_BYTES, CAPACITY, Ends, TransportContract, data, key

LIMITS = Limits(tenant_share=1.0, block_bytes=BLOCK_BYTES, lease_s=20.0, fetch_s=5.0)


class Reader:
    """In its own process; failures come back as codes."""

    def __init__(self) -> None:
        self.reader = RayReader(LIMITS)
        self.held: list[Any] = []

    def read(self, ref: bytes, deadline_s: float) -> tuple[str, bytes, bool]:
        try:
            block = self.reader.fetch(Ref.decode(ref), deadline_s)
        except BlockError as error:
            return type(error).__name__, b"", False
        return "", bytes(block.view), block.view.readonly

    def hold(self, ref: bytes) -> int:
        self.held.append(self.reader.fetch(Ref.decode(ref)))
        return int(self.held[-1].array.astype(np.int64).sum())

    def look(self) -> int:
        return int(self.held[-1].array.astype(np.int64).sum())


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    import ray

    # where other tests' application runs in this process, its Ray serves: a process has one
    with contextlib.nullcontext() if ray.is_initialized() else private_ray(REPOSITORY, cpus=2):
        yield ray.remote(num_cpus=0)(Reader).remote()


@pytest.fixture
def ends(actor: Any) -> Iterator[Ends]:
    import ray

    def read(ref: Ref, deadline_s: float = 5.0) -> np.ndarray:
        code, content, readonly = ray.get(actor.read.remote(ref.encode(), deadline_s), timeout=60)
        if code:
            raise getattr(base, code)(code)
        assert readonly
        return np.frombuffer(content, np.uint8)

    producer = RayProducer(CAPACITY, LIMITS)
    yield Ends(producer, RayReader(LIMITS), read)
    producer.store.check_integrity()
    producer.close()


@pytest.mark.cluster
class TestContract(TransportContract):
    pass


@pytest.mark.cluster
def test_the_reader_keeps_what_it_holds_when_the_producer_lets_go(ends: Ends, actor: Any) -> None:
    import ray

    ref = ends.producer.offer(key(1), data(1, BLOCK_BYTES).data)
    total = ray.get(actor.hold.remote(ref.encode()))
    ends.producer.release(ref)
    for number in range(2, 8):
        ends.producer.release(ends.producer.offer(key(number), data(number, BLOCK_BYTES).data))
    assert ray.get(actor.look.remote()) == total == int(data(1, BLOCK_BYTES).astype(np.int64).sum())
    with pytest.raises(BlockError):
        ends.fetch(msgspec.structs.replace(ref, nbytes=BLOCK_BYTES - 1))


@pytest.mark.cluster
def test_damaged_handles_are_refused_and_spoil_nothing(ends: Ends, actor: Any) -> None:
    import ray

    ref = ends.producer.offer(key(1), data(1, 200_000).data)
    whole = base64.b85decode(ref.handle)
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        for content in (bytes(flipped), whole[:place]):
            forged = msgspec.structs.replace(ref, handle=base64.b85encode(content).decode())
            assert ray.get(actor.read.remote(forged.encode(), 1.0), timeout=60)[0] == Malformed.__name__
    assert (ends.fetch(ref) == data(1, 200_000)).all()


@pytest.mark.cluster
def test_a_thousand_blocks_do_not_fill_the_object_store(ends: Ends) -> None:
    import ray

    free = ray.cluster_resources()["object_store_memory"]
    rounds = int(min(1000, 3 * free / BLOCK_BYTES))
    for number in range(rounds):
        ends.producer.release(ends.producer.offer(key(number % 3), data(0, BLOCK_BYTES).data))
    last = ends.producer.refer(key((rounds - 1) % 3))
    assert (ends.fetch(last) == data(0, BLOCK_BYTES)).all()
    assert len(ends.producer.store._memory.objects) == 1  # type: ignore[attr-defined]


@pytest.mark.cluster
def test_an_object_of_another_producer_that_died_is_missing_or_late(ends: Ends) -> None:
    import ray

    class Other:
        def offer(self) -> bytes:
            self.producer = RayProducer(CAPACITY, LIMITS)
            return self.producer.offer(key(1), data(1, BLOCK_BYTES).data).encode()

    other = ray.remote(num_cpus=0)(Other).remote()
    ref = Ref.decode(ray.get(other.offer.remote()))
    assert (ends.fetch(ref) == data(1, BLOCK_BYTES)).all()
    ray.kill(other)
    until = time.monotonic() + 20
    while True:
        try:
            ends.fetch(ref)
        except (Missing, Late):
            break
        assert time.monotonic() < until
        time.sleep(0.2)


def test_without_ray_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(Unavailable, match="not connected"):
        RayProducer(CAPACITY)
