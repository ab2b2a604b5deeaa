"""Child processes: both ends of a bare connection, to see what the channel's own cost is made of.

``far KIND FOLDER`` prints where it listens as JSON and echoes until it gets an empty message; ``near KIND ADDRESS KEY COUNT`` sends
``COUNT`` messages, each after some computing, and prints milliseconds of their round trips.
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from scripts.profile_lib.busy import STEP_S, WARM_UP, compute

KINDS = {
    "unix": "Unix socket (SOCK_SEQPACKET)",
    "ipc": "ZeroMQ over ipc",
    "tcp": "ZeroMQ over tcp",
    "curve": "ZeroMQ over tcp with CURVE",
}
MESSAGE = bytes(100)  # about a step of one sequence
STOP = b""
_MOST_BYTES = 1 << 16

Ends = tuple[Callable[[bytes], Any], Callable[[], bytes]]  # send, receive


def far(kind: str, folder: Path) -> None:
    """Listen (files lie in ``folder``, ports are free ones) and echo for one peer."""
    if kind == "unix":
        _echo_unix(folder / "unix.socket")
        return
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    key = ""
    if kind == "curve":
        public, secret = zmq.curve_keypair()
        router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
        key = public.decode()
    if kind == "ipc":
        address = f"ipc://{folder / 'zmq.socket'}"
        router.bind(address)
    else:
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    _say({"address": address, "key": key})
    while (frames := router.recv_multipart())[1] != STOP:
        router.send_multipart(frames)


def _echo_unix(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        _say({"address": str(path), "key": ""})
        connection, _ = listener.accept()
        with connection:
            while (message := connection.recv(_MOST_BYTES)) != STOP:  # also what a closed peer reads as
                connection.send(message)


def near(kind: str, address: str, key: str, count: int) -> list[float]:
    """Milliseconds of ``count`` round trips."""
    send, receive = _connect(kind, address, key)
    times = []
    for _ in range(WARM_UP + count):
        compute(STEP_S)
        sent = time.perf_counter()
        send(MESSAGE)
        receive()
        times.append(1e3 * (time.perf_counter() - sent))
    send(STOP)
    return times[WARM_UP:]


def _connect(kind: str, address: str, key: str) -> Ends:
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        return connection.send, lambda: connection.recv(_MOST_BYTES)
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    if kind == "curve":
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = key.encode()
    dealer.connect(address)
    return dealer.send, dealer.recv


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(arguments: list[str]) -> None:
    role, kind, place, *rest = arguments
    if role == "far":
        far(kind, Path(place))
    else:
        _say({"ms": near(kind, place, rest[0], int(rest[1]))})


if __name__ == "__main__":
    main(sys.argv[1:])
