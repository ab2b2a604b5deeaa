"""Command line of ``scripts/validator_worker``."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from deployments.chain.faults import FaultPolicy
from deployments.config.errors import ConfigError, explain
from deployments.config.load import resolve
from deployments.config.models import Faults
from deployments.config.serve_file import chain_applications, read
from deployments.config.validators import Validators
from deployments.evidence.validators.build import embedded_queue
from deployments.evidence.validators.redis_worker import RedisWorker
from deployments.evidence.validators.registry import Registry

EPILOG = """\
what it does
  Takes jobs (a text and a validator's name) from a Redis stream, runs them, and sends the tags back. The application puts
  them there when its configuration says so:

    evidence:
      validators:
        configured:
          polite: {kind: custom, function: "mypackage.checks:polite"}
        redis: {url_env: CHAIN_REDIS_URL, stream: "chain:validators"}

  Give the worker the same file: it needs the same configured validators. Only names travel, never import paths; what a name
  runs is this file's to say. Functions are imported by this process' children, so mypackage must be on PYTHONPATH here.

  Start as many workers as you like, on any machine that reaches Redis. Jobs of one that dies are taken over by another. What
  hangs is killed here after faults.validator_limit_s. A URL with a password belongs into a variable (url_env), and over a
  network use rediss:// (TLS).

examples
  CHAIN_REDIS_URL=rediss://:secret@redis.internal:6380/0 scripts/validator_worker ray_config.yaml
  scripts/validator_worker ray_config.yaml --workers 4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 2 where the configuration cannot be used."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings, faults = load(options.config)
        return asyncio.run(_serve(settings, faults, options.workers or settings.workers))
    except (ValueError, OSError) as error:
        print(f"scripts/validator_worker: {error}", file=sys.stderr)
        return 2


def load(path: Path) -> tuple[Validators, FaultPolicy]:
    """The parts of a Serve config that a worker needs; the models need not be on its machine.

    Raises:
        ConfigError: naming what is wrong.
    """
    for index, application in chain_applications(read(path)):
        args, root = application.get("args"), f"applications[{index}].args"
        if isinstance(args, Mapping) and args.get("evidence"):
            break
    else:
        raise ConfigError([f"{path}: no application has evidence.validators"])
    section, where = args["evidence"].get("validators"), f"{root}.evidence.validators"
    if not isinstance(section, dict) or not section.get("redis"):
        raise ConfigError([f"{where}.redis: missing in {path}; it names the stream that workers serve"])
    try:
        settings = Validators.model_validate(section)
    except ValidationError as error:
        raise ConfigError(explain(error, Validators, where)) from None
    try:
        faults = FaultPolicy(**Faults.model_validate(args.get("faults") or {}).model_dump())
    except ValidationError as error:
        raise ConfigError(explain(error, Faults, f"{root}.faults")) from None
    settings = settings.resolved(lambda file: resolve(file, path.parent))
    if wrong := settings.problem():
        raise ConfigError([f"{where}.{wrong}"])
    return settings, faults


async def _serve(settings: Validators, faults: FaultPolicy, workers: int) -> int:
    redis = settings.redis
    assert redis is not None
    address = redis.address()
    settings = settings.model_copy(update={"workers": workers})
    backend = embedded_queue(settings, Registry(settings.configured), faults)
    worker = RedisWorker(address, backend, faults, stream=redis.stream, at_once=workers)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await worker.serve(stop)
    finally:
        await backend.close()
        logging.info(
            "stopped: %s", ", ".join(f"{key} {value}" for key, value in sorted(worker.counts.items())) or "no jobs"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/validator_worker",
        description="Run validators of drafts for an application, from a Redis stream.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="the application's Serve config, with evidence.validators.redis")
    parser.add_argument("--workers", type=int, help="jobs at a time, each in its process (default: validators.workers)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
