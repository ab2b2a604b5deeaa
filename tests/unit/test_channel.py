"""The draft channel over each transport: real sockets, proven keys, bounds, peers that come and go."""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, DraftChannel, Drafts, Step
from deployments.channel.connect import NearChannel, connect
from deployments.channel.endpoint import Endpoint, KeyPair
from deployments.channel.server import DraftServer
from deployments.channel.zeromq import ZmqChannel
from tests.fakes import FakeDrafter, always

FAULTS = FaultPolicy(heartbeat_s=0.2)
TRANSPORTS = ("unix", "zeromq")


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


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def seen_from(server: DraftServer, transport: str) -> Endpoint:
    """The endpoint as a target on the same machine or on another sees it."""
    endpoint = server.endpoint()
    return endpoint if transport == "unix" else msgspec.structs.replace(endpoint, machine="another")


def linked(server: DraftServer, transport: str) -> NearChannel | ZmqChannel:
    keys = KeyPair.new()
    server.authorize(keys.public)
    channel = connect(seen_from(server, transport), keys, FAULTS)
    assert isinstance(channel, NearChannel if transport == "unix" else ZmqChannel)
    assert until(lambda: channel.post(a_step(0, []))), "not connected"
    assert not isinstance(channel, NearChannel) or channel.over_unix
    return channel


@pytest.fixture
def link(server: DraftServer, transport: str) -> Iterator[NearChannel | ZmqChannel]:
    channel = linked(server, transport)
    yield channel
    channel.close()


def send_raw(channel: NearChannel | ZmqChannel, data: bytes) -> None:
    if isinstance(channel, ZmqChannel):
        channel._socket.send(data)
    else:
        assert channel._unix is not None
        channel._unix._socket.send(len(data).to_bytes(4, "little") + data)


def test_round_trip(link: DraftChannel) -> None:
    assert link.post(a_step(1))
    answer = link.collect(1, 2.0)
    assert answer is not None
    assert answer.drafts[0].tokens == [7, 7]
    assert answer.drafts[0].base == 3


def test_sessions_belong_to_the_key_not_to_what_the_message_says(link: DraftChannel, drafter: FakeDrafter) -> None:
    seen: list[str] = []
    step = drafter.step
    drafter.step = lambda s: (seen.append(s.target), step(s))[1]  # type: ignore[method-assign,func-returns-value]
    link.post(a_step(1))
    assert link.collect(1, 2.0)
    assert seen
    assert "whoever" not in seen


def test_unauthorised_key_is_never_heard(server: DraftServer, drafter: FakeDrafter, transport: str) -> None:
    channel = connect(seen_from(server, transport), KeyPair.new(), FAULTS)
    try:
        assert until(lambda: server.dropped["unauthorised"] > 0)
        channel.post(a_step(1))
        assert channel.collect(1, 0.2) is None
        assert drafter.steps == 0
    finally:
        channel.close()


def test_wrong_server_key_never_connects(server: DraftServer, transport: str) -> None:
    keys = KeyPair.new()
    server.authorize(keys.public)
    endpoint = msgspec.structs.replace(seen_from(server, transport), server_key=KeyPair.new().public)
    channel = connect(endpoint, keys, FAULTS)
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


def test_revoked_target_is_forgotten(server: DraftServer, drafter: FakeDrafter, link: DraftChannel) -> None:
    link.post(a_step(1))
    assert link.collect(1, 2.0)
    assert drafter.sessions
    server.revoke(server._authorised.copy().pop())
    assert until(lambda: not drafter.sessions)
    link.post(a_step(2))
    assert link.collect(2, 0.2) is None
    # over ZeroMQ the old connection is no longer listened to; a Unix connection is closed, and a new one not let in
    assert until(lambda: server.dropped["foreign"] + server.dropped["unauthorised"] >= 1)
    assert drafter.steps == 2


@pytest.mark.parametrize("data", [b"", b"\xc1", b"not msgpack", msgspec.msgpack.encode(["step", 1, "t"])])
def test_malformed_messages_are_counted_and_harmless(
    server: DraftServer, link: NearChannel | ZmqChannel, data: bytes
) -> None:
    send_raw(link, data)
    assert until(lambda: server.dropped["malformed"] == 1)
    link.post(a_step(1))
    assert link.collect(1, 2.0)


def test_another_version_is_dropped(server: DraftServer, link: DraftChannel) -> None:
    link.post(msgspec.structs.replace(a_step(1), version=99))
    assert until(lambda: server.dropped["version"] == 1)


def test_late_answers_are_dropped(link: DraftChannel) -> None:
    link.post(a_step(1))
    time.sleep(0.2)
    link.post(a_step(2))
    answer = link.collect(2, 2.0)
    assert answer is not None
    assert answer.number == 2
    assert link.dropped["late"] == 1


def test_a_slow_draft_keeps_up_without_drafting_the_past(
    server: DraftServer, drafter: FakeDrafter, link: DraftChannel
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


def test_death_is_seen_before_the_deadline(drafter: FakeDrafter, transport: str) -> None:
    server = DraftServer(drafter, "127.0.0.1", "d", FAULTS)
    server.start()
    channel = linked(server, transport)
    try:
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


def test_waiting_behind_work_is_told_from_work(transport: str) -> None:
    """A message that comes while the draft computes: the time until it is read is the draft's queue, not overhead."""
    busy = threading.Event()

    class Busy(FakeDrafter):
        def idle(self, budget_s: float, should_stop: Callable[[], bool]) -> bool:
            busy.set()
            time.sleep(0.1)  # one model call, which nothing interrupts
            return True

    server = DraftServer(Busy(always(7)), "127.0.0.1", "d", FAULTS)
    server.start()
    channel = linked(server, transport)
    try:
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


def test_two_targets_on_two_transports_are_served_together(server: DraftServer, drafter: FakeDrafter) -> None:
    seen: list[str] = []
    step = drafter.step
    drafter.step = lambda s: (seen.append(s.target), step(s))[1]  # type: ignore[method-assign,func-returns-value]
    channels = [linked(server, transport) for transport in TRANSPORTS]
    try:
        for number in (1, 2):
            for channel in channels:
                assert channel.post(a_step(number))
            assert all(channel.collect(number, 2.0) is not None for channel in channels)
        assert len(set(seen)) == 2
    finally:
        for channel in channels:
            channel.close()
