"""Command-line options of ``scripts/bench`` and what they may be."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.chain.protocol import MAX_DRAFT_TOKENS
from scripts.bench_lib import settings
from scripts.bench_lib.cells import ENGINE_SYSTEMS, HTTP_SYSTEMS, System, chain_with_tokens, http_system
from scripts.bench_lib.engine import ROOT
from scripts.bench_lib.prompts import MEASURED_SETS, MIXED_SET
from scripts.bench_lib.shipped import shipped_chain, shipped_draft
from scripts.bench_lib.transition import transition_system

EPILOG = """\
systems
  plain              vLLM by itself on all cores; with --mode compiled (default) what vLLM does best
  plain_target_core  vLLM by itself on the cores that the chain's target has, eager as there (system "plain", cores "target")
  ngram, suffix      vLLM's own speculative modes on all cores, in the same mode as plain
  chain              this project: every source, an INT4 draft model that works ahead on a core it shares with the target
  chain_no_kv        the same with a draft that reads prompts itself instead of starting from the target's KV
  chain_sync         the same with a draft that only works while the target waits for it
  chain_model        the chain's engine, drafts of the draft model only; chain_model_sync: likewise without working ahead
  chain_suffix       the chain's engine, drafts of the suffix source only
  chain_off          the chain's engine with the chain turned off for each request
  wrong_draft        a draft that is always wrong: what drafting costs when it brings nothing
  always_the         a draft that always says " the": wrong nearly always

how it measures
  Every system is a process of its own. All of them run the same cell directly after one another, then the next cell, for
  several repetitions; idle processes are frozen (SIGSTOP), so they take no processor time. Each repetition has other
  prompts; the warm-up has prompts that are never measured; the prefix cache and what the suffix modes keep of earlier
  answers are emptied before each cell. Counted are completion tokens, never drafted ones. Ratios are ratios of medians. Beside the JSON
  lie the tables as Markdown and, where matplotlib is installed, a chart of each prompt set.

--quick leaves out
  compiled baselines (its plain and suffix are eager), every system but plain, suffix, chain and chain_off, batches above 1,
  temperatures above 0, answers that end by themselves, the json and code prompts, and repetition: 2 prompts of each set
  once. It starts three engines, which is most of what it costs. Any option beside it puts something back.

examples
  scripts/bench --quick                                    a first look in under three minutes
  scripts/bench --out docs/benchmarks/latest.json          everything (many hours on two cores)
  scripts/bench --budget 60                                as much of it as fits an hour, every cell with all systems
  scripts/bench --transition --systems chain --batches ""  only the changing load
  scripts/bench --systems plain_target_core,chain --sets prose --batches 1 --temperatures 0 --tokens 1,2,3,4
  scripts/bench --systems "" --http chain,chain_off,plain  as HTTP clients see it, servers started one after another
  scripts/bench --systems "" --http chain=http://127.0.0.1:8000,chain_off=http://127.0.0.1:8000
