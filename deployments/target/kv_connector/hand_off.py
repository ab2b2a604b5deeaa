"""Asking another replica for a prompt by the name of its tokens: one question, one answer with a lease on the block set.

Over ZeroMQ with CURVE at both ends. The bytes themselves come over whichever transport the two ends share.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from deployments.channel.endpoint import KeyPair
from deployments.target.kv_connector.prompts import Place
from deployments.target.kv_connector.settings import Keys
from hw.kv.manifest import MAX_BYTES
from hw.kv.transports.base import (
    DIGEST_BYTES,
    MAX_REF_BYTES,
    MAX_SALT_BYTES,
    BlockError,
    Limits,
    Malformed,
    Missing,
    Ref,
    Stale,
    Unavailable,
    Unreachable,
)
from hw.kv.transports.choose import Facts

logger = logging.getLogger(__name__)

VERSION = 1
_POLL_MS = 50  # how soon the server's thread notices that it should end
_QUESTION_BYTES = 8192
_ANSWER_BYTES = MAX_BYTES + MAX_REF_BYTES + 1024
_FAILURES: dict[str, type[BlockError]] = {kind.code: kind for kind in (Missing, Stale, Unavailable, Malformed)}

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Question(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``find``: a prompt, please. ``done``: its lease is not needed any more; nothing comes back."""

    version: int
    number: _Number
    kind: Literal["find", "done"]
    salt: Annotated[bytes, msgspec.Meta(max_length=MAX_SALT_BYTES)]
    prefix: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    facts: Facts = Facts()  # of who asks
    lease: _Number = 0  # that is done


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``code`` says why there is nothing; otherwise the manifest and where the block set lies."""

    version: int
    number: _Number
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    manifest: bytes = b""
    ref: Ref | None = None
    blocks: Annotated[str, msgspec.Meta(max_length=256)] = ""  # address of the block server, for references to it


class Shelf(Protocol):
    """What a server gives out. Called from its thread."""

    def find(self, salt: bytes, prefix: bytes, facts: Facts) -> tuple[bytes, Ref, str]:
        """Manifest, reference and block server of a prompt; raises a BlockError."""
        ...

    def done(self, salt: bytes, prefix: bytes, lease: int) -> None:
        """A lease on it is not needed any more."""
        ...


class HandOffServer:
    """Answers for one shelf in a thread of its own; lets in only who knows what the replicas share.

    Raises zmq.ZMQError where ``host`` is not an address of this machine.
    """

    def __init__(self, shelf: Shelf, keys: Keys, host: str, epoch: bytes, limits: Limits) -> None:
        self.counts: Counter[str] = Counter()
        self._shelf = shelf
        self._client = keys.client.public.encode()
        self._limits = limits
        self._decoder = msgspec.msgpack.Decoder(Question)
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket, limits, _QUESTION_BYTES)
        self._socket.curve_server = True
        _identify(self._socket, keys.server)
        bracketed = f"[{host}]" if ":" in host else host
        try:
            port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        except zmq.ZMQError:
            self._end()
            raise
        self.place = Place(epoch.hex(), f"tcp://{bracketed}:{port}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv hand-off", daemon=True)
        self._thread.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the ZAP thread for each new connection, with the client's key in z85."""
        if key != self._client:
            self.counts["unauthorised"] += 1
        return key == self._client

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._stop.set()
        self._thread.join(self._limits.stop_s)
        self._end()

    def _end(self) -> None:
        self._socket.close(0)
        self._authenticator.stop()
        self._context.term()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
                answer = self._answer(frames[1]) if len(frames) == 2 else None
                if answer is not None:
                    self._socket.send_multipart([frames[0], self._encoder.encode(answer)], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                self.counts["not_answered"] += 1
                logger.debug("a question for a prompt was not answered: %s", error)

    def _answer(self, frame: bytes) -> Answer | None:
        try:
            asked = self._decoder.decode(frame)
        except msgspec.DecodeError:
            self.counts["malformed"] += 1
            return None
        if asked.version != VERSION:
            self.counts["version"] += 1
            return None
        if asked.kind == "done":
            self._shelf.done(asked.salt, asked.prefix, asked.lease)
            return None
        try:
            manifest, ref, blocks = self._shelf.find(asked.salt, asked.prefix, asked.facts)
        except BlockError as error:
            self.counts[error.code] += 1
            return Answer(VERSION, asked.number, error.code)
        self.counts["found"] += 1
        return Answer(VERSION, asked.number, "", manifest, ref, blocks)


class HandOffClient:
    """Asks servers. Used by one thread."""

    def __init__(
        self,
        keys: Keys,
        facts: Facts,
        limits: Limits,
        pause_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._keys = keys
        self._facts = facts
        self._limits = limits
        self._pause_s = pause_s
        self._clock = clock
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()  # by address, least recently used first
        self._away: dict[str, float] = {}  # address -> when it may be asked again
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._number = 0

    def find(self, place: Place, salt: bytes, prefix: bytes) -> tuple[bytes, Ref, str]:
        """Manifest, leased reference and block server of a prompt.

        Raises Unreachable where nobody answers within ``Limits.fetch_s``, and at once for a while after that; Malformed;
        or what the server says (Missing, ...).
        """
        if self._away.get(place.address, 0.0) > self._clock():
            raise Unreachable("this producer did not answer a moment ago")
        self._number += 1
        question = Question(VERSION, self._number, "find", salt, prefix, self._facts)
        socket = self._socket(place.address)
        until = self._clock() + self._limits.fetch_s
        try:
            self._wait(socket, zmq.POLLOUT, until)
            socket.send(self._encoder.encode(question), zmq.DONTWAIT)
            while True:
                self._wait(socket, zmq.POLLIN, until)
                answer = self._decode(socket.recv(zmq.DONTWAIT))
                if answer.number == self._number:  # else one that came after its question had been given up
                    break
        except Unreachable:
            self._away[place.address] = self._clock() + self._pause_s
            self._drop(place.address)
            raise
        self._away.pop(place.address, None)
        if answer.code:
            raise _FAILURES.get(answer.code, Missing)(f"the producer says: {answer.code}")
        if answer.ref is None:
            raise Malformed("an answer without a reference")
        return answer.manifest, answer.ref, answer.blocks

    def done(self, place: Place, salt: bytes, prefix: bytes, lease: int) -> None:
        """Tell the producer that a lease is not needed any more; it would end by itself."""
        socket = self._sockets.get(place.address)
        if socket is not None and socket.poll(0, zmq.POLLOUT):
            socket.send(self._encoder.encode(Question(VERSION, 0, "done", salt, prefix, lease=lease)), zmq.DONTWAIT)

    def close(self) -> None:
        """Forget all servers."""
        for address in list(self._sockets):
            self._drop(address)

    def _wait(self, socket: "zmq.Socket[bytes]", event: int, until: float) -> None:
        if not socket.poll(max(0, int((until - self._clock()) * 1e3)), event):
            raise Unreachable("no answer: the producer is gone, or does not share our secret")

    def _decode(self, frame: bytes) -> Answer:
        try:
            answer = self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            raise Malformed(f"not an answer: {error}") from None
        if answer.version != VERSION:
            raise Malformed("an answer of another version")
        return answer

    def _socket(self, address: str) -> "zmq.Socket[bytes]":
        if address not in self._sockets:
            while len(self._sockets) >= self._limits.arenas:
                self._drop(next(iter(self._sockets)))
            self._sockets[address] = self._connect(address)
        self._sockets.move_to_end(address)
        return self._sockets[address]

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _bound(socket, self._limits, _ANSWER_BYTES)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is away
        _identify(socket, self._keys.client)
        socket.curve_serverkey = self._keys.server.public.encode()
        socket.connect(address)
        return socket

    def _drop(self, address: str) -> None:
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close(0)


def _identify(socket: "zmq.Socket[bytes]", keys: KeyPair) -> None:
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()


def _bound(socket: "zmq.Socket[bytes]", limits: Limits, message_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, limits.queue)
    socket.setsockopt(zmq.RCVHWM, limits.queue)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    socket.setsockopt(zmq.IPV6, 1)
    beat_ms = int(limits.heartbeat_s * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * beat_ms)
