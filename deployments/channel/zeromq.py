"""The draft channel over ZeroMQ: msgpack messages, CURVE on every socket.

A draft binds one ROUTER socket and lets in only the public keys that were authorised over Serve; a target connects one
DEALER to each draft replica. What a message says about its sender is ignored: sessions are kept per authenticated key.
"""

import logging
import select
import threading
import time
from collections import Counter
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Drafter, Drafts, Step

logger = logging.getLogger(__name__)

_CLOCK_TICK_S = 0.5  # how soon the arrival clock notices that it should stop
_IDLE_SLICE_S = 0.02  # idle work between two looks at the socket; it is interruptible within one draft step anyway


class Endpoint(msgspec.Struct, frozen=True):
    """Where and with which key one draft replica listens."""

    name: str  # unique to this start of the replica, so that a restarted one is a new draft
    address: str  # tcp://ip:port
    server_key: str  # CURVE public key, z85
    vocab_size: int = 0


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, z85. Lives in memory only."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> "KeyPair":
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:  # the secret must not reach a log
        return f"KeyPair(public={self.public!r})"


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
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Drafts)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _bound(socket, faults)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # a peer that is away makes post() fail at once instead of queueing
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
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
        data = self._encoder.encode(step)
        if len(data) > MAX_MESSAGE_BYTES:
            self.dropped["too_large"] += 1
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
                answer = self._decode(self._socket.recv(zmq.DONTWAIT))
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

    def _decode(self, data: bytes) -> Drafts | None:
        try:
            answer = self._decoder.decode(data)
        except msgspec.DecodeError:
            self.dropped["malformed"] += 1
            return None
        if answer.version != PROTOCOL_VERSION:
            self.dropped["version"] += 1
            return None
        return answer

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


class ArrivalClock:
    """When the first unread message came, seen by a thread while the drafting thread computes.

    It only watches the socket's file descriptor, edge by edge: the socket itself belongs to the drafting thread. Without
    epoll (Linux has it) nothing is seen and times are those of reading.
    """

    def __init__(self, descriptor: int) -> None:
        self._at: float | None = None
        self._stop = threading.Event()
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        if self._poll is not None:
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._thread = threading.Thread(target=self._run, name="draft-arrivals", daemon=True)

    def start(self) -> None:
        if self._poll is not None:
            self._thread.start()

    def take(self) -> float | None:
        """Seconds of ``time.perf_counter`` at which it was first signalled since the last call."""
        at, self._at = self._at, None
        return at

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._poll is not None:
            self._poll.close()

    def _run(self) -> None:
        assert self._poll is not None
        while not self._stop.is_set():
            if self._poll.poll(_CLOCK_TICK_S) and self._at is None:
                self._at = time.perf_counter()


