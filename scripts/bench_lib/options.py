"""Command-line options of ``scripts/bench`` and what they may be."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench_lib import settings
from scripts.bench_lib.cells import ENGINE_SYSTEMS, HTTP_SYSTEMS, System, chain_with_tokens, http_system
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.prompts import MEASURED_SETS
from scripts.bench_lib.shipped import shipped_chain

EPILOG = """\
systems
  plain              vLLM by itself on all cores; with --mode compiled (default) what vLLM does best
  plain_target_core  vLLM by itself on the cores that the chain's target has, eager as there (system "plain", cores "target")
  ngram, suffix      vLLM's own speculative modes on all cores, in the same mode as plain
  chain              this project: target on its cores, INT4 draft on the other one
  chain_off          the same engine with the chain turned off for each request
  wrong_draft        the same with a draft that is always wrong: what drafting costs when it brings nothing

how it measures
  Every system is a process of its own. All of them run the same cell directly after one another, then the next cell, for
  several repetitions; idle processes are frozen (SIGSTOP), so they take no processor time. Each repetition has other
  prompts; the warm-up has prompts that are never measured; vLLM's prefix cache and suffix's cache of earlier answers are
  emptied before each cell. Counted are completion tokens, never drafted ones. Ratios are ratios of medians.

examples
  scripts/bench --quick                                    a first look in under three minutes
  scripts/bench --out docs/benchmarks/latest.json          everything (about an hour and a half on two cores)
  scripts/bench --systems plain_target_core,chain --sets prose --batches 1 --temperatures 0 --tokens 1,2,3,4
  scripts/bench --systems "" --http chain,chain_off,plain  as HTTP clients see it, servers started one after another
  scripts/bench --systems "" --http chain=http://127.0.0.1:8000,chain_off=http://127.0.0.1:8000
