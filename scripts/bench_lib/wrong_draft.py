"""Child process: a draft that answers at once and is always wrong. What drafting costs when it brings nothing.

Speaks the same lines as ``deployments.draft.process``: prints its endpoint, then takes ``{"authorize": KEY}``.
"""

import argparse
import json
import os
import sys
from zlib import crc32

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Draft, Drafts, Step


class WrongDrafter:
    """Guesses by hash: one token in a vocabulary's worth of guesses may be right by accident."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.vocab_size = vocab_size

    def step(self, step: Step) -> Drafts:
        """Draft nonsense of the wanted length for every commit."""
        drafts = [self._draft(commit) for commit in step.commits]
        return Drafts(PROTOCOL_VERSION, self.name, step.number, drafts)

    def _draft(self, commit: Commit) -> Draft:
        tokens = [
            crc32(f"{commit.session}/{commit.length + offset}".encode()) % self.vocab_size
            for offset in range(commit.want)
        ]
        return Draft(commit.session, commit.epoch, commit.length, tokens)

    def disconnect(self, target: str) -> None:
        """Nothing is kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--core", type=int, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})

    from deployments.chain.faults import FaultPolicy
    from deployments.channel.zeromq import DraftServer

    name = f"wrong-{os.getpid()}"
    server = DraftServer(WrongDrafter(name, args.vocab_size), "127.0.0.1", name, FaultPolicy())
    server.start()
    endpoint = server.endpoint(args.vocab_size)
    print(
        json.dumps({key: getattr(endpoint, key) for key in ("name", "address", "server_key", "vocab_size")}), flush=True
    )
    for line in sys.stdin:
        command = json.loads(line)
        if "authorize" in command:
            server.authorize(command["authorize"])
    server.stop()


if __name__ == "__main__":
    main()
