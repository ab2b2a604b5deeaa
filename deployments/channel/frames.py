"""Messages over a stream socket that never waits: four bytes of length, little-endian, then the message."""

import socket

_LENGTH_BYTES = 4
_CHUNK_BYTES = 1 << 16  # of one read; a message of one sequence is a hundred


class PeerGoneError(ConnectionError):
    """The other end closed the connection."""


class FrameTooLargeError(ConnectionError):
    """A frame announces more bytes than a message may have: what follows cannot be read, close the connection."""


class FrameReader:
    """Puts messages together from what has come so far; holds at most one unfinished one, never more than was sent."""

    def __init__(self, connection: socket.socket, most_bytes: int) -> None:
        self._connection = connection
        self._most_bytes = most_bytes
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._held = bytearray()

    def take(self) -> list[bytes]:
        """Every whole message that is there, without waiting and never more than ``most_bytes`` and a frame's rest at once.

        Raises :class:`PeerGoneError`, :class:`FrameTooLargeError` or another ``OSError``; the connection is then of no more use.
        """
        read = 0
        while read <= self._most_bytes:
            try:
                count = self._connection.recv_into(self._chunk)
            except BlockingIOError:
                break
            if count == 0:
                if read:
                    break  # first what it said before; the next call ends here again
                raise PeerGoneError("closed by the other end")
            self._held += self._chunk[:count]
            read += count
            if count < _CHUNK_BYTES:  # that was all of it: spares the read that would say so
                break
        return self._split()

    def _split(self) -> list[bytes]:
        found: list[bytes] = []
        begin, held = 0, self._held
        while len(held) - begin >= _LENGTH_BYTES:
            body = begin + _LENGTH_BYTES
            length = int.from_bytes(held[begin:body], "little")
            if length > self._most_bytes:
                raise FrameTooLargeError(f"a frame of {length} bytes; {self._most_bytes} are allowed")
            if len(held) - body < length:
                break
            found.append(bytes(held[body : body + length]))
            begin = body + length
        del held[:begin]
        return found


class FrameWriter:
    """Sends without waiting. What the socket takes only a part of is finished later; until then nothing else goes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = memoryview(b"")

    @property
    def unfinished(self) -> bool:
        """Whether :meth:`flush` is to be called once the socket can be written."""
        return bool(self._rest)

    def send(self, message: bytes) -> bool:
        """False when the other end is so far behind that nothing fits; raises ``OSError`` when it is gone."""
        if not self.flush():
            return False
        frame = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        sent = self._write(frame)
        if sent:
            self._rest = memoryview(frame)[sent:]
        return sent > 0

    def flush(self) -> bool:
        """Go on with an unfinished message; True when none is left. Raises ``OSError`` when the other end is gone."""
        if self._rest:
            self._rest = self._rest[self._write(self._rest) :]
        return not self._rest

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
