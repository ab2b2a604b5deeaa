"""The draft's end of Unix sockets: lets targets of this machine in, reads and answers without ever waiting for one."""

import logging
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import MAX_MESSAGE_BYTES
from deployments.channel.door import Received
from deployments.channel.endpoint import KeyPair
from deployments.channel.frames import FrameReader, FrameTooLargeError, FrameWriter
from deployments.channel.handshake import UnauthorisedError, greet_target
from deployments.channel.unix import SEND_BUFFER_BYTES

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5  # between attempts to accept while that fails


class _Connection:
    """One target that proved its key."""

    def __init__(self, connection: socket.socket, key: str) -> None:
        self.socket = connection
        self.key = key
        self.descriptor = connection.fileno()
        self.reader = FrameReader(connection, MAX_MESSAGE_BYTES)
        self.writer = FrameWriter(connection)


class UnixDoor:
    """A listening socket in a folder only this user can enter.

    A thread of its own accepts and shakes hands; what is let in then belongs to the drafting thread. All connections are
    behind one epoll descriptor, so that the drafting thread waits for them and for ZeroMQ in one call.
    """

    def __init__(
        self,
        keys: KeyPair,
        allows: Callable[[str], bool],
        gone: Callable[[str], None],
        dropped: Counter[str],
        faults: FaultPolicy,
    ) -> None:
        """``gone`` is told of a target's key when its last connection ended. Raises ``OSError`` where there can be no such socket."""
        if not hasattr(select, "epoll") or not hasattr(socket, "SO_PEERCRED"):
            raise OSError("no epoll or no peer credentials on this system")
        self._keys = keys
        self._allows = allows
        self._gone = gone
        self._dropped = dropped
        self._faults = faults
        self._folder = TemporaryDirectory(prefix="draft-")  # mode 0700
        self.path = str(Path(self._folder.name) / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.path)  # fails where the path is longer than 107 bytes
            self._listener.listen(faults.channel_queue)
        except OSError:
            self._listener.close()
            self._folder.cleanup()
            raise
        self._epoll = select.epoll()
        self.descriptor = self.pollable = self._epoll.fileno()
        self._connections: dict[int, _Connection] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="draft-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def connected(self) -> int:
        """Targets that are connected now."""
        return len(self._connections)

    def stop(self) -> None:
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        for connection in self._connections.values():
            connection.socket.close()
        self._epoll.close()
        self._folder.cleanup()

    # --- the thread that accepts ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # out of descriptors, for example: targets then use ZeroMQ
                if not self._stop.is_set():
                    logger.warning("cannot accept on %s: %s", self.path, error)
                    self._stop.wait(_PAUSE_S)
                continue
            try:
                self._let_in(connection)
            except UnauthorisedError:
                self._dropped["unauthorised"] += 1
                connection.close()
            except OSError:
                self._dropped["handshake"] += 1
                connection.close()

    def _let_in(self, connection: socket.socket) -> None:
        if len(self._connections) >= self._faults.channel_queue:
            raise ConnectionError("too many connections")
        key = greet_target(connection, self._keys, self._allows, self._faults.heartbeat_s)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.setblocking(False)
        known = _Connection(connection, key)
        self._connections[known.descriptor] = known
        self._epoll.register(known.descriptor, select.EPOLLIN)

    # --- the drafting thread --------------------------------------------------------------------------------------

    def take(self) -> Iterator[Received]:
        for descriptor, events in self._epoll.poll(0):
            connection = self._connections[descriptor]
            try:
                if events & select.EPOLLOUT and connection.writer.flush():
                    self._epoll.modify(descriptor, select.EPOLLIN)
                messages = connection.reader.take() if events & ~select.EPOLLOUT else []
            except FrameTooLargeError:
                self._dropped["too_large"] += 1
                self._close(connection)
                continue
            except OSError:
                self._close(connection)
                continue
            for data in messages:
                yield Received(connection, connection.key, data)

    def send(self, peer: Any, data: bytes) -> bool:
        connection: _Connection = peer
        if self._connections.get(connection.descriptor) is not connection:
            return False  # it left while the draft worked
        try:
            sent = connection.writer.send(data)
        except OSError:
            self._close(connection)
            return False
        if connection.writer.unfinished:
            self._epoll.modify(connection.descriptor, select.EPOLLIN | select.EPOLLOUT)
        return sent

    def forget(self, key: str) -> None:
        for connection in list(self._connections.values()):
            if connection.key == key:
                self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._epoll.unregister(connection.descriptor)
        del self._connections[connection.descriptor]
        connection.socket.close()
        if all(other.key != connection.key for other in list(self._connections.values())):
            self._gone(connection.key)
