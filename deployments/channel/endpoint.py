"""Where a draft replica listens and the keys both ends know each other by."""

from functools import cache
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Endpoint(msgspec.Struct, frozen=True):
    """Where and with which key one draft replica listens. As plain values: ``msgspec.to_builtins(endpoint)``."""

    name: str  # unique to this start of the replica, so that a restarted one is a new draft
    address: str  # tcp://ip:port
    server_key: str  # CURVE public key, z85
    vocab_size: int = 0
    path: str = ""  # Unix socket for targets on the same machine; empty: there is none
    machine: str = ""  # which machine that is, see :func:`this_machine`

    @property
    def near(self) -> bool:
        """Whether the Unix socket may be in reach. Two containers of one machine look near too: connecting tells."""
        return bool(self.path and self.machine) and self.machine == this_machine()


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


@cache
def this_machine() -> str:
    """The same for all processes of one running kernel and for no others; empty where that cannot be known."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def raw_key(key: str) -> bytes:
    """The 32 bytes of a z85 key; raises ``ValueError`` for anything else."""
    if len(key) != 40:
        raise ValueError("a CURVE key is 40 characters of z85")
    try:
        return bytes(z85.decode(key.encode()))
    except KeyError as error:
        raise ValueError("a CURVE key is z85") from error


def text_key(raw: bytes) -> str:
    """Z85 of 32 bytes."""
    return bytes(z85.encode(raw)).decode()
