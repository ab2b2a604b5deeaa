"""Block sets over ZeroMQ, CURVE on every socket: the receiver asks for chunks of a reference and keeps a few under way.

Each chunk is one question and one answer of at most ``Limits.chunk_bytes``, so that neither end ever holds more than a window
of them in its sockets, and a server needs no memory of what it is in the middle of: it looks the reference up every time.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from hw.kv.store import Store
from hw.kv.transports.base import (
    MAX_REF_BYTES,
    BlockError,
    Bytes,
    Expired,
    Fetched,
    Kind,
    Late,
    Limits,
    Malformed,
    Missing,
    Ref,
    Stale,
    TooLarge,
    Unreachable,
)

logger = logging.getLogger(__name__)

VERSION = 1
_MESSAGE_ROOM = MAX_REF_BYTES + 256  # what a question or the head of an answer may take
_POLL_MS = 50  # how soon a server thread notices that it should end
_FAILURES: dict[str, type[BlockError]] = {kind.code: kind for kind in (Missing, Stale, Expired, Malformed, TooLarge)}

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class KeyPair(Protocol):
    """A CURVE key pair, z85."""

    @property
    def public(self) -> str:
        """The public key."""
        ...

    @property
    def secret(self) -> str:
        """The secret key."""
        ...


class Endpoint(msgspec.Struct, frozen=True):
    """Where one block server listens."""

    name: str  # unique to this start of the server; the handle of its references
    address: str  # tcp://ip:port
    server_key: str  # CURVE public key, z85


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes ``[start, start + nbytes)`` of a block set, please."""

    version: int
    number: _Count  # of the fetch
    ref: Ref
    start: _Count
    nbytes: _Count


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The head of an answer; the bytes are the next frame. ``code`` says why there are none."""

    version: int
    number: _Count
    start: _Count
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""


def _bound(socket: "zmq.Socket[bytes]", limits: Limits, message_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, limits.queue)
    socket.setsockopt(zmq.RCVHWM, limits.queue)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    beat_ms = int(limits.heartbeat_s * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * beat_ms)
    socket.setsockopt(zmq.IPV6, 1)


class BlockServer:
    """Answers for the blocks of one store, in a thread of its own; lets in only the public keys that were authorised."""

    def __init__(self, store: Store, keys: KeyPair, host: str, name: str, limits: Limits | None = None) -> None:
        self.limits = limits or store.limits
        self.counts: Counter[str] = Counter()
        self._store = store
        self._authorised: set[bytes] = set()
        self._decoder = msgspec.msgpack.Decoder(Ask)
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket, self.limits, _MESSAGE_ROOM)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer that finds no room is an error, and counted
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_secretkey = keys.secret.encode()
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self.endpoint = Endpoint(name, f"tcp://{bracketed}:{port}", keys.public)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kv-server-{name}", daemon=True)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the ZAP thread for each new connection, with the client's key in z85."""
        allowed = key in self._authorised
        if not allowed:
            self.counts["unauthorised"] += 1
        return allowed

    def authorize(self, client_public_key: str) -> None:
        """Let a receiver in by its CURVE public key (z85). Idempotent."""
        self._authorised.add(client_public_key.encode())

    def revoke(self, client_public_key: str) -> None:
        """Answer a receiver no more, also over the connection it has."""
        self._authorised.discard(client_public_key.encode())

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Is it answering?"""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close the socket; the store stays as it is."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self.limits.stop_s)
        self._socket.close(0)
        self._authenticator.stop()
        self._context.term()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            try:
                self._serve(self._socket.recv_multipart(zmq.DONTWAIT, copy=False))
            except zmq.ZMQError as error:
                self.counts["not_answered"] += 1
                logger.debug("an answer was not sent: %s", error)

    def _serve(self, frames: list[Any]) -> None:
        ask = self._decode(frames)
        if ask is None:
            return
        identity = frames[0].bytes
        try:
            chunk = self._chunk(ask)
        except BlockError as error:
            self.counts[error.code] += 1
            head = self._encoder.encode(Answer(VERSION, ask.number, ask.start, error.code))
            self._socket.send_multipart([identity, head], zmq.DONTWAIT)
            return
        head = self._encoder.encode(Answer(VERSION, ask.number, ask.start))
        self._socket.send_multipart([identity, head, chunk], zmq.DONTWAIT, copy=False)
        self.counts["chunks"] += 1

    def _chunk(self, ask: Ask) -> bytes:
        if not 0 < ask.nbytes <= self.limits.chunk_bytes or ask.start + ask.nbytes > ask.ref.nbytes:
            raise Malformed("bytes that the block set does not have, or too many at a time")
        with self._store.view(ask.ref) as block:
            return bytes(block.view[ask.start : ask.start + ask.nbytes])  # checked once more on the way out

    def _decode(self, frames: list[Any]) -> Ask | None:
        sender = frames[-1].get("User-Id") if len(frames) == 2 else None
        if sender is None or (sender.encode() if isinstance(sender, str) else sender) not in self._authorised:
            self.counts["foreign"] += 1
            return None
        try:
            ask = self._decoder.decode(frames[1].buffer)
        except msgspec.DecodeError:
            self.counts["malformed"] += 1
            return None
        if ask.version != VERSION:
            self.counts["version"] += 1
            return None
        return ask


class BlockClient:
    """Fetches from block servers. Used by one thread."""

    kind: Kind = "zeromq"

    def __init__(
        self, keys: KeyPair, limits: Limits | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        self._keys = keys
        self._clock = clock
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._number = 0

    def connect(self, endpoint: Endpoint) -> None:
        """Connect to a server; its references can be fetched from then on. Idempotent."""
        if endpoint.name in self._sockets:
            return
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _bound(socket, self.limits, self.limits.chunk_bytes + _MESSAGE_ROOM)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is away
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()
        socket.curve_serverkey = endpoint.server_key.encode()
        socket.connect(endpoint.address)
        self._sockets[endpoint.name] = socket

    def disconnect(self, name: str) -> None:
        """Forget a server."""
        socket = self._sockets.pop(name, None)
        if socket is not None:
            socket.close(0)

    def fetch(self, ref: Ref, deadline_s: float | None = None, out: Bytes | None = None) -> Fetched:
        """A copy of the block set, in ``out`` (contiguous uint8, ``ref.nbytes`` long) where one is given.

        Raises ``Unreachable`` where no such server answers, ``Late``, ``TooLarge``, ``Malformed`` or what the server says
        (``Missing``, ``Stale``, ``Expired``); counted by code, and ``out`` is zeroed.
        """
        try:
            socket = self._admit(ref, out)
        except BlockError as error:
            self.counts[error.code] += 1
            raise
        target = np.empty(ref.nbytes, np.uint8) if out is None else out
        try:
            self._pull(socket, ref, target, self._clock() + (self.limits.fetch_s if deadline_s is None else deadline_s))
        except BlockError as error:
            self.counts[error.code] += 1
            target.fill(0)
            raise
        self.counts["hits"] += 1
        return Fetched(target.data, lambda: None)

    def close(self) -> None:
        """Forget all servers."""
        for name in list(self._sockets):
            self.disconnect(name)

    def _admit(self, ref: Ref, out: Bytes | None) -> "zmq.Socket[bytes]":
        if ref.kind != self.kind or ref.nbytes < 1:
            raise Malformed("not a reference of a block server")
        if ref.nbytes > self.limits.block_bytes:
            raise TooLarge(f"a block set of {ref.nbytes} bytes; at most {self.limits.block_bytes} are taken")
        if out is not None and (out.dtype != np.uint8 or out.shape != (ref.nbytes,) or not out.flags.c_contiguous):
            raise ValueError(f"the destination must be {ref.nbytes} contiguous bytes")
        socket = self._sockets.get(ref.handle)
        if socket is None:
            raise Unreachable("no connection to the server that this reference names; connect to its endpoint first")
        return socket

    def _pull(self, socket: "zmq.Socket[bytes]", ref: Ref, out: Bytes, until: float) -> None:
        self._number += 1
        waiting = list(range(0, ref.nbytes, self.limits.chunk_bytes))[::-1]
        under_way: set[int] = set()
        while waiting or under_way:
            left_ms = max(0, int((until - self._clock()) * 1e3))
            room = bool(waiting) and len(under_way) < self.limits.window
            events = socket.poll(left_ms, zmq.POLLIN | (zmq.POLLOUT if room else 0))
            if not events and until <= self._clock() + 1e-3:
                if not under_way and len(waiting) * self.limits.chunk_bytes >= ref.nbytes:
                    raise Unreachable("no connection within the deadline: the server is away or does not know our key")
                raise Late(f"{len(waiting) + len(under_way)} chunks were missing at the deadline")
            if events & zmq.POLLIN:
                start = self._take(socket.recv_multipart(zmq.DONTWAIT, copy=False), ref, out, under_way)
                under_way.discard(start)
            elif events & zmq.POLLOUT:
                start = waiting.pop()
                nbytes = min(self.limits.chunk_bytes, ref.nbytes - start)
                socket.send(self._encoder.encode(Ask(VERSION, self._number, ref, start, nbytes)), zmq.DONTWAIT)
                under_way.add(start)

    def _take(self, frames: list[Any], ref: Ref, out: Bytes, under_way: set[int]) -> int:
        """Put one answer in its place; where that is, or -1 for one that is dropped."""
        try:
            answer = self._decoder.decode(frames[0].buffer)
        except msgspec.DecodeError:
            self.counts["dropped:malformed"] += 1
            return -1
        if answer.version != VERSION or answer.number != self._number or answer.start not in under_way:
            self.counts["dropped:late" if answer.number < self._number else "dropped:foreign"] += 1
            return -1
        if answer.code:
            failure = _FAILURES.get(answer.code, Missing)
            raise failure(f"the server refuses: {answer.code}")
        chunk = out[answer.start : answer.start + self.limits.chunk_bytes]
        if len(frames) != 2 or frames[1].buffer.nbytes != chunk.nbytes:
            raise Malformed("the server sent another number of bytes than it was asked for")
        np.copyto(chunk, np.frombuffer(frames[1].buffer, np.uint8))
        return int(answer.start)
