"""What a draft server needs of a transport. ZeroMQ and Unix sockets each bring a :class:`Door`; one thread serves both."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from deployments.channel.messages import Data


class Received(NamedTuple):
    """One message of an authenticated target."""

    peer: Any  # for :meth:`Door.send`
    key: str  # the target's public key, z85, proven
    data: Data


class Door(Protocol):
    """The draft's end of one transport. All but ``start`` and ``stop`` are called from the drafting thread only."""

    @property
    def descriptor(self) -> int:
        """Signals, edge by edge, that messages may have come."""

    @property
    def pollable(self) -> Any:
        """What ``zmq.Poller`` is told to look at for messages."""

    def start(self) -> None: ...

    def take(self) -> Iterator[Received]:
        """Everything that has come, without waiting, in order for each target."""

    def send(self, peer: Any, data: bytes) -> bool:
        """Without waiting; False when the answer is lost because the peer is gone or reads too slowly."""

    def forget(self, key: str) -> None:
        """Close what connections of this target can be closed."""

    def stop(self) -> None:
        """Close everything; the drafting thread has ended."""
