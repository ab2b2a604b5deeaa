"""The ZeroMQ channel: real sockets on the loopback, CURVE, bounds, peers that come and go."""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Drafts, Step
from deployments.channel.zeromq import DraftServer, Endpoint, KeyPair, ZmqChannel
from tests.fakes import FakeDrafter, always

FAULTS = FaultPolicy(heartbeat_s=0.2)


def a_step(number: int, tokens: list[int] | None = None, closed: list[str] | None = None) -> Step:
    tokens = [1, 2, 3] if tokens is None else tokens
    commits = [Commit("s", 0, len(tokens), tokens, 2)] if tokens else []
    return Step(PROTOCOL_VERSION, "whoever", number, 0.2, commits, closed or [])


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def drafter() -> FakeDrafter:
    return FakeDrafter(always(7))


@pytest.fixture
def server(drafter: FakeDrafter) -> Iterator[DraftServer]:
    server = DraftServer(drafter, "127.0.0.1", "d", FAULTS)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def link(server: DraftServer) -> Iterator[ZmqChannel]:
    keys = KeyPair.new()
    server.authorize(keys.public)
    channel = ZmqChannel(server.endpoint(), keys, FAULTS)
    assert until(lambda: channel.post(a_step(0, []))), "not connected"
    yield channel
    channel.close()


def test_round_trip(link: ZmqChannel) -> None:
    assert link.post(a_step(1))
    answer = link.collect(1, 2.0)
    assert answer is not None
    assert answer.drafts[0].tokens == [7, 7]
    assert answer.drafts[0].base == 3


def test_sessions_belong_to_the_key_not_to_what_the_message_says(link: ZmqChannel, drafter: FakeDrafter) -> None:
    seen: list[str] = []
    step = drafter.step
    drafter.step = lambda s: (seen.append(s.target), step(s))[1]  # type: ignore[method-assign,func-returns-value]
    link.post(a_step(1))
    assert link.collect(1, 2.0)
    assert seen
    assert "whoever" not in seen


def test_unauthorised_key_is_never_heard(server: DraftServer, drafter: FakeDrafter) -> None:
    channel = ZmqChannel(server.endpoint(), KeyPair.new(), FAULTS)
    try:
        assert until(lambda: server.dropped["unauthorised"] > 0)
        channel.post(a_step(1))
        assert channel.collect(1, 0.2) is None
        assert drafter.steps == 0
    finally:
        channel.close()


def test_wrong_server_key_never_connects(server: DraftServer) -> None:
    keys = KeyPair.new()
    server.authorize(keys.public)
    channel = ZmqChannel(Endpoint("d", server.address, KeyPair.new().public), keys, FAULTS)
    try:
        assert not until(lambda: channel.post(a_step(1)), 0.5)
    finally:
        channel.close()


def test_plain_socket_gets_nowhere(server: DraftServer, drafter: FakeDrafter) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(server.address)
        raw.send(msgspec.msgpack.encode(a_step(1)))
        assert not raw.poll(300)
    assert drafter.steps == 0


def test_revoked_target_is_forgotten(server: DraftServer, drafter: FakeDrafter, link: ZmqChannel) -> None:
    link.post(a_step(1))
    assert link.collect(1, 2.0)
    assert drafter.sessions
    server.revoke(server._authorised.copy().pop().decode())
    assert until(lambda: not drafter.sessions)
    link.post(a_step(2))
    assert link.collect(2, 0.2) is None
    assert server.dropped["foreign"] >= 1


@pytest.mark.parametrize("data", [b"", b"\xc1", b"not msgpack", msgspec.msgpack.encode(["step", 1, "t"])])
def test_malformed_messages_are_counted_and_harmless(server: DraftServer, link: ZmqChannel, data: bytes) -> None:
    link._socket.send(data)
    assert until(lambda: server.dropped["malformed"] == 1)
    link.post(a_step(1))
    assert link.collect(1, 2.0)


def test_another_version_is_dropped(server: DraftServer, link: ZmqChannel) -> None:
    link.post(msgspec.structs.replace(a_step(1), version=99))
    assert until(lambda: server.dropped["version"] == 1)


def test_late_answers_are_dropped(link: ZmqChannel) -> None:
    link.post(a_step(1))
    time.sleep(0.2)
    link.post(a_step(2))
    answer = link.collect(2, 2.0)
    assert answer is not None
    assert answer.number == 2
    assert link.dropped["late"] == 1


def test_a_slow_draft_keeps_up_without_drafting_the_past(
    server: DraftServer, drafter: FakeDrafter, link: ZmqChannel
) -> None:
    step = drafter.step

    def slow(item: Step) -> Drafts:
        time.sleep(0.05)
        return step(item)

    drafter.step = slow  # type: ignore[method-assign]
    for number in range(1, 8):
        link.post(a_step(number))
    answer = link.collect(7, 5.0)
    assert answer is not None
    assert answer.drafts[0].tokens == [7, 7]
    assert server.dropped["superseded"] >= 3


def test_death_is_seen_before_the_deadline_and_return_is_used(drafter: FakeDrafter) -> None:
    server = DraftServer(drafter, "127.0.0.1", "d", FAULTS)
    keys = KeyPair.new()
    server.authorize(keys.public)
    server.start()
    channel = ZmqChannel(server.endpoint(), keys, FAULTS)
    try:
        assert until(lambda: channel.post(a_step(0, [])))
        drafter.step = lambda item: time.sleep(0.3) or Drafts(1, "", -1, [])  # type: ignore[method-assign]
        channel.post(a_step(1))
        time.sleep(0.05)
        started = time.monotonic()
        server.stop()
        assert channel.collect(1, 30.0) is None
        assert time.monotonic() - started < 10
        assert until(lambda: not channel.post(a_step(2)))
        assert channel.dropped["not_connected"] >= 1
    finally:
        channel.close()


def test_key_pair_hides_its_secret() -> None:
    keys = KeyPair.new()
    assert keys.secret not in repr(keys)
    assert keys.secret not in f"{keys}"


def test_waiting_behind_work_is_told_from_work(drafter: FakeDrafter) -> None:
    """A message that comes while the draft computes: the time until it is read is the draft's queue, not overhead."""
    busy = threading.Event()

    class Busy(FakeDrafter):
        def idle(self, budget_s: float, should_stop: Callable[[], bool]) -> bool:
            busy.set()
            time.sleep(0.1)  # one model call, which nothing interrupts
            return True

    server = DraftServer(Busy(always(7)), "127.0.0.1", "d", FAULTS)
    keys = KeyPair.new()
    server.authorize(keys.public)
    server.start()
    channel = ZmqChannel(server.endpoint(), keys, FAULTS)
    try:
        assert until(lambda: channel.post(a_step(0, [])))
        busy.clear()
        assert busy.wait(5)
        time.sleep(0.02)
        sent = time.perf_counter()
        assert channel.post(a_step(1))
        answer = channel.collect(1, 5.0)
        waited = time.perf_counter() - sent
        assert answer is not None
        assert 0.0 < answer.queue_s <= waited
        assert answer.queue_s > 0.5 * waited
    finally:
        channel.close()
        server.stop()
