"""Child process: a draft that answers at once and is wrong. What drafting costs when it brings nothing.

Speaks the same lines as ``deployments.draft.process``: prints its endpoint, then takes ``{"authorize": KEY}`` and
``{"stats": true}``.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from zlib import crc32

import msgspec

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Draft, Drafts, Step


class WrongDrafter:
    """Guesses by hash, or always the same ``token``.

    By hash one guess in a vocabulary's worth is right by accident; a frequent word is right now and then, which keeps a
    controller trying.
    """

    def __init__(self, name: str, vocab_size: int, token: int | None = None) -> None:
        if token is not None and not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab_size}")
        self.name = name
        self.vocab_size = vocab_size
        self.token = token

    def step(self, step: Step) -> Drafts:
        """Draft nonsense of the wanted length for every commit."""
        drafts = [self._draft(commit) for commit in step.commits]
        return Drafts(PROTOCOL_VERSION, self.name, step.number, drafts)

    def _draft(self, commit: Commit) -> Draft:
        tokens = [self._token(commit.session, commit.length + offset) for offset in range(commit.want)]
        return Draft(commit.session, commit.epoch, commit.length, tokens)

    def _token(self, session: str, position: int) -> int:
        if self.token is not None:
            return self.token
        return crc32(f"{session}/{position}".encode()) % self.vocab_size

    def disconnect(self, target: str) -> None:
        """Nothing is kept."""


def token_of(text: str, folder: Path) -> int:
    """The one token that spells ``text`` with the tokenizer in ``folder``; ``ValueError`` where it takes several."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens of this tokenizer, not one")
    return int(ids[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--say", metavar="TEXT", help="always guess this one token, for example ' the'")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json, for --say")
    args = parser.parse_args()
    if args.say is not None and args.tokenizer is None:
        parser.error("--say needs --tokenizer")
    os.sched_setaffinity(0, {args.core})

    from deployments.chain.faults import FaultPolicy
    from deployments.channel.server import DraftServer

    name = f"wrong-{os.getpid()}"
    token = None if args.say is None else token_of(args.say, args.tokenizer)
    server = DraftServer(WrongDrafter(name, args.vocab_size, token), "127.0.0.1", name, FaultPolicy())
    server.start()
    print(json.dumps(msgspec.to_builtins(server.endpoint(args.vocab_size))), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "authorize" in command:
            server.authorize(command["authorize"])
        if command.get("stats"):
            print(json.dumps(server.stats()), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
