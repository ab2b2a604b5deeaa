"""What only Unix sockets have: who may come in, slow and dead peers, and ZeroMQ when they fail."""

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Commit, Drafts, Step
from deployments.channel import endpoint as endpoints
from deployments.channel import handshake, unix_door
from deployments.channel.connect import NearChannel, connect
from deployments.channel.endpoint import Endpoint, KeyPair
from deployments.channel.server import DraftServer
from deployments.channel.unix import UnixChannel
from deployments.channel.zeromq import ZmqChannel
from tests.fakes import FakeDrafter, always

FAULTS = FaultPolicy(heartbeat_s=0.2)


def a_step(number: int, tokens: list[int] | None = None, want: int = 2) -> Step:
    tokens = [1, 2, 3] if tokens is None else tokens
    return Step(PROTOCOL_VERSION, "whoever", number, 5.0, [Commit("s", 0, len(tokens), tokens, want)], [])


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
def keys(server: DraftServer) -> KeyPair:
    keys = KeyPair.new()
    server.authorize(keys.public)
    return keys


@pytest.fixture
def link(server: DraftServer, keys: KeyPair) -> Iterator[UnixChannel]:
    channel = UnixChannel(server.endpoint(), keys, FAULTS)
    yield channel
    channel.close()


def works(channel: NearChannel | ZmqChannel | UnixChannel, number: int = 1) -> bool:
    """Whether a round comes about, now or soon."""
    for attempt in range(number, number + 200):
        if channel.post(a_step(attempt)) and channel.collect(attempt, 2.0) is not None:
            return True
        time.sleep(0.02)
    return False


# --- who may come in --------------------------------------------------------------------------------------------------


def test_only_this_user_can_reach_the_socket_and_it_goes_with_the_server(drafter: FakeDrafter) -> None:
    server = DraftServer(drafter, "127.0.0.1", "d", FAULTS)
    path = Path(server.endpoint().path)
    server.start()
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    assert path.is_socket()
    server.stop()
    assert not path.parent.exists()


