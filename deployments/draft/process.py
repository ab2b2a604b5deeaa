"""One draft as a process of its own, without Ray: for benchmarks, experiments and engine tests.

Prints one JSON line (its endpoint) once it can be used, then obeys JSON lines on standard input until that closes::

    {"authorize": KEY}   let a target in by its CURVE public key
    {"meet": {"manifest": HEX, "arena": NAME, "hidden": {…}}}   print what that target should send of what it computes, as {"kv": LINK}
    {"stats": true}      print one JSON line of counters
    {"write": {"id": ID, "prompt": [ids], …}}    write whole answers (deployments.draft.answers.WriteRequest)
    {"cancel": ID}       nobody waits for those any more

Each answer is printed when it ends, between the other lines, as {"wrote": {"id": ID, "answer": {…}}} with base64 for bytes; a
request that cannot be honoured as {"wrote": {"id": ID, "error": TEXT}}. A line that is none of these, or longer than
``MOST_LINE_BYTES``, is answered by {"error": TEXT}.
"""

import argparse
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from deployments.chain.faults import FaultPolicy
from deployments.channel.server import DraftServer
from deployments.draft.answer_job import AnswerJob
from deployments.draft.answers import Answer, read_request
from deployments.draft.desk import WritesAnswers

MOST_LINE_BYTES = 4 << 20  # a prompt of a hundred thousand tokens fits


class Printer:
    """Prints lines from a thread of its own: a parent that does not read must not keep the draft from drafting."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="draft-lines", daemon=True)
        self._thread.start()

    def __call__(self, value: Any) -> None:
        """Print a value as one line of JSON. Callable from any thread."""
        self._lines.put(msgspec.json.encode(value, enc_hook=float) + b"\n")

    def close(self) -> None:
        """Print what waits, then stop."""
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._out.write(line)
                self._out.flush()
            except BrokenPipeError:
                return  # the parent is gone; standard input closes, too


class Writings:
    """Requests for answers of this process' parent, by the names it gave them."""

    def __init__(self, engine: WritesAnswers, wake: Callable[[], None], show: Printer) -> None:
        self._engine, self._wake, self._show = engine, wake, show
        self._jobs: dict[str | int, AnswerJob] = {}

    def start(self, given: dict[str, Any]) -> None:
        """Hand a request to the engine, or print why not."""
        name = given.pop("id", None)

        def emit(answer: Answer) -> None:
            self._show({"wrote": {"id": name, "answer": answer}})

        self._jobs = {known: job for known, job in self._jobs.items() if not job.ended}
        try:
            if not isinstance(name, str | int) or name in self._jobs:
                raise ValueError("request for answers: id must be a name or number that no other request has")
            self._jobs[name] = self._engine.write(read_request(given), emit)
        except ValueError as error:
            self._show({"wrote": {"id": name, "error": str(error)}})
        self._wake()

    def cancel(self, name: Any) -> None:
        """Take a request back; nothing happens when there is none of that name."""
        job = self._jobs.pop(name, None) if isinstance(name, str | int) else None
        if job is not None:
            job.cancel()


def read_line(stream: BinaryIO) -> bytes | None:
    """The next line; None at the end. Raises ValueError for one that is too long, having skipped it."""
    line = stream.readline(MOST_LINE_BYTES + 1)
    if len(line) <= MOST_LINE_BYTES:
        return line or None
    while line and not line.endswith(b"\n"):
        line = stream.readline(MOST_LINE_BYTES)
    raise ValueError(f"a line of more than {MOST_LINE_BYTES} bytes")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m deployments.draft.process", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with model.onnx (scripts/prepare_models)")
    parser.add_argument("--core", type=int, default=None, help="pin the draft to this processor")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--provider", default="cpu", help="execution-provider profile (default: cpu)")
    parser.add_argument("--context", type=int, default=2048, help="longest sequence in tokens (default: 2048)")
    parser.add_argument("--slots", type=int, default=32, help="sequences held at once (default: 32)")
    parser.add_argument("--top-k", type=int, default=0, help="probabilities sent with each draft token (default: 0)")
    parser.add_argument(
        "--ahead",
        type=int,
        default=None,
        help="tokens drafted before they are asked for; 0: none (default: as many as pay)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until standard input closes."""
    args = parse(argv)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})  # before any thread of ONNX Runtime exists

    from deployments.draft.build import build_engine  # imports onnxruntime, after the affinity is set

    engine = build_engine(
        args.model,
        provider=args.provider,
        context=args.context,
        slots=args.slots,
        top_k=args.top_k,
        ahead=args.ahead,
    )
    server = DraftServer(engine, args.host, f"draft-{os.getpid()}", FaultPolicy())
    server.start()
    show = Printer(sys.stdout.buffer)
    show(server.endpoint(engine.vocab_size))
    writings = Writings(engine, server.wake, show)
    while True:
        try:
            line = read_line(sys.stdin.buffer)
            if line is None:
                break
            request = msgspec.json.decode(line, type=dict[str, Any])
        except (ValueError, msgspec.DecodeError) as error:
            show({"error": str(error)})
            continue
        if "authorize" in request:
            server.authorize(request["authorize"])
        if "meet" in request:
            offer = request["meet"]
            if offer.get("manifest"):
                offer = {**offer, "manifest": bytes.fromhex(offer["manifest"])}
            show({"kv": engine.meet(offer)})
        if request.get("stats"):
            show({**engine.stats(), **server.stats()})
        if "write" in request:
            writings.start(dict(request["write"]))
        if "cancel" in request:
            writings.cancel(request["cancel"])
    server.stop()
    show.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
