"""A draft's end of the channel: one thread serves what comes over ZeroMQ and over Unix sockets."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from typing import NamedTuple

import msgspec
import zmq

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Drafter, Drafts, Step
from deployments.channel.arrivals import ArrivalClock
from deployments.channel.door import Door, Received
from deployments.channel.endpoint import Endpoint, KeyPair, this_machine
from deployments.channel.messages import Messages
from deployments.channel.unix_door import UnixDoor
from deployments.channel.zeromq import ZmqDoor

logger = logging.getLogger(__name__)

_IDLE_SLICE_S = 0.02  # idle work between two looks at the sockets; it is interruptible within one draft step anyway
_QUIET_MS = 50  # one wait of a draft with nothing to do; how soon it notices that it should stop


class _Waiting(NamedTuple):
    """A message to be worked on."""

    door: Door
    received: Received
    step: Step
    arrived: float  # seconds of ``time.perf_counter``


class DraftServer:
    """One thread that decodes, lets the drafter work, answers, and gives it idle time in between."""

    def __init__(self, drafter: Drafter, host: str, name: str, faults: FaultPolicy) -> None:
        self.name = name
        self.dropped: Counter[str] = Counter()
        self._drafter = drafter
        self._keys = KeyPair.new()
        self._authorised: set[str] = set()
        self._gone: set[str] = set()
        self._messages = Messages(self.dropped)
        self._zmq = ZmqDoor(self._keys, host, self._allows, self.dropped, faults)
        self.address = self._zmq.address
        self._unix = self._unix_door(faults)
        self._doors: list[Door] = [self._zmq] if self._unix is None else [self._zmq, self._unix]
        self._poller = zmq.Poller()
        for door in self._doors:
            self._poller.register(door.pollable, zmq.POLLIN)
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        self._by_pollable = {door.pollable: door for door in self._doors}
        self._arrivals = ArrivalClock(door.descriptor for door in self._doors)
        self._arrived: dict[Door, float | None] = {}  # doors with something to read: when it came, if that was seen
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"draft-server-{name}", daemon=True)

    def _unix_door(self, faults: FaultPolicy) -> UnixDoor | None:
        try:
            return UnixDoor(self._keys, self._allows, self._gone.add, self.dropped, faults)
        except OSError as error:
            logger.warning("draft %s has no Unix socket, targets on this machine use ZeroMQ: %s", self.name, error)
            return None

    @property
    def public_key(self) -> str:
        return self._keys.public

    def endpoint(self, vocab_size: int = 0) -> Endpoint:
        path, machine = ("", "") if self._unix is None else (self._unix.path, this_machine())
        return Endpoint(self.name, self.address, self.public_key, vocab_size, path, machine)

    def authorize(self, client_public_key: str) -> None:
        """Let a target in by its CURVE public key (z85). Idempotent."""
        self._authorised.add(client_public_key)

    def revoke(self, client_public_key: str) -> None:
        """Shut a target out and forget its sessions."""
        self._authorised.discard(client_public_key)
        self._gone.add(client_public_key)

    def start(self) -> None:
        for door in self._doors:
            door.start()
        self._arrivals.start()
        self._thread.start()

    def wake(self) -> None:
        """Have the drafter look for idle work now rather than after the present wait. Callable from any thread."""
        with contextlib.suppress(OSError):  # signals enough wait already, or the server has stopped
            self._wake.send(b"\0")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and close the sockets; raises what the thread died of, if it did."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._arrivals.stop()
        for door in self._doors:
            door.stop()
        for end in (self._wake, self._woken):
            end.close()
        if self._failure is not None:
            raise RuntimeError("draft server thread failed") from self._failure

    def stats(self) -> dict[str, float]:
        """Dropped messages by reason, and how many targets are connected over a Unix socket."""
        near = 0 if self._unix is None else self._unix.connected
        return {"connected:unix": float(near)} | {f"dropped:{why}": float(n) for why, n in self.dropped.items()}

    def _allows(self, key: str) -> bool:
        return key in self._authorised

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle = getattr(self._drafter, "idle", None)
        busy = True  # idle work left?
        try:
            while not self._stop.is_set():
                while self._gone:
                    self._forget(self._gone.pop())
                if self._waiting(0 if busy and idle is not None else _QUIET_MS):
                    self._serve()
                    busy = True
                elif idle is not None:
                    busy = bool(idle(_IDLE_SLICE_S, lambda: self._stop.is_set() or self._waiting()))
        except BaseException as error:
            self._failure = error
            logger.exception("draft server %s stopped", self.name)

    def _forget(self, key: str) -> None:
        if not self._allows(key):  # shut out; one that only left may be back already
            for door in self._doors:
                door.forget(key)
        self._drafter.disconnect(key)

    def _waiting(self, timeout_ms: int = 0) -> bool:
        """Is there a message? Remembers when it came; a signal without one was ZeroMQ's own and counts for nothing."""
        signalled = self._arrivals.take()
        ready = [self._by_pollable.get(pollable) for pollable, _ in self._poller.poll(timeout_ms)]
        for door in ready:
            if door is None:
                self._woken.recv(4096)
                continue
            if self._arrived.get(door) is None:
                self._arrived[door] = signalled.get(door.descriptor) if timeout_ms == 0 else None
        return any(door is not None for door in ready)

    def _serve(self) -> None:
        """Take everything that waits, so that a target that has moved on does not wait behind its own past."""
        waiting = self._take()
        newest: dict[str, int] = {}
        for item in waiting:
            newest[item.step.target] = max(item.step.number, newest.get(item.step.target, item.step.number))
        latest = []
        for item in waiting:
            if item.step.number == newest[item.step.target]:
                latest.append(item)
                continue
            # superseded: keep its sessions in step, draft nothing
            commits = [msgspec.structs.replace(commit, want=0) for commit in item.step.commits]
            self._drafter.step(msgspec.structs.replace(item.step, commits=commits))
            self.dropped["superseded"] += 1
        if not latest:
            return
        for item, answer in zip(latest, self._answers(latest), strict=True):
            if not any(commit.want for commit in item.step.commits):
                continue  # closes and announcements: nobody waits
            data = self._messages.encode(answer)
            if data is None or not item.door.send(item.received.peer, data):
                self.dropped["not_answered"] += 1

    def _take(self) -> list[_Waiting]:
        now = time.perf_counter()
        arrived, self._arrived = self._arrived, {}
        waiting = []
        for door, at in arrived.items():
            for received in door.take():
                if not self._allows(received.key):
                    self.dropped["foreign"] += 1
                    continue
                step = self._messages.step(received.data)
                if step is not None:
                    step = msgspec.structs.replace(step, target=received.key)
                    waiting.append(_Waiting(door, received, step, at or now))
        return waiting

    def _answers(self, latest: list[_Waiting]) -> list[Drafts]:
        """One answer for each target that waits; a drafter that can works for all of them together."""
        now = time.perf_counter()
        steps = [
            msgspec.structs.replace(item.step, deadline_s=max(0.0, item.step.deadline_s - (now - item.arrived)))
            for item in latest
        ]
        together = getattr(self._drafter, "step_together", None)
        answers = together(steps) if together is not None else [self._drafter.step(step) for step in steps]
        return [
            msgspec.structs.replace(answer, queue_s=now - item.arrived)
            for answer, item in zip(answers, latest, strict=True)
        ]