@pytest.mark.parametrize("end", ["target", "draft"])
def test_a_process_of_another_user_is_refused(
    server: DraftServer, keys: KeyPair, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = handshake.os.geteuid()
    name = "MainThread" if end == "target" else "draft-accept"
    monkeypatch.setattr(handshake.os, "geteuid", lambda: real + (threading.current_thread().name == name))
    with pytest.raises(ConnectionError):
        UnixChannel(server.endpoint(), keys, FAULTS)


def test_an_authorisation_that_comes_a_moment_later_is_waited_for(server: DraftServer) -> None:
    keys = KeyPair.new()
    timer = threading.Timer(0.08, server.authorize, (keys.public,))
    timer.start()
    channel = UnixChannel(server.endpoint(), keys, FaultPolicy(draft_deadline_s=5.0))
    timer.join()
    assert works(channel)
    channel.close()


def test_strangers_do_not_keep_others_out(server: DraftServer, keys: KeyPair) -> None:
    path = server.endpoint().path
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as noisy:
        silent.connect(path)
        noisy.connect(path)
        noisy.sendall(b"?" * 500)
        channel = UnixChannel(server.endpoint(), keys, FaultPolicy(draft_deadline_s=5.0))
        assert works(channel)
        channel.close()
    assert until(lambda: server.dropped["handshake"] == 2)


def test_a_bounded_number_comes_in(drafter: FakeDrafter) -> None:
    faults = FaultPolicy(channel_queue=2, draft_deadline_s=0.1)
    server = DraftServer(drafter, "127.0.0.1", "d", faults)
    server.start()
    keys = KeyPair.new()
    server.authorize(keys.public)
    channels = [connect(server.endpoint(), keys, faults) for _ in range(3)]
    try:
        assert [c.over_unix for c in channels if isinstance(c, NearChannel)] == [True, True, False]
        assert server.stats()["connected:unix"] == 2
    finally:
        for channel in channels:
            channel.close()
        server.stop()


# --- peers that misbehave ---------------------------------------------------------------------------------------------


def test_a_frame_too_large_ends_the_connection_and_nothing_else(
    server: DraftServer, keys: KeyPair, link: UnixChannel
) -> None:
    other = UnixChannel(server.endpoint(), keys, FAULTS)
    other._socket.send((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
    assert until(lambda: server.dropped["too_large"] == 1)
    assert other.collect(1, 5.0) is None
    assert other.lost
    assert works(link)


def test_a_message_larger_than_any_buffer_arrives(link: UnixChannel, drafter: FakeDrafter) -> None:
    tokens = list(range(1 << 20, (1 << 20) + 1_500_000))  # 7.5 MB
    assert link.post(a_step(1, tokens))
    assert link._writer.unfinished
    assert not link.post(a_step(2))
    assert link.dropped["queue_full"] == 1
    answer = link.collect(1, 30.0)
    assert answer is not None
    assert answer.drafts[0].base == len(tokens)
    assert drafter.sessions["s"] == tokens


def test_a_target_that_does_not_read_loses_answers_and_holds_nobody_up(
    server: DraftServer, drafter: FakeDrafter, link: UnixChannel
) -> None:
    large = msgspec.structs.replace(drafter.step(a_step(0)), source="x" * 300_000)
    drafter.step = lambda step: msgspec.structs.replace(large, number=step.number)  # type: ignore[method-assign]
    keys = KeyPair.new()
    server.authorize(keys.public)
    other = UnixChannel(server.endpoint(), keys, FAULTS)
    number = 0
    while not server.dropped["not_answered"]:
        number += 1
        assert number < 200
        assert link.post(a_step(number))
        assert other.post(a_step(number))
        assert other.collect(number, 5.0) is not None
    # once it reads again it gets what was begun, and the next answer
    assert link.collect(-1, 0.2) is None
    assert link.post(a_step(number + 1))
    assert link.collect(number + 1, 5.0) is not None
    other.close()


def test_sessions_of_a_target_that_left_are_forgotten(
    server: DraftServer, drafter: FakeDrafter, link: UnixChannel
) -> None:
    assert works(link)
    assert drafter.sessions
    link.close()
    assert until(lambda: not drafter.sessions)
    assert server.stats()["connected:unix"] == 0


def test_a_target_that_left_while_the_draft_worked_is_no_trouble(
    server: DraftServer, drafter: FakeDrafter, keys: KeyPair, link: UnixChannel
) -> None:
    step = drafter.step
    leaving = UnixChannel(server.endpoint(), keys, FAULTS)

    def left(item: Step) -> Drafts:
        leaving.close()
        return step(item)

    drafter.step = left  # type: ignore[method-assign]
    assert leaving.post(a_step(1))
    assert until(lambda: server.stats()["connected:unix"] == 1)
    assert works(link)


def test_garbage_from_a_draft_is_counted(link: UnixChannel, server: DraftServer) -> None:
    assert works(link)
    assert server._unix is not None
    (connection,) = server._unix._connections.values()
    connection.socket.sendall((3).to_bytes(4, "little") + b"???")
    assert link.collect(1, 0.2) is None
    assert link.dropped["malformed"] == 1
    assert works(link, 1000)


# --- ZeroMQ when it fails ---------------------------------------------------------------------------------------------


def test_another_machine_uses_zeromq(server: DraftServer, keys: KeyPair) -> None:
    for endpoint in (
        msgspec.structs.replace(server.endpoint(), machine="another"),
        msgspec.structs.replace(server.endpoint(), path=""),
        Endpoint(server.name, server.address, server.public_key),
    ):
        channel = connect(endpoint, keys, FAULTS)
        assert isinstance(channel, ZmqChannel)
        channel.close()


def test_a_machine_that_is_not_known_is_never_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "this_machine", lambda: "")
    assert not Endpoint("d", "tcp://x:1", "k", path="/p", machine="").near


def test_plain_values_carry_an_endpoint(server: DraftServer) -> None:
    endpoint = server.endpoint(5)
    assert endpoint.near
    assert msgspec.convert(msgspec.to_builtins(endpoint), Endpoint) == endpoint


def test_a_socket_out_of_reach_is_replaced_at_once(server: DraftServer, keys: KeyPair) -> None:
    endpoint = msgspec.structs.replace(server.endpoint(), path="/nowhere/socket")  # another container
    channel = connect(endpoint, keys, FAULTS)
    assert isinstance(channel, NearChannel)
    assert not channel.over_unix
    assert channel.dropped["fell_back"] == 1
    assert channel.endpoint == endpoint
    assert works(channel)
    channel.close()


def test_a_draft_that_hangs_costs_one_deadline(server: DraftServer, keys: KeyPair, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "s"))
        mute.listen()
        channel = connect(msgspec.structs.replace(server.endpoint(), path=str(tmp_path / "s")), keys, FAULTS)
        assert channel.dropped["fell_back"] == 1
        assert works(channel)
        channel.close()


def test_a_lost_connection_is_replaced(server: DraftServer, keys: KeyPair) -> None:
    channel = connect(server.endpoint(), keys, FAULTS)
    assert isinstance(channel, NearChannel)
    assert works(channel)
    server.revoke(keys.public)
    assert until(lambda: server.stats()["connected:unix"] == 0)
    server.authorize(keys.public)
    assert channel.over_unix
    assert works(channel, 1000)
    assert not channel.over_unix
    assert (channel.dropped["disconnected"], channel.dropped["fell_back"]) == (1, 1)
    channel.close()


@pytest.mark.parametrize("lacking", ["epoll", "room"])
def test_a_draft_without_a_unix_socket_has_zeromq(
    drafter: FakeDrafter, lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if lacking == "epoll":
        monkeypatch.delattr(unix_door.socket, "SO_PEERCRED")
    else:
        long = tmp_path / ("x" * 120)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
    server = DraftServer(drafter, "127.0.0.1", "d", FAULTS)
    server.start()
    assert server.endpoint().path == ""
    keys = KeyPair.new()
    server.authorize(keys.public)
    channel = connect(server.endpoint(), keys, FAULTS)
    assert works(channel)
    channel.close()
    server.stop()


def test_collecting_waits_in_the_kernel(link: UnixChannel) -> None:
    """Nothing to read and nothing to send: no busy waiting until the deadline."""
    began, used = time.perf_counter(), time.process_time()
    assert link.collect(1, 0.3) is None
    assert time.process_time() - used < 0.5 * (time.perf_counter() - began)


def test_a_draft_that_refuses_late_costs_one_deadline(server: DraftServer, keys: KeyPair, tmp_path: Path) -> None:
    """Each attempt has what is left of the time, which may be nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def refuse() -> None:
            connection, _ = listener.accept()
            time.sleep(0.9 * FAULTS.draft_deadline_s)
            connection.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        channel = connect(msgspec.structs.replace(server.endpoint(), path=str(tmp_path / "s")), keys, FAULTS)
        thread.join()
        assert channel.dropped["fell_back"] == 1
        assert works(channel)
        channel.close()
