"""``scripts/cluster_demo``: nodes, application, load, table, JSON and plot; Ctrl-C ends everything it started."""

import argparse
import contextlib
import copy
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cluster.local import free_port
from cluster.many_nodes import NodeSpec, many_nodes
from cluster.preflight import check, snapshot
from deployments.config import AppConfig, load_args
from deployments.config.load import REPOSITORY
from deployments.config.serve_file import read
from deployments.config.wishes import placement_problems, wishes
from deployments.demo.client import DemoError
from deployments.demo.deploy import deploy, watch
from deployments.names import deployment_names
from scripts.cluster_demo_lib.load import Load, plain_answers
from scripts.cluster_demo_lib.record import Recorder, Sample, phases, written
from scripts.cluster_demo_lib.state import replicas

CONFIG = REPOSITORY / "cluster/configs/four_nodes.yaml"
OUT = REPOSITORY / "docs/benchmarks/autoscaling.json"
NODES = {
    "target-1": NodeSpec({"pool": "target"}),
    "target-2": NodeSpec({"pool": "target"}),
    "draft-1": NodeSpec({"pool": "draft"}, cpus=2),
}
HEAD = NodeSpec({"pool": "head"}, cpus=0, resources={"head": 1})
PHASES = "1:30,4:30,16:45,64:90,16:45,4:30,1:30,0:45"
SAMPLE_S = 1.0
SLEEP_S = 120.0  # the load begins when the drafts have gone to sleep, or after so long


def main(argv: list[str] | None = None) -> int:
    """0 after a whole run or Ctrl-C, 1 with one error printed."""
    parser = argparse.ArgumentParser(
        prog="scripts/cluster_demo",
        description="Start a cluster of four nodes on this machine, serve a config on it, and watch its pools follow the load.",
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="Serve config to deploy")
    parser.add_argument("--phases", type=phases, default=PHASES, help=f"CLIENTS:SECONDS,… (default: {PHASES})")
    parser.add_argument("--tokens", type=int, default=24, help="of one answer (default: 24)")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file; the plot goes beside it")
    parser.add_argument("--no-namespaces", action="store_true", help="nodes share this machine's network")
    options = parser.parse_args(argv)
    console = Console()
    _listen()
    try:
        _run(console, options)
    except DemoError as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
    return 0


def _listen() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """First signal: unwind, which stops everything. Later ones must not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(console: Console, options: argparse.Namespace) -> None:
    content = _content(options.config)
    application = content["applications"][0]
    config = load_args(application["args"])
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with many_nodes(REPOSITORY, HEAD, namespaces=not options.no_namespaces) as nodes:
        _listen()  # Ray has put its own handlers in their place
        if nodes.why_not:
            console.print(f"nodes share this machine's network: {nodes.why_not}", highlight=False)
        for name, spec in NODES.items():
            nodes.add(name, spec)
        console.print("nodes: " + ", ".join(f"{name} {address}" for name, address in nodes.nodes.items()))
        if problems := placement_problems(check(wishes(config), snapshot())):
            raise DemoError("; ".join(problems))
        console.print("starting the application", highlight=False)
        deploy(content)
        for _ in watch(application["name"], config.fault_policy.start_timeout_s, deployment_names(config), nodes.logs):
            pass
        url = f"http://127.0.0.1:{content['http_options']['port']}"
        plain = plain_answers(url, config.target.name, options.tokens)
        recorder = Recorder(config, application["name"], plain)
        _wait_for_sleep(recorder)
        _drive(console, recorder, Load(url, config.target.name, options.tokens), options.phases)
        files = written(recorder, options)
        console.print(recorder.said(), highlight=False)
        console.print("written: " + ", ".join(str(file) for file in files), highlight=False)


def _content(file: Path) -> dict[str, Any]:
    """The file's content with absolute model paths and a free port."""
    content = copy.deepcopy(read(file))
    args = content["applications"][0]["args"]
    config: AppConfig = load_args(args, file.resolve().parent)
    args["target"]["model"] = str(config.target.model)
    for entry, draft in zip(args["drafts"], config.drafts, strict=True):
        entry["model"] = str(draft.model)
    content["http_options"] = {"host": "127.0.0.1", "port": free_port()}
    return content


def _wait_for_sleep(recorder: Recorder) -> None:
    deadline = time.monotonic() + SLEEP_S
    while time.monotonic() < deadline and recorder.draft_replicas(replicas(recorder.application)):
        time.sleep(SAMPLE_S)


def _drive(console: Console, recorder: Recorder, load: Load, plan: list[tuple[int, float]]) -> None:
    """The load, phase by phase, with a sample of everything each second."""
    live: Any = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    stop = threading.Event()
    with load, live:
        recorder.begin(load)
        for clients, seconds in plan:
            load.clients(clients)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sample = recorder.sample(clients, replicas(recorder.application))
                if console.is_terminal:
                    live.update(_table(recorder.samples), refresh=True)
                elif len(recorder.samples) % 5 == 1:
                    console.print(_line(sample), highlight=False, soft_wrap=True)
                stop.wait(SAMPLE_S)
    recorder.end()


def _line(sample: Sample) -> str:
    return (
        f"{sample.at:5.0f} s  {sample.clients:3d} clients  drafts {sample.drafts}  targets {sample.targets}  "
        f"{sample.tokens_per_s:6.1f} tokens/s  answers {sample.answers}  failed {sample.failed}"
    )


def _table(samples: list[Sample]) -> Table:
    """The last seconds."""
    view = Table("s", "clients", "drafts", "targets", "tokens/s", "answers", "failed")
    for sample in samples[-20:]:
        view.add_row(
            f"{sample.at:.0f}",
            str(sample.clients),
            f"{sample.drafts}" + (f" (+{sample.drafts_starting})" if sample.drafts_starting else ""),
            f"{sample.targets}" + (f" (+{sample.targets_starting})" if sample.targets_starting else ""),
            f"{sample.tokens_per_s:.1f}",
            str(sample.answers),
            str(sample.failed),
        )
    return view


if __name__ == "__main__":
    sys.exit(main())
