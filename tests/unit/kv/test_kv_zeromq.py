"""Blocks over ZeroMQ: the contract, keys, chunks, deadlines, and peers that send what they should not."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from hw.kv.memory import PrivateMemory
from hw.kv.store import Store
from hw.kv.transports.base import Expired, Full, Late, Limits, Malformed, Missing, Ref, Stale, TooLarge, Unreachable
from hw.kv.transports.offers import StoreProducer
from hw.kv.transports.zeromq import VERSION, Answer, Ask, BlockClient, BlockServer, Endpoint
from tests.unit.kv.transport_contract import BLOCK_BYTES, CAPACITY, Ends, TransportContract, data, key

LIMITS = Limits(tenant_share=1.0, block_bytes=BLOCK_BYTES, lease_s=20.0, fetch_s=5.0, chunk_bytes=1 << 18)


class Keys(msgspec.Struct, frozen=True):
    public: str
    secret: str

    @classmethod
    def new(cls) -> "Keys":
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Pair:
    """A server with its store, and a client that it lets in."""

    def __init__(self, limits: Limits = LIMITS, name: str = "server-1") -> None:
        self.store = Store(PrivateMemory(CAPACITY), limits)
        self.server = BlockServer(self.store, Keys.new(), "127.0.0.1", name, limits)
        self.producer = StoreProducer(self.store, "zeromq", name)
        keys = Keys.new()
        self.client_key = keys.public
        self.server.authorize(keys.public)
        self.server.start()
        self.client = BlockClient(keys, limits)
        self.client.connect(self.server.endpoint)
        self.client.connect(self.server.endpoint)

    def stop(self) -> None:
        self.client.close()
        self.server.stop()
        self.store.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.stop()


class TestContract(TransportContract):
    @pytest.fixture
    def ends(self, pair: Pair) -> Ends:
        return Ends(pair.producer, pair.client)


class Impostor:
    """A server that answers as the test wants: ``answer(ask)`` gives the frames."""

    def __init__(self, answer: Any) -> None:
        keys = Keys.new()
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = Endpoint("impostor", f"tcp://127.0.0.1:{port}", keys.public)
        self._answer = answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(10):
                identity, question = self._socket.recv_multipart()
                for frames in self._answer(msgspec.msgpack.decode(question, type=Ask)):
                    self._socket.send_multipart([identity, *frames])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)


def reference(nbytes: int, handle: str = "impostor") -> Ref:
    return Ref("zeromq", handle, 0, nbytes, 1, 2, 3, b"m" * 32, b"p" * 32)


def head(ask: Ask, **changes: Any) -> bytes:
    answer = Answer(VERSION, ask.number, ask.start)
    return msgspec.msgpack.encode(msgspec.structs.replace(answer, **changes))


def test_into_a_given_buffer_and_nothing_left_there_after_a_failure(pair: Pair) -> None:
    ref = pair.producer.offer(key(1), data(1, BLOCK_BYTES).data)
    out = np.ones(BLOCK_BYTES, np.uint8)
    pair.client.fetch(ref, 5.0, out)
    assert (out == data(1, BLOCK_BYTES)).all()
    pair.store.drop(key(1))
    pair.producer.release(ref)
    with pytest.raises(Stale):
        pair.client.fetch(ref, 5.0, out)
    assert not out.any()
    for wrong in (np.ones(5, np.uint8), np.ones(BLOCK_BYTES, np.int8), np.ones(2 * BLOCK_BYTES, np.uint8)[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            pair.client.fetch(ref, 5.0, wrong)


def test_chunks_are_counted_and_no_larger_than_agreed(pair: Pair) -> None:
    ref = pair.producer.offer(key(1), data(1, BLOCK_BYTES - 1).data)
    pair.client.fetch(ref, 5.0)
    assert pair.server.counts["chunks"] == BLOCK_BYTES >> 18
    assert pair.client.counts["hits"] == 1


def test_an_expired_lease_is_refused_by_the_server() -> None:
    pair = Pair(Limits(tenant_share=1.0, lease_s=0.0))
    ref = pair.producer.offer(key(1), data(1, 100).data)
    with pytest.raises(Expired):
        pair.client.fetch(ref, 5.0)
    assert pair.server.counts["lease_expired"] == pair.client.counts["lease_expired"] == 1
    pair.stop()


def test_a_reference_with_another_blocks_name_is_refused(pair: Pair) -> None:
    ref = pair.producer.offer(key(1), data(1, 100).data)
    for change in ({"prefix": b"x" * 32}, {"manifest": b"x" * 32}):
        with pytest.raises(Missing):
            pair.client.fetch(msgspec.structs.replace(ref, **change), 5.0)
    with pytest.raises(Expired):
        pair.client.fetch(msgspec.structs.replace(ref, lease=ref.lease ^ 1), 5.0)


def test_wrong_keys_are_refused(pair: Pair) -> None:
    ref = pair.producer.offer(key(1), data(1, 100).data)
    stranger = BlockClient(Keys.new(), LIMITS)
    stranger.connect(pair.server.endpoint)
    with pytest.raises(Unreachable, match="key"):
        stranger.fetch(ref, 0.5)
    assert pair.server.counts["unauthorised"] >= 1
    stranger.close()
    deceived = BlockClient(Keys.new(), LIMITS)
    pair.server.authorize(deceived._keys.public)
    deceived.connect(msgspec.structs.replace(pair.server.endpoint, server_key=Keys.new().public))
    with pytest.raises(Unreachable):
        deceived.fetch(ref, 0.3)
    deceived.close()
    pair.client.fetch(ref, 5.0)
    pair.server.revoke(pair.client_key)
    with pytest.raises(Late):
        pair.client.fetch(ref, 0.2)  # the connection stands, the answers stop
    assert pair.server.counts["foreign"] >= 1


def test_plain_sockets_get_nothing(pair: Pair) -> None:
    ref = pair.producer.offer(key(1), data(1, 100).data)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(pair.server.endpoint.address)
    socket.send(msgspec.msgpack.encode(Ask(VERSION, 1, ref, 0, 100)))
    assert not socket.poll(300)
    socket.close(0)
    pair.client.fetch(ref, 5.0)


def test_unknown_or_absent_servers_are_unreachable(pair: Pair) -> None:
    with pytest.raises(Unreachable, match="connect"):
        pair.client.fetch(reference(10, "nobody"))
    ref = pair.producer.offer(key(1), data(1, 100).data)
    pair.server.stop()
    with pytest.raises((Unreachable, Late)):
        pair.client.fetch(ref, 0.3)
    assert not pair.server.alive


def test_a_client_refuses_what_is_too_large_before_it_asks(pair: Pair) -> None:
    with pytest.raises(TooLarge):
        pair.client.fetch(reference(BLOCK_BYTES + 1, "server-1"))
    with pytest.raises(Malformed):
        pair.client.fetch(reference(0, "server-1"))


@settings(max_examples=40, deadline=None)
@given(questions=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_server_survives_any_question(shared_pair: Pair, questions: list[list[bytes]]) -> None:
    socket = shared_pair.client._sockets["server-1"]
    for frames in questions:
        socket.send_multipart(frames)
    ref = shared_pair.producer.offer(key(1), data(1, 100).data)
    assert shared_pair.client.fetch(ref, 5.0).array[0] == data(1, 100)[0]
    shared_pair.producer.release(ref)
    assert shared_pair.server.alive


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.stop()


def test_a_server_refuses_questions_for_more_than_there_is(pair: Pair) -> None:
    ref = pair.producer.offer(key(1), data(1, 1000).data)
    socket = pair.client._sockets["server-1"]
    asks = [(0, 0), (0, 1001), (999, 2), (1000, 1), (0, 1 << 20), (2**62, 1)]
    for number, (start, nbytes) in enumerate(asks):
        socket.send(msgspec.msgpack.encode(Ask(VERSION, number, ref, start, nbytes)))
        assert socket.poll(5000)
        (answer,) = socket.recv_multipart()
        assert msgspec.msgpack.decode(answer, type=Answer).code == "malformed"
    socket.send(msgspec.msgpack.encode(Ask(VERSION + 1, 1, ref, 0, 10)))
    socket.send(b"x" * 100_000)  # over the limit: ZeroMQ ends the connection
    assert not socket.poll(200)
    assert pair.server.counts["version"] == 1
    pair.client.fetch(ref, 5.0)  # connected again


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        (lambda ask: [[head(ask), b"x" * (ask.nbytes - 1)]], Malformed),
        (lambda ask: [[head(ask), b"x" * (ask.nbytes + 1)]], Malformed),
        (lambda ask: [[head(ask)]], Malformed),
        (lambda ask: [[head(ask), b"x" * ask.nbytes, b"more"]], Malformed),
        (lambda ask: [[b"\xff\x00", b"x" * ask.nbytes]], Late),
        (lambda ask: [[head(ask, version=9), b"x" * ask.nbytes]], Late),
        (lambda ask: [[head(ask, number=ask.number + 1), b"x" * ask.nbytes]], Late),
        (lambda ask: [[head(ask, start=ask.start + 1), b"x" * ask.nbytes]], Late),
        (lambda ask: [[head(ask, start=2**40), b"x" * ask.nbytes]], Late),
        (lambda ask: [[head(ask, code="stale_generation")]], Stale),
        (lambda ask: [[head(ask, code="of tomorrow")]], Missing),
        (lambda ask: [], Late),
    ],
)
def test_what_a_server_should_not_send_is_not_taken(answers: Any, failure: type[Exception]) -> None:
    impostor = Impostor(answers)
    client = BlockClient(Keys.new(), LIMITS)
    client.connect(impostor.endpoint)
    out = np.ones(600_000, np.uint8)
    try:
        with pytest.raises(failure):
            client.fetch(reference(600_000), 0.3, out)
        assert not out.any()
        assert client.counts.total()
    finally:
        client.close()
        impostor.stop()


def test_answers_twice_or_too_late_change_nothing() -> None:
    kept: list[list[bytes]] = []

    def answers(ask: Ask) -> list[list[bytes]]:
        if ask.number == 1:
            kept.append([head(ask), b"\x01" * ask.nbytes])
            return []
        return [*kept, *([[head(ask), bytes([2]) * ask.nbytes]] * 2)]

    impostor = Impostor(answers)
    client = BlockClient(Keys.new(), LIMITS)
    client.connect(impostor.endpoint)
    try:
        with pytest.raises(Late):
            client.fetch(reference(600_000), 0.3)
        assert (client.fetch(reference(600_000), 5.0).array == 2).all()
        assert client.counts["dropped:late"] >= 1
    finally:
        client.close()
        impostor.stop()


def test_the_deadline_holds_while_answers_trickle() -> None:
    def answers(ask: Ask) -> list[list[bytes]]:
        time.sleep(0.1)
        return [[head(ask), b"x" * ask.nbytes]]

    impostor = Impostor(answers)
    client = BlockClient(Keys.new(), LIMITS)
    client.connect(impostor.endpoint)
    try:
        with pytest.raises(Late, match="chunks were missing"):
            client.fetch(reference(12 << 18), 0.4)
        assert client.counts["deadline"] == 1
    finally:
        client.close()
        impostor.stop()


def test_many_clients_and_a_busy_writer(pair: Pair) -> None:
    wrong, whole = [], []
    stop = threading.Event()

    def work(number: int) -> None:
        keys = Keys.new()
        pair.server.authorize(keys.public)
        client = BlockClient(keys, LIMITS)
        client.connect(pair.server.endpoint)
        for turn in range(30):
            try:
                ref = pair.producer.refer(key(turn % 2), 0.05)
                array = client.fetch(ref, 5.0).array
            except (Missing, Expired, Stale):
                continue
            whole.append(turn)
            if (array != array[0]).any():
                wrong.append(turn)
        client.close()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            with contextlib.suppress(Full):  # leased for the moment
                pair.store.put(key(turn % 2), np.full(300_000, turn % 251, np.uint8))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    writer = threading.Thread(target=write)
    for thread in [writer, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    writer.join()
    assert whole
    assert not wrong
    pair.store.check_integrity()
    pair.store.reap()
    assert pair.store.stats()["staged"] == 0


def test_ten_thousand_fetches_leave_nothing_behind(pair: Pair) -> None:
    free = pair.store.stats()["free_bytes"]
    content = data(0, 500)
    for number in range(10_000):
        ref = pair.producer.offer(key(number % 50), content[: 1 + number % 500].data)
        assert pair.client.fetch(ref, 5.0).view.nbytes == 1 + number % 500
        pair.producer.release(ref)
    for number in range(50):
        pair.store.drop(key(number))
    assert pair.store.stats()["free_bytes"] == free
    assert pair.store.stats()["leases"] == 0
    pair.store.check_integrity()
