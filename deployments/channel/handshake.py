"""Proof, over a fresh Unix connection, that each end owns the CURVE key it is known by.

Both derive the same secret from their own secret key and the other's public key (X25519, which CURVE keys are) and show
that they have it with an HMAC over fresh nonces of both::

    target   MAGIC, its public key, nonce
    draft    nonce, HMAC("draft")      so the target knows that this is the draft it was told of over Serve
    target   HMAC("target")            and the draft that this is a target it was told to let in

Beside that both look at the other process's user (SO_PEERCRED): it must be their own. What follows is not encrypted: it
stays between two processes of one user inside one kernel.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from deployments.channel.endpoint import KeyPair, raw_key, text_key

_MAGIC = b"CHAINUX1"
_KEY_BYTES = _NONCE_BYTES = _PROOF_BYTES = 32
_HELLO_BYTES = len(_MAGIC) + _KEY_BYTES + _NONCE_BYTES
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class HandshakeError(ConnectionError):
    """The other end is not who it should be, or does not speak this protocol."""


class RefusedError(HandshakeError):
    """The other end closed the connection instead of going on."""


class UnauthorisedError(HandshakeError):
    """A target with a key that nobody let in."""


def greet_draft(connection: socket.socket, keys: KeyPair, server_key: str, timeout_s: float) -> None:
    """The target's part; raises :class:`HandshakeError` or another ``OSError`` (``TimeoutError`` after ``timeout_s``)."""
    until = time.monotonic() + timeout_s
    _same_user(connection)
    secret = _shared(keys, server_key)
    hello = _MAGIC + raw_key(keys.public) + secrets.token_bytes(_NONCE_BYTES)
    _send(connection, hello, until)
    answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES, until)
    said = hello + answer[:_NONCE_BYTES] + raw_key(server_key)
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"draft", said)):
        raise HandshakeError("what listens there does not own the draft's key")
    _send(connection, _proof(secret, b"target", said), until)


def greet_target(connection: socket.socket, keys: KeyPair, allows: Callable[[str], bool], timeout_s: float) -> str:
    """The draft's part: the target's public key (z85), which ``allows`` agreed to and its owner proved.

    Raises :class:`UnauthorisedError`, :class:`HandshakeError` or another ``OSError`` (``TimeoutError`` after ``timeout_s``).
    """
    until = time.monotonic() + timeout_s
    _same_user(connection)
    hello = _receive(connection, _HELLO_BYTES, until)
    if not hello.startswith(_MAGIC):
        raise HandshakeError("not a target of this version")
    client_key = text_key(hello[len(_MAGIC) : len(_MAGIC) + _KEY_BYTES])
    if not allows(client_key):
        raise UnauthorisedError("nobody let this key in")
    secret = _shared(keys, client_key)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    said = hello + nonce + raw_key(keys.public)
    _send(connection, nonce + _proof(secret, b"draft", said), until)
    if not hmac.compare_digest(_receive(connection, _PROOF_BYTES, until), _proof(secret, b"target", said)):
        raise UnauthorisedError("it does not own the key it gave")
    return client_key


def _shared(keys: KeyPair, other: str) -> bytes:
    try:
        ours = X25519PrivateKey.from_private_bytes(raw_key(keys.secret))
        return ours.exchange(X25519PublicKey.from_public_bytes(raw_key(other)))
    except ValueError as error:  # not a key, or one of the few points that give everybody the same secret
        raise HandshakeError(f"not a usable key: {error}") from error


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, hashlib.sha256)


def _same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise HandshakeError(f"a process of another user ({user})")


def _send(connection: socket.socket, data: bytes, until: float) -> None:
    _bound(connection, until)
    connection.sendall(data)


def _receive(connection: socket.socket, count: int, until: float) -> bytes:
    """Exactly ``count`` bytes: what follows belongs to the first message."""
    data = b""
    while len(data) < count:
        _bound(connection, until)
        more = connection.recv(count - len(data))
        if not more:
            raise RefusedError("closed by the other end: not let in?")
        data += more
    return data


def _bound(connection: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other end is silent")
    connection.settimeout(left)