"""

QUICK = {
    "systems": "plain,suffix,chain,chain_off",
    "sets": "prose,copy",
    "batches": "1",
    "temperatures": "0",
    "until": "length",
    "length": 48,
    "repetitions": 1,
    "mode": "eager",
    "prompts": 2,
    "start_together": 2,
}
FULL = {
    "systems": ",".join(ENGINE_SYSTEMS),
    "sets": ",".join(MEASURED_SETS),
    "batches": "1,2,4,8,32",
    "repetitions": 3,
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
    tokens: list[int]  # most draft tokens a round; several are systems of their own
    model_tokens: int
    max_batch: int
    transition: bool
    budget_minutes: float | None
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
    add("--quick", action="store_true", help="batch 1, greedy, short answers, eager baselines, once: under 3 minutes")
    add("--systems", metavar="A,B", help=f"of {', '.join(ENGINE_SYSTEMS)}; empty for none (default: all)")
    add(
        "--http",
        metavar="A,B=URL",
        default="",
        help=f"also measure as an HTTP client, of {', '.join(HTTP_SYSTEMS)}: a name alone starts ray_config.yaml's "
        "application for it (plain: without drafts), NAME=URL takes a running server",
    )
    add(
        "--sets",
        metavar="A,B",
        help=f"prompt sets, also {MIXED_SET}: one of each in turn (default: {','.join(MEASURED_SETS)}; quick: prose,copy)",
    )
    add("--batches", metavar="N,M", help="requests at once, up to 32 (default: 1,2,4,8,32; quick: 1)")
    add("--temperatures", metavar="X,Y", help="sampling temperatures (default: 0,1; no seeds)")
    add("--until", metavar="A,B", help="length: forced length; eos: the model stops by itself (default: both)")
    add("--length", type=int, metavar="N", help="forced answer length in tokens (default: 128; quick: 48)")
    add("--eos-length", type=int, metavar="N", default=256, help="bound where the model stops itself (default: 256)")
    add("--prompts", type=int, metavar="N", help="least prompts of one repetition (default: 4; quick: 2)")
    add("--repetitions", type=int, metavar="N", help="turns of every system at every cell (default: 3; quick: 1)")
    add(
        "--tokens",
        metavar="T",
        help=f"most draft tokens a round of the chain, from any source (default: {settings.CHAIN_TOKENS}); a list 1,2,4 "
        "measures chain_t1, chain_t2, ... side by side",
    )
    add(
        "--model-tokens",
        type=int,
        metavar="T",
        help="most draft tokens a round that the draft model makes (default: ray_config.yaml's)",
    )
    add(
        "--max-batch",
        type=int,
        metavar="N",
        help="the chain drafts for at most N sequences at once, 0: any number (default: ray_config.yaml's)",
    )
    add(
        "--transition",
        action="store_true",
        help="also run the chain under a changing load, batch 2, 16 and 2 again, and report each phase",
    )
    add(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="stop after so long, once all systems of a cell are measured, and say what was left out",
    )
    add("--mode", choices=("compiled", "eager"), help="vLLM's own modes on all cores (default: compiled; quick: eager)")
    add(
        "--models",
        type=Path,
        metavar="DIR",
        default=ROOT / "models",
        help=f"folder with target/ and {shipped_draft()}/ (default: models/; scripts/prepare_models fills it)",
    )
    add("--target", type=Path, metavar="DIR", help="target checkpoint, instead of MODELS/target")
    add("--draft", type=Path, metavar="DIR", help=f"draft model, instead of MODELS/{shipped_draft()}")
    add("--start-together", type=int, metavar="N", help="engines started at the same time (default: 1; quick: 2)")
    add("--out", type=Path, metavar="FILE", default=ROOT / "results" / "bench.json",
        help="JSON result; Markdown and charts are written beside it (default: results/bench.json)")  # fmt: skip
    return result


def read_options(argv: Sequence[str] | None = None) -> Options:
    """Parse; exits with a sentence on what cannot be."""
    command = parser()
    raw = command.parse_args(argv)
    for key, value in (QUICK if raw.quick else FULL).items():
        if getattr(raw, key) is None:
            setattr(raw, key, value)
    model_tokens, max_batch = shipped_chain()
    raw.tokens = raw.tokens or str(settings.CHAIN_TOKENS)
    raw.model_tokens = model_tokens if raw.model_tokens is None else raw.model_tokens
    raw.max_batch = max_batch if raw.max_batch is None else raw.max_batch
    try:
        urls = {name: url for name, _, url in (item.partition("=") for item in _split(raw.http))}
        lengths = [int(x) for x in _split(raw.tokens)]
        systems = [s for name in _split(raw.systems) for s in _engine_systems(name, lengths)] + [
            http_system(name, url) for name, url in urls.items()
        ]
        options = Options(
            systems=systems,
            urls=urls,
            sets=_split(raw.sets),
            batches=[int(x) for x in _split(raw.batches)],
            temperatures=[float(x) for x in _split(raw.temperatures)],
            until=_split(raw.until),
            repetitions=raw.repetitions,
            tokens=lengths,
            model_tokens=raw.model_tokens,
            max_batch=raw.max_batch,
            transition=raw.transition,
            budget_minutes=raw.budget,
            length=raw.length,
            eos_length=raw.eos_length,
            prompts=raw.prompts,
            mode=raw.mode,
            start_together=raw.start_together,
            target=raw.target or raw.models / "target",
            draft=raw.draft or raw.models / shipped_draft(),
            out=raw.out,
            quick=raw.quick,
        )
    except ValueError as error:
        command.error(str(error))
    if not options.systems:
        command.error("nothing to measure: --systems is empty and there is no --http")
    if not set(options.until) <= {"length", "eos"}:
        command.error(f"--until takes length and eos, not {','.join(options.until)}")
    if not options.sets or not options.temperatures:
        command.error("--sets and --temperatures name at least one each")
    if not options.batches and not options.transition:
        command.error("nothing to measure: --batches is empty and there is no --transition")
    if options.transition and transition_system(options.systems) is None:
        command.error("--transition needs the system chain")
    if options.budget_minutes is not None and options.budget_minutes <= 0:
        command.error("--budget takes minutes above 0")
    if not all(1 <= batch <= settings.MAX_BATCH for batch in options.batches):
        command.error(f"--batches takes 1 to {settings.MAX_BATCH}")
    if min(options.repetitions, options.length, options.eos_length, options.prompts, options.start_together) < 1:
        command.error("--repetitions, --length, --eos-length, --prompts and --start-together start at 1")
    if not options.tokens or not all(1 <= tokens <= MAX_DRAFT_TOKENS for tokens in options.tokens):
        command.error(f"--tokens takes 1 to {MAX_DRAFT_TOKENS}")
    if not 1 <= options.model_tokens <= MAX_DRAFT_TOKENS:
        command.error(f"--model-tokens takes 1 to {MAX_DRAFT_TOKENS}")
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
