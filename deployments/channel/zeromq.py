"""The draft channel over ZeroMQ: msgpack messages, CURVE on every socket.

A draft binds one ROUTER socket and lets in only the public keys that were authorised over Serve; a target connects one
DEALER to each draft replica. What a message says about its sender is ignored: sessions are kept per authenticated key.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import MAX_MESSAGE_BYTES, Drafts, Step
from deployments.channel.door import Received
from deployments.channel.endpoint import Endpoint, KeyPair
from deployments.channel.messages import Messages


def _bound(socket: "zmq.Socket[bytes]", faults: FaultPolicy) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, faults.channel_queue)
    socket.setsockopt(zmq.RCVHWM, faults.channel_queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    beat_ms = int(faults.heartbeat_s * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * beat_ms)
    socket.setsockopt(zmq.IPV6, 1)


class ZmqChannel:
    """The target's end; used from the engine's thread only."""

    def __init__(self, endpoint: Endpoint, keys: KeyPair, faults: FaultPolicy) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self.dropped: Counter[str] = Counter()
        self._messages = Messages(self.dropped)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _bound(socket, faults)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # a peer that is away makes post() fail at once instead of queueing
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # where nothing answers, TCP asks again after ever longer times; a link that is back would not be noticed for as long
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(3000 * faults.heartbeat_s))
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        socket.curve_serverkey = endpoint.server_key.encode()
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint.address)
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def post(self, step: Step) -> bool:
        data = self._messages.encode(step)
        if data is None:
            return False
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            self.dropped["not_connected"] += 1
            return False
        return True

    def collect(self, number: int, timeout_s: float) -> Drafts | None:
        until = time.perf_counter() + timeout_s
        while True:
            left = until - time.perf_counter()
            events = dict(self._poller.poll(int(max(0.0, left) * 1e3)))
            if self._socket in events:
                answer = self._messages.answer(self._socket.recv(zmq.DONTWAIT))
                if answer is not None and answer.number == number:
                    return answer
                if answer is not None:
                    self.dropped["late"] += 1
                continue
            if self._monitor in events:
                recv_monitor_message(self._monitor, zmq.DONTWAIT)
                self.dropped["disconnected"] += 1
                return None
            if left <= 0:
                return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


class ZmqDoor:
    """The draft's end: one bound socket, and a thread of ZeroMQ's that asks ``allows`` about each new connection's key."""

    def __init__(
        self, keys: KeyPair, host: str, allows: Callable[[str], bool], dropped: Counter[str], faults: FaultPolicy
    ) -> None:
        self._allows = allows
        self._dropped = dropped
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket, faults)
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_secretkey = keys.secret.encode()
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self.address = f"tcp://{bracketed}:{port}"
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self.pollable: Any = self._socket

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the ZAP thread for each new connection, with the client's key in z85."""
        allowed = self._allows(key.decode())
        if not allowed:
            self._dropped["unauthorised"] += 1
        return allowed

    def start(self) -> None:
        """ZeroMQ's threads run already."""

    def take(self) -> Iterator[Received]:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            key = frames[-1].get("User-Id") if len(frames) == 2 else None
            if isinstance(key, str):
                yield Received(frames[0].bytes, key, frames[1].buffer)
            else:
                self._dropped["foreign"] += 1

    def send(self, peer: Any, data: bytes) -> bool:
        try:
            self._socket.send_multipart([peer, data], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def forget(self, key: str) -> None:
        """Nothing to do: ZeroMQ cannot close one connection, and what still comes over it is dropped as foreign."""

    def stop(self) -> None:
        self._socket.close(0)
        self._authenticator.stop()
        self._context.term()
