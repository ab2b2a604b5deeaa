"""Frames over a stream, whatever pieces it comes in; and the handshake before them."""

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.endpoint import KeyPair, raw_key, text_key
from deployments.channel.frames import FrameReader, FrameTooLargeError, FrameWriter, PeerGoneError
from deployments.channel.handshake import HandshakeError, RefusedError, UnauthorisedError, greet_draft, greet_target

MOST = 1 << 20
Ends = tuple[socket.socket, socket.socket]


def a_pair() -> Ends:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left.setblocking(False)
    right.setblocking(False)
    return left, right


@pytest.fixture
def pair() -> Iterator[Ends]:
    left, right = a_pair()
    yield left, right
    left.close()
    right.close()


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_messages_come_whole_however_the_stream_is_cut(messages: list[bytes], data: st.DataObject) -> None:
    left, right = a_pair()
    with left, right:
        stream = b"".join(len(m).to_bytes(4, "little") + m for m in messages)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        reader, found = FrameReader(right, MOST), []
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            left.sendall(stream[begin:end])
            found += reader.take()
        assert found == messages


def test_what_does_not_fit_is_finished_later_and_nothing_goes_in_between(pair: Ends) -> None:
    left, right = pair
    writer, reader = FrameWriter(left), FrameReader(right, 1 << 25)
    large = bytes(range(256)) * (1 << 14)  # 4 MiB: more than any socket buffer here
    assert writer.send(large)
    assert writer.unfinished
    assert not writer.send(b"between")
    found: list[bytes] = []
    while writer.unfinished:
        found += reader.take()
        writer.flush()
    assert writer.send(b"after")
    found += reader.take()
    found += reader.take()
    assert found == [large, b"after"]


def test_a_full_buffer_takes_nothing(pair: Ends) -> None:
    left, right = pair
    writer = FrameWriter(left)
    sent = 0
    while writer.send(b"x" * 1000):
        sent += 1
        assert sent < 10_000
    reader, found = FrameReader(right, MOST), 0
    while found < sent:
        found += len(reader.take())
        writer.flush()
    assert reader.take() == []


def test_an_announced_size_beyond_the_bound_is_refused_before_it_comes(pair: Ends) -> None:
    left, right = pair
    left.sendall((MOST + 1).to_bytes(4, "little"))
    with pytest.raises(FrameTooLargeError, match=str(MOST + 1)):
        FrameReader(right, MOST).take()


def test_last_words_are_heard_before_the_end_is_told(pair: Ends) -> None:
    left, right = pair
    FrameWriter(left).send(b"bye")
    left.close()
    reader = FrameReader(right, MOST)
    assert reader.take() == [b"bye"]
    with pytest.raises(PeerGoneError):
        reader.take()


# --- handshake --------------------------------------------------------------------------------------------------------


def shake(target: KeyPair, told: str, draft: KeyPair, allowed: set[str], claim: str = "") -> tuple[object, object]:
    """What each end makes of it: the exception, or for the draft the key and for the target None.

    ``told``: the draft's key as the target was told it; ``claim``: a public key that the target claims to own.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    result: list[object] = []

    def draft_end() -> None:
        with far:
            try:
                result.append(greet_target(far, draft, lambda key: key in allowed, 2.0))
            except OSError as error:
                result.append(error)

    thread = threading.Thread(target=draft_end)
    thread.start()
    ours: object = None
    with near:
        try:
            greet_draft(near, KeyPair(claim or target.public, target.secret), told, 2.0)
        except OSError as error:
            ours = error
    thread.join()
    return ours, result[0]


def test_both_ends_learn_whom_they_talk_to() -> None:
    target, draft = KeyPair.new(), KeyPair.new()
    assert shake(target, draft.public, draft, {target.public}) == (None, target.public)


def test_a_key_nobody_let_in_is_refused() -> None:
    target, draft = KeyPair.new(), KeyPair.new()
    ours, theirs = shake(target, draft.public, draft, set())
    assert isinstance(ours, RefusedError)
    assert isinstance(theirs, UnauthorisedError)


def test_knowing_an_authorised_public_key_is_not_enough() -> None:
    thief, target, draft = KeyPair.new(), KeyPair.new(), KeyPair.new()
    _, theirs = shake(thief, draft.public, draft, {target.public}, claim=target.public)
    assert isinstance(theirs, HandshakeError)


def test_the_last_proof_is_looked_at() -> None:
    """A thief who does not care whether the draft is the right one and goes on regardless."""
    target, draft = KeyPair.new(), KeyPair.new()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        near.sendall(b"CHAINUX1" + raw_key(target.public) + bytes(32) + bytes(32))
        with pytest.raises(UnauthorisedError, match="own"):
            greet_target(far, draft, lambda key: True, 2.0)


def test_a_draft_that_took_anothers_place_is_not_talked_to() -> None:
    target, draft, other = KeyPair.new(), KeyPair.new(), KeyPair.new()
    ours, _ = shake(target, draft.public, other, {target.public})
    assert isinstance(ours, HandshakeError)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n" * 8, b"CHAINUX1" + bytes(64)])
def test_noise_is_refused(said: bytes) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        near.sendall(said)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError):  # the last is the point that has the same secret with every key
            greet_target(far, KeyPair.new(), lambda key: True, 2.0)


def test_silence_has_an_end() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far, pytest.raises(TimeoutError):
        greet_target(far, KeyPair.new(), lambda key: True, 0.05)


@given(st.binary(min_size=32, max_size=32))
def test_keys_survive_their_text(raw: bytes) -> None:
    assert raw_key(text_key(raw)) == raw


@pytest.mark.parametrize("text", ["", "short", "\x7f" * 40, "é" * 40])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        raw_key(text)
