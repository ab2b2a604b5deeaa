"""What every byte transport must do, whichever it is: the tests of each run these over their own two ends."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from hw.kv.memory import GRANULE
from hw.kv.transports.base import BlockError, BlockKey, Consumer, Full, Missing, Producer, Ref, TooLarge

CAPACITY = 4 << 20
BLOCK_BYTES = 3 << 20


@dataclass
class Ends:
    producer: Producer
    consumer: Consumer
    read: Callable[[Ref], np.ndarray] | None = None  # how to fetch where the consumer is in another process

    def fetch(self, ref: Ref) -> np.ndarray:
        """A copy of what is fetched."""
        if self.read is not None:
            return self.read(ref)
        with self.consumer.fetch(ref, 5.0) as block:
            assert block.view.readonly
            assert block.view.nbytes == ref.nbytes
            return block.array.copy()


def key(number: int, salt: bytes = b"") -> BlockKey:
    return BlockKey(b"m" * 32, number.to_bytes(32, "little"), salt)


def data(number: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)


class TransportContract:
    """Subclasses give a fixture ``ends`` whose producer holds CAPACITY bytes and takes blocks of BLOCK_BYTES."""

    @pytest.mark.parametrize("nbytes", [1, 63, GRANULE, GRANULE + 1, (1 << 20) + 5, BLOCK_BYTES])
    def test_bytes_arrive_as_they_were(self, ends: Ends, nbytes: int) -> None:
        sent = data(nbytes, nbytes)
        ref = ends.producer.offer(key(1), sent.data)
        before = sent.copy()
        sent[:] = 0  # the source may be overwritten once offered
        assert (ends.fetch(Ref.decode(ref.encode())) == before).all()
        ends.producer.release(ref)
        ends.producer.release(ref)

    def test_references_name_what_they_are(self, ends: Ends) -> None:
        ref = ends.producer.offer(key(7), data(7, 100).data)
        again = ends.producer.refer(key(7))
        assert (ref.kind, ref.nbytes, ref.prefix) == (ends.producer.kind, 100, key(7).prefix)
        assert again.generation == ref.generation
        assert again.lease != ref.lease
        assert (ends.fetch(again) == data(7, 100)).all()

    def test_unknown_blocks_are_missing(self, ends: Ends) -> None:
        ends.producer.offer(key(1, b"tenant"), data(1, 10).data)
        for unknown in (key(2), key(1), key(1, b"other")):
            with pytest.raises(Missing):
                ends.producer.refer(unknown)

    def test_what_is_refused_by_verification_is_not_offered(self, ends: Ends) -> None:
        def refuse(view: memoryview) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            ends.producer.offer(key(1), data(1, 10).data, refuse)
        with pytest.raises(Missing):
            ends.producer.refer(key(1))

    def test_leased_blocks_fill_it_and_too_large_ones_are_refused(self, ends: Ends) -> None:
        refs = [ends.producer.offer(key(number), data(number, 1 << 20).data) for number in range(4)]
        with pytest.raises(Full):
            ends.producer.offer(key(9), data(9, 1 << 20).data)
        with pytest.raises(TooLarge):
            ends.producer.offer(key(9), data(9, BLOCK_BYTES + 1).data)
        for number, ref in enumerate(refs):
            assert (ends.fetch(ref) == data(number, 1 << 20)).all()
            ends.producer.release(ref)

    def test_a_reference_to_what_was_replaced_gives_no_other_bytes(self, ends: Ends) -> None:
        old = ends.producer.offer(key(0), data(0, BLOCK_BYTES).data)
        ends.producer.release(old)
        for number in range(1, 6):
            ends.producer.release(ends.producer.offer(key(number), data(number, BLOCK_BYTES).data))
        with pytest.raises(BlockError):
            ends.fetch(old)

    def test_forged_references_are_refused(self, ends: Ends) -> None:
        ref = ends.producer.offer(key(1), data(1, 5000).data)
        wrong_kind = "zeromq" if ref.kind != "zeromq" else "shared_memory"
        forged = [
            {"kind": wrong_kind}, {"handle": ""}, {"handle": "../../etc/passwd"}, {"handle": ref.handle[:-1]},
            {"handle": "x" * 1000}, {"nbytes": 4999}, {"nbytes": 5001}, {"nbytes": 0}, {"nbytes": 2**62},
        ]  # fmt: skip
        for change in forged:
            with pytest.raises(BlockError):
                ends.fetch(msgspec.structs.replace(ref, **change))
        assert (ends.fetch(ref) == data(1, 5000)).all()

    def test_after_close_nothing_is_fetched(self, ends: Ends) -> None:
        ref = ends.producer.offer(key(1), data(1, 5000).data)
        ends.producer.close()
        with pytest.raises(BlockError):
            ends.fetch(ref)
        with pytest.raises(BlockError):
            ends.producer.offer(key(1), data(1, 5000).data)
