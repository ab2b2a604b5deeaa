"""Whole answers of a real draft: K together against K requests, and the token chain's waits with answers beside and without.

Prints two Markdown tables. The draft works on one core; what it computes there is also shown as processor time, which tells more
than the clock where the machine does other things. The target is played: it commits some of what was drafted and a token
of its own, then "verifies" for a while, over a real Unix socket; its waits are from sending a message to having the answer.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Step
from deployments.channel.connect import connect
from deployments.channel.endpoint import KeyPair
from deployments.channel.server import DraftServer
from deployments.draft.answers import Answer, Writing, read_request
from deployments.draft.build import build_engine
from deployments.draft.engine import DraftEngine

_SLICE_S = 0.02


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/profile_answers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/draft-int4"), help="folder of the draft")
    parser.add_argument(
        "--core", type=int, default=max(os.sched_getaffinity(0)), help="of the draft (default: the last)"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer (default: 64)")
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[100, 500], help="lengths in tokens (default: 100 500)"
    )
    parser.add_argument("--answers", type=int, nargs="*", default=[1, 2, 3, 5], help="K (default: 1 2 3 5)")
    parser.add_argument("--repetitions", type=int, default=3, help="the median of them is shown (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=300, help="messages of the token chain (default: 300; 0: leave out)"
    )
    parser.add_argument("--verify-ms", type=float, default=20.0, help="the played target's step (default: 20)")
    args = parser.parse_args()
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {args.core})  # threads of ONNX Runtime and of the draft inherit it
    engine = build_engine(args.model, context=1024, slots=16, top_k=0)
    print(f"{args.model.name}, answers of {args.length} tokens, median of {args.repetitions}\n")
    print("| prompt | K | together s | ms a token | K requests of one s | same prompt again s |", end="")
    print(f" CPU s: together | K of one | again | ratio |\n{'|---' * 10}|")
    for prompt in args.prompts:
        for k in args.answers:
            print(row(engine, prompt, k, args.length, args.repetitions), flush=True)
    if args.rounds:
        print(f"\n| whole answers beside | share | wait p50 ms | p90 ms | p99 ms | answer tokens/s |\n{'|---' * 6}|")
        for share in (None, 0.1, 0.25, 0.5):
            waits, rate = rounds(args.model, args.core, everywhere, share, args.rounds, args.verify_ms / 1e3)
            cuts = statistics.quantiles(waits, n=100)
            shown = " | ".join(f"{cuts[at] * 1e3:.1f}" for at in (49, 89, 98))
            print(f"| {'no' if share is None else 'yes'} | {share or ''} | {shown} | {rate:.0f} |", flush=True)


def row(engine: DraftEngine, prompt: int, k: int, length: int, repetitions: int) -> str:
    """One line of the first table."""
    found = []
    for turn in range(repetitions):
        seed = 1000 * turn + prompt + k
        together = written(engine, tokens(seed, prompt), k, length, "tenant")
        again = written(engine, tokens(seed, prompt), k, length, "tenant")
        singles = [written(engine, tokens(seed + 1, prompt), 1, length, "", 7 + index) for index in range(k)]
        apart = (sum(wall for wall, _ in singles), sum(cpu for _, cpu in singles))
        found.append((*together, *apart, *again))
    wall, cpu, wall_apart, cpu_apart, wall_again, cpu_again = (
        statistics.median(each) for each in zip(*found, strict=True)
    )
    clock = f"{wall:.2f} | {wall / (k * length) * 1e3:.1f} | {wall_apart:.2f} | {wall_again:.2f}"
    return f"| {prompt} | {k} | {clock} | {cpu:.2f} | {cpu_apart:.2f} | {cpu_again:.2f} | {cpu_apart / cpu:.2f} |"


def tokens(seed: int, count: int) -> list[int]:
    """A prompt; what it says does not matter to its cost."""
    chance = random.Random(seed)
    return [chance.randrange(1000, 40000) for _ in range(count)]


def written(
    engine: DraftEngine, prompt: list[int], k: int, length: int, tenant: str, seed: int = 7
) -> tuple[float, float]:
    """Seconds from asking for ``k`` answers to the last of them, and of processor time."""
    answers: list[Answer] = []
    given = {"prompt": prompt, "k": k, "length": length, "temperature": 0.7, "seed": seed, "tenant": tenant}
    started, worked = time.perf_counter(), time.process_time()
    engine.write(read_request({**given, "deadline_s": 600.0}), answers.append)
    while len(answers) < k:
        engine.idle(_SLICE_S)
    return time.perf_counter() - started, time.process_time() - worked


def rounds(
    folder: Path, core: int, everywhere: set[int], share: float | None, count: int, verify_s: float
) -> tuple[list[float], float]:
    """Waits of a played target for ``count`` drafts, and answer tokens a second written meanwhile (``share`` None: none are)."""
    os.sched_setaffinity(0, {core})
    engine = build_engine(folder, context=1024, slots=16, top_k=0, writing=Writing(share=share or 0.0))
    faults = FaultPolicy()
    server = DraftServer(engine, "127.0.0.1", "draft", faults)
    server.start()
    os.sched_setaffinity(0, everywhere - {core} or everywhere)
    keys = KeyPair.new()
    server.authorize(keys.public)
    channel = connect(server.endpoint(engine.vocab_size), keys, faults)
    asked = requests(engine, server) if share is not None else iter(())
    waits = []
    started = time.perf_counter()
    try:
        chance, known = random.Random(1), tokens(2, 60)
        commits = [Commit("s", 0, len(known), list(known), 4)]
        for number in range(count):
            next(asked, None)
            sent = time.perf_counter()
            channel.post(Step(PROTOCOL_VERSION, "t", number, 0.25, commits, []))
            drafts = channel.collect(number, 0.5)
            waits.append(time.perf_counter() - sent)
            drafted = drafts.drafts[0].tokens if drafts is not None and drafts.drafts else []
            time.sleep(verify_s)
            new = [*drafted[: chance.randint(0, 4)], chance.randrange(1000, 40000)]
            if len(known) + len(new) > 900:
                known, new = [], tokens(3, 60)
            known += new
            fresh = len(known) == len(new)
            commits = [Commit("s", number if fresh else commits[0].epoch, len(known), new, 4)]
        rate = engine.stats()["answer_tokens"] / (time.perf_counter() - started)
    finally:
        channel.close()
        server.stop()
    return waits[20:], rate  # the first ones read the prompt


def requests(engine: DraftEngine, server: DraftServer) -> Iterator[None]:
    """Three answers to a prompt of 200 tokens, again and again; one request at a time."""
    for seed in range(10**6):
        answers: list[Answer] = []
        given = {"prompt": tokens(seed, 200), "k": 3, "length": 64, "temperature": 0.7, "deadline_s": 600.0}
        engine.write(read_request(given), answers.append)
        server.wake()
        while len(answers) < 3:
            yield


if __name__ == "__main__":
    main()
