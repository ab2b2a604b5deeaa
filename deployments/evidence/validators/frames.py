"""Messages between a process and the validator process it started: four bytes of length, then msgpack."""

import os
import select
import struct
import time
from typing import Any, Literal

import msgspec

from deployments.evidence.validators.base import Tag
from deployments.evidence.validators.jobs import MAX_JOB_BYTES

HEADER = struct.Struct("<I")
MAX_FRAME = 2 * MAX_JOB_BYTES


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a process: which validators are configured, where to import from, how much memory it may use."""

    configured: dict[str, dict[str, Any]]
    import_path: list[str]
    memory_mib: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer; ``error`` says what could not be loaded."""

    error: str = ""


class Failed(Exception):
    """The other end is gone, or did not answer in time."""

    def __init__(self, failure: Literal["died", "hung"]) -> None:
        super().__init__(failure)
        self.failure = failure


def send(descriptor: int, message: Hello | Ready | Tag | msgspec.Struct) -> None:
    """Write a message whole.

    Raises:
        Failed: nobody reads any more.
    """
    data = msgspec.msgpack.encode(message)
    left = memoryview(HEADER.pack(len(data)) + data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        raise Failed("died") from None


def receive(descriptor: int, until: float | None = None) -> bytes:
    """The next message's bytes, at the latest at ``until`` (``time.monotonic()``; None: whenever it comes).

    Raises:
        Failed: "died" at the end of the stream or where it is no stream of ours, "hung" when time is up.
    """
    (length,) = HEADER.unpack(_exactly(descriptor, HEADER.size, until))
    if length > MAX_FRAME:
        raise Failed("died")
    return _exactly(descriptor, length, until)


def _exactly(descriptor: int, count: int, until: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([descriptor], [], [], left)[0]:
            raise Failed("hung")
        try:
            part = os.read(descriptor, count - len(data))
        except OSError:
            part = b""
        if not part:
            raise Failed("died")
        data += part
    return bytes(data)