"""

QUICK = {
    "systems": "plain,plain_target_core,ngram,suffix,chain,wrong_draft",
    "batches": "1,8",
    "temperatures": "0",
    "until": "length",
    "length": 32,
    "mode": "eager",
    "prompts": 2,
    "start_together": 2,
}
FULL = {
    "systems": ",".join(ENGINE_SYSTEMS),
    "batches": "1,4,8,32",
    "temperatures": "0,1",
    "until": "length,eos",
    "length": 128,
    "mode": "compiled",
    "prompts": 4,
    "start_together": 1,
}


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    systems: list[System]
    urls: dict[str, str]  # HTTP system to base URL; empty where the benchmark starts the server itself
    sets: list[str]
    batches: list[int]
    temperatures: list[float]
    until: list[Any]
    repetitions: int
    tokens: list[int]
    max_batch: int
    length: int
    eos_length: int
    prompts: int
    mode: settings.Mode
    start_together: int
    target: Path
    draft: Path
    out: Path
    quick: bool


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Run this system and vLLM's own modes side by side and compare committed tokens per second.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--quick", action="store_true", help="batch 1 and 8, greedy, short answers, eager baselines: under 3 minutes")
    add("--systems", metavar="A,B", help=f"of {', '.join(ENGINE_SYSTEMS)}; empty for none (default: all)")
    add(
        "--http",
        metavar="A,B=URL",
        default="",
        help=f"also measure as an HTTP client, of {', '.join(HTTP_SYSTEMS)}: a name alone starts ray_config.yaml's "
        "application for it (plain: without drafts), NAME=URL takes a running server",
    )
    add("--sets", metavar="A,B", default=",".join(MEASURED_SETS), help="prompt sets (default: prose,copy)")
    add("--batches", metavar="N,M", help="requests at once, up to 32 (default: 1,4,8,32)")
    add("--temperatures", metavar="X,Y", help="sampling temperatures (default: 0,1; no seeds)")
    add("--until", metavar="A,B", help="length: forced length; eos: the model stops by itself (default: both)")
    add("--length", type=int, metavar="N", help="forced answer length in tokens (default: 128; quick: 32)")
    add("--eos-length", type=int, metavar="N", default=256, help="bound where the model stops itself (default: 256)")
    add("--prompts", type=int, metavar="N", help="least prompts of one repetition (default: 4; quick: 2)")
    add("--repetitions", type=int, metavar="N", default=3, help="turns of every system at every cell (default: 3)")
    add(
        "--tokens",
        metavar="T",
        help="draft tokens a round of the chain (default: ray_config.yaml's); a list 1,2,4 measures chain_t1, chain_t2, ... "
        "side by side",
    )
    add(
        "--max-batch",
        type=int,
        metavar="N",
        help="the chain drafts for at most N sequences at once, 0: any number (default: ray_config.yaml's)",
    )
    add("--mode", choices=("compiled", "eager"), help="vLLM's own modes on all cores (default: compiled; quick: eager)")
    add(
        "--models",
        type=Path,
        metavar="DIR",
        default=ROOT / "models",
        help="folder with target/ and draft-int4/ (default: models/; scripts/prepare_models fills it)",
    )
    add("--target", type=Path, metavar="DIR", help="target checkpoint, instead of MODELS/target")
    add("--draft", type=Path, metavar="DIR", help="draft model, instead of MODELS/draft-int4")
    add("--start-together", type=int, metavar="N", help="engines started at the same time (default: 1; quick: 2)")
    add("--out", type=Path, metavar="FILE", default=ROOT / "results" / "bench.json",
        help="JSON result; Markdown is written beside it (default: results/bench.json)")  # fmt: skip
    return result


def read_options(argv: Sequence[str] | None = None) -> Options:
    """Parse; exits with a sentence on what cannot be."""
    command = parser()
    raw = command.parse_args(argv)
    for key, value in (QUICK if raw.quick else FULL).items():
        if getattr(raw, key) is None:
            setattr(raw, key, value)
    tokens, max_batch = shipped_chain()
    raw.tokens = raw.tokens or str(tokens)
    raw.max_batch = max_batch if raw.max_batch is None else raw.max_batch
    try:
        urls = {name: url for name, _, url in (item.partition("=") for item in _split(raw.http))}
        lengths = [int(x) for x in _split(raw.tokens)]
        systems = [s for name in _split(raw.systems) for s in _engine_systems(name, lengths)] + [
            http_system(name, url) for name, url in urls.items()
        ]
        options = Options(
            systems, urls, _split(raw.sets), [int(x) for x in _split(raw.batches)],
            [float(x) for x in _split(raw.temperatures)], _split(raw.until), raw.repetitions, lengths, raw.max_batch, raw.length,
            raw.eos_length, raw.prompts, raw.mode, raw.start_together, raw.target or raw.models / "target",
            raw.draft or raw.models / "draft-int4", raw.out, raw.quick,
        )  # fmt: skip
    except ValueError as error:
        command.error(str(error))
    if not options.systems:
        command.error("nothing to measure: --systems is empty and there is no --http")
    if not set(options.until) <= {"length", "eos"}:
        command.error(f"--until takes length and eos, not {','.join(options.until)}")
    if not options.batches or not all(1 <= batch <= settings.MAX_BATCH for batch in options.batches):
        command.error(f"--batches takes 1 to {settings.MAX_BATCH}")
    if min(options.repetitions, options.length, options.eos_length, options.prompts, options.start_together) < 1:
        command.error("--repetitions, --length, --eos-length, --prompts and --start-together start at 1")
    if not options.tokens or not all(1 <= tokens <= 16 for tokens in options.tokens):
        command.error("--tokens takes 1 to 16")
    if any(s.via == "engine" for s in options.systems) and not (options.target / "config.json").is_file():
        command.error(
            f"no target checkpoint in {options.target}: run scripts/prepare_models, or name one with --target"
        )
    if (
        any(s.name.startswith("chain") and s.via == "engine" for s in options.systems)
        and not (options.draft / "model.onnx").is_file()
    ):
        command.error(f"no draft model in {options.draft}: run scripts/prepare_models, or name one with --draft")
    return options


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _engine_systems(name: str, tokens: list[int]) -> list[System]:
    if name not in ENGINE_SYSTEMS:
        raise ValueError(f"no system {name!r}; there are: {', '.join(ENGINE_SYSTEMS)}")
    if name == "chain" and len(tokens) > 1:
        return [chain_with_tokens(count) for count in tokens]
    return [ENGINE_SYSTEMS[name]]