class DraftServer:
    """A draft's end: one thread that decodes, lets the drafter work, answers, and gives it idle time in between."""

    def __init__(self, drafter: Drafter, host: str, name: str, faults: FaultPolicy) -> None:
        self.name = name
        self.dropped: Counter[str] = Counter()
        self._drafter = drafter
        self._keys = KeyPair.new()
        self._authorised: set[bytes] = set()
        self._gone: set[bytes] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Step)
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket, faults)
        self._socket.curve_server = True
        self._socket.curve_publickey = self._keys.public.encode()
        self._socket.curve_secretkey = self._keys.secret.encode()
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self.address = f"tcp://{bracketed}:{port}"
        self._arrivals = ArrivalClock(int(self._socket.getsockopt(zmq.FD)))
        self._arrived: float | None = None  # when the message came that is about to be read
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"draft-server-{name}", daemon=True)

    @property
    def public_key(self) -> str:
        return self._keys.public

    def endpoint(self, vocab_size: int = 0) -> Endpoint:
        return Endpoint(self.name, self.address, self.public_key, vocab_size)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the ZAP thread for each new connection, with the client's key in z85."""
        allowed = key in self._authorised
        if not allowed:
            self.dropped["unauthorised"] += 1
        return allowed

    def authorize(self, client_public_key: str) -> None:
        """Let a target in by its CURVE public key (z85). Idempotent."""
        self._authorised.add(client_public_key.encode())

    def revoke(self, client_public_key: str) -> None:
        """Shut a target out and forget its sessions."""
        key = client_public_key.encode()
        self._authorised.discard(key)
        self._gone.add(key)

    def start(self) -> None:
        self._arrivals.start()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and close the socket; raises what the thread died of, if it did."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._arrivals.stop()
        self._socket.close(0)
        self._authenticator.stop()
        self._context.term()
        if self._failure is not None:
            raise RuntimeError("draft server thread failed") from self._failure

    def stats(self) -> dict[str, float]:
        return {f"dropped:{reason}": float(count) for reason, count in self.dropped.items()}

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle = getattr(self._drafter, "idle", None)
        busy = True  # idle work left?
        try:
            while not self._stop.is_set():
                while self._gone:
                    self._drafter.disconnect(self._gone.pop().decode())
                if self._waiting(0 if busy and idle is not None else 50):
                    self._serve()
                    busy = True
                elif idle is not None:
                    busy = bool(idle(_IDLE_SLICE_S, lambda: self._stop.is_set() or self._waiting()))
        except BaseException as error:
            self._failure = error
            logger.exception("draft server %s stopped", self.name)

    def _waiting(self, timeout_ms: int = 0) -> bool:
        """Is there a message? Remembers when it came; a signal without one was ZeroMQ's own and counts for nothing."""
        signalled = self._arrivals.take()
        if not self._socket.poll(timeout_ms):
            return False
        if timeout_ms == 0 and self._arrived is None:
            self._arrived = signalled
        return True

    def _serve(self) -> None:
        """Take everything that waits, so that a target that has moved on does not wait behind its own past."""
        waiting: list[tuple[bytes, Step, float]] = []
        arrived, self._arrived = self._arrived or time.perf_counter(), None
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            step = self._decode(frames)
            if step is not None:
                waiting.append((frames[0].bytes, step, arrived))
        newest = {step.target: step.number for _, step, _ in waiting}
        latest = []
        for identity, step, received in waiting:
            if step.number == newest[step.target]:
                latest.append((identity, step, received))
                continue
            # superseded: keep its sessions in step, draft nothing
            commits = [msgspec.structs.replace(commit, want=0) for commit in step.commits]
            self._drafter.step(msgspec.structs.replace(step, commits=commits))
            self.dropped["superseded"] += 1
        for (identity, step, _), answer in zip(latest, self._answers(latest), strict=True):
            if not any(commit.want for commit in step.commits):
                continue  # closes and announcements: nobody waits
            try:
                self._socket.send_multipart([identity, self._encoder.encode(answer)], zmq.DONTWAIT)
            except zmq.ZMQError:
                self.dropped["not_answered"] += 1

    def _answers(self, latest: list[tuple[bytes, Step, float]]) -> list[Drafts]:
        """One answer for each target that waits; a drafter that can works for all of them together."""
        now = time.perf_counter()
        steps = [
            msgspec.structs.replace(step, deadline_s=max(0.0, step.deadline_s - (now - received)))
            for _, step, received in latest
        ]
        together = getattr(self._drafter, "step_together", None)
        answers = together(steps) if together is not None else [self._drafter.step(step) for step in steps]
        return [
            msgspec.structs.replace(answer, queue_s=now - received)
            for answer, (_, _, received) in zip(answers, latest, strict=True)
        ]

    def _decode(self, frames: list[Any]) -> Step | None:
        key = frames[-1].get("User-Id") if len(frames) == 2 else None
        sender = key.encode() if isinstance(key, str) else key
        if sender is None or sender not in self._authorised:
            self.dropped["foreign"] += 1
            return None
        try:
            step = self._decoder.decode(frames[1].buffer)
        except msgspec.DecodeError:
            self.dropped["malformed"] += 1
            return None
        if step.version != PROTOCOL_VERSION:
            self.dropped["version"] += 1
            return None
        return msgspec.structs.replace(step, target=sender.decode())
