"""The target's end of the draft channel on one machine: a Unix socket, woken by the kernel without threads in between."""

import select
import socket
import time
from collections import Counter, deque

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import MAX_MESSAGE_BYTES, Drafts, Step
from deployments.channel.endpoint import Endpoint, KeyPair
from deployments.channel.frames import FrameReader, FrameWriter
from deployments.channel.handshake import RefusedError, greet_draft
from deployments.channel.messages import Messages

SEND_BUFFER_BYTES = 1 << 20  # what the kernel takes at once: sessions that open with long prompts go in one piece
_AGAIN_S = 0.02  # between two attempts to be let in


def _open(endpoint: Endpoint, keys: KeyPair, timeout_s: float) -> socket.socket:
    """A connection on which both ends proved their keys; raises ``OSError``."""
    until = time.monotonic() + timeout_s
    left = timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            connection.settimeout(left)
            connection.connect(endpoint.path)
            greet_draft(connection, keys, endpoint.server_key, left)
            connection.setblocking(False)
            return connection
        except (RefusedError, ConnectionResetError):
            connection.close()
            left = until - time.monotonic() - _AGAIN_S
            if left <= 0:
                raise
            time.sleep(_AGAIN_S)  # the draft is told whom to let in on another way: we may only be early
        except BaseException:
            connection.close()
            raise


class UnixChannel:
    """Used from the engine's thread only. A connection that broke is :attr:`lost` for good."""

    def __init__(self, endpoint: Endpoint, keys: KeyPair, faults: FaultPolicy) -> None:
        """Connect and prove both ends; raises ``OSError`` when that fails or takes longer than a draft may."""
        self.endpoint = endpoint
        self.name = endpoint.name
        self.dropped: Counter[str] = Counter()
        self.lost = False
        self._messages = Messages(self.dropped)
        self._frames: deque[bytes] = deque()
        self._socket = _open(endpoint, keys, faults.draft_deadline_s)
        self._reader = FrameReader(self._socket, MAX_MESSAGE_BYTES)
        self._writer = FrameWriter(self._socket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def post(self, step: Step) -> bool:
        if self.lost:
            self.dropped["not_connected"] += 1
            return False
        data = self._messages.encode(step)
        if data is None:
            return False
        try:
            sent = self._writer.send(data)
        except OSError:
            self._lose()
            return False
        if not sent:
            self.dropped["queue_full"] += 1
        return sent

    def collect(self, number: int, timeout_s: float) -> Drafts | None:
        until = time.perf_counter() + timeout_s
        while not self.lost:
            while self._frames:
                answer = self._messages.answer(self._frames.popleft())
                if answer is not None and answer.number == number:
                    return answer
                if answer is not None:
                    self.dropped["late"] += 1
            left = until - time.perf_counter()
            try:
                if not self._wait(max(0.0, left)) and left <= 0:
                    return None
            except OSError:
                self._lose()
        return None

    def close(self) -> None:
        self.lost = True
        self._socket.close()

    def _wait(self, timeout_s: float) -> bool:
        """Until there are messages or part of one; goes on with sending meanwhile. False when nothing came."""
        unfinished = self._writer.unfinished
        if unfinished:
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
        events = self._poll.poll(timeout_s * 1e3)
        if unfinished:
            self._writer.flush()
            self._poll.modify(self._socket, select.POLLIN)
        if not events or events[0][1] == select.POLLOUT:
            return False
        self._frames.extend(self._reader.take())
        return True

    def _lose(self) -> None:
        self.dropped["disconnected"] += 1
        self.close()
