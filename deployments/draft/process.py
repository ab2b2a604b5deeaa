"""One draft as a process of its own, without Ray: for benchmarks, experiments and engine tests.

Prints one JSON line (its endpoint) once it can be used, then obeys JSON lines on standard input until that closes::

    {"authorize": KEY}   let a target in by its CURVE public key
    {"meet": {"manifest": HEX, "arena": NAME}}   print how that target should send its KV, as {"kv": LINK}
    {"stats": true}      print one JSON line of counters
"""

import argparse
import json
import os
import sys
from pathlib import Path

import msgspec

from deployments.chain.faults import FaultPolicy
from deployments.channel.server import DraftServer


def main(argv: list[str] | None = None) -> int:
    """Run until standard input closes."""
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
    args = parser.parse_args(argv)
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
    print(json.dumps(msgspec.to_builtins(server.endpoint(engine.vocab_size))), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "authorize" in request:
            server.authorize(request["authorize"])
        if "meet" in request:
            offer = request["meet"]
            if offer:
                offer = {**offer, "manifest": bytes.fromhex(offer["manifest"])}
            print(json.dumps({"kv": engine.meet(offer)}), flush=True)
        if request.get("stats"):
            print(json.dumps({**engine.stats(), **server.stats()}), flush=True)
    server.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
