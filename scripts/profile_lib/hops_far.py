"""Child process: the draft's end of the channel, with a drafter that notes when it is called.

Commands: ``endpoint``, ``authorize`` (the target's public key).
"""

import argparse
import os
import time
from collections.abc import Callable

import msgspec
import numpy as np

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Drafts, Step
from deployments.channel.server import DraftServer
from scripts.bench_lib.wrong_draft import WrongDrafter
from scripts.profile_lib.commands import serve

VOCAB_SIZE = 1000
PIECE_S = 0.005  # of computing between two looks at the socket: about a token of a small draft
SIZE = 256  # of the matrices multiplied meanwhile; like ONNX Runtime, NumPy lets other threads of the process run


class NotingDrafter(WrongDrafter):
    """Drafts at once. ``source`` of its answer is the time it was called, in seconds of ``time.perf_counter``."""

    def step(self, step: Step) -> Drafts:
        began = time.perf_counter()
        answer = super().step(step)
        return msgspec.structs.replace(answer, source=repr(began), work_s=time.perf_counter() - began)


class ComputingDrafter(NotingDrafter):
    """Uses all idle time, piece by piece, as a draft that works ahead does."""

    def __init__(self, name: str, vocab_size: int) -> None:
        super().__init__(name, vocab_size)
        self._matrix = np.random.default_rng(0).random((SIZE, SIZE), np.float32)

    def idle(self, budget_s: float, should_stop: Callable[[], bool]) -> bool:
        """Compute for ``budget_s`` or until ``should_stop`` says so between two pieces; there is always more to do."""
        until = time.perf_counter() + budget_s
        while time.perf_counter() < until and not should_stop():
            piece_ends = time.perf_counter() + PIECE_S
            while time.perf_counter() < piece_ends:
                self._matrix @ self._matrix
        return True


class FarEnd:
    """Each public method is one command."""

    def __init__(self, server: DraftServer) -> None:
        self._server = server

    def endpoint(self) -> dict[str, object]:
        described: dict[str, object] = msgspec.to_builtins(self._server.endpoint(VOCAB_SIZE))
        return described

    def authorize(self, key: str) -> dict[str, object]:
        self._server.authorize(key)
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compute", action="store_true", help="use all idle time")
    args = parser.parse_args()
    name = f"profile-{os.getpid()}"
    drafter = (ComputingDrafter if args.compute else NotingDrafter)(name, VOCAB_SIZE)
    server = DraftServer(drafter, "127.0.0.1", name, FaultPolicy())
    server.start()
    serve(FarEnd(server))
    server.stop()


if __name__ == "__main__":
    main()
