"""Start, chat once, stay until Ctrl-C, leave nothing behind."""

import argparse
import copy
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.local import port_taken, private_ray
from cluster.preflight import check, snapshot
from deployments.config import AppConfig
from deployments.config.load import REPOSITORY
from deployments.config.serve_file import chain_applications, read
from deployments.config.wishes import placement_problems, wishes
from deployments.demo import show
from deployments.demo.client import PROMPT, WARM_UP, Answer, DemoError, body, chat
from deployments.demo.deploy import deploy, set_paths, wait_for_drafts, watch
from deployments.names import deployment_names, target_name
from deployments.validate import check_file, table

DRAFT_WAIT_S = 20.0


def main(argv: list[str] | None = None) -> int:
    """Return 0 after a good run, 1 with one error printed."""
    parser = argparse.ArgumentParser(prog="scripts/serve", description="Serve a chain of draft on this machine.")
    parser.add_argument("--once", action="store_true", help="exit after the demo request")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "ray_config.yaml", help="Serve config to deploy")
    parser.add_argument("--port", type=int, help="HTTP port (default: the config's)")
    options = parser.parse_args(argv)
    console = Console()
    _listen()
    try:
        _serve(console, options.config, options.port, options.once)
    except DemoError as error:
        for line in str(error).splitlines():
            Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {line}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 0
    return 0


def _listen() -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """First signal: unwind, which stops everything. Later ones must not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _serve(console: Console, file: Path, port: int | None, once: bool) -> None:
    started = time.monotonic()
    content, config, application = _checked(console, file, port)
    http = content["http_options"]
    host, port = str(http.get("host", "127.0.0.1")), int(http.get("port", 8000))
    if port_taken(host, port):
        raise DemoError(f"port {port} on {host} is taken; choose another with --port N")
    with _progress(console) as progress:
        step = progress.add_task("starting Ray")
        with private_ray(REPOSITORY) as ray:
            _listen()  # Ray has put its own handlers in their place
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            _done(progress, step)
            verdicts = check(wishes(config), snapshot())
            problems = placement_problems(verdicts) + _core_problems(config)
            if problems:
                progress.stop()
                console.print(table(verdicts))
                raise DemoError("\n".join(problems))
            deploy(content)
            _wait(progress, application, config, ray.logs)
            console.print(f"ready after {time.monotonic() - started:.0f} s, logs in {ray.logs}", highlight=False)
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104 - compared, not bound
            step = progress.add_task("chatting")
            chained, plain = _chat(url, config.target.name)
            _done(progress, step)
            progress.stop()
            show.answer(console, chained, plain)
            if once:
                console.print("stopping")
            else:
                show.try_it(console, url, config.target.name)
                console.print(f"serving on {url}; Ctrl-C stops it", highlight=False)
                while True:
                    signal.pause()


def _checked(console: Console, file: Path, port: int | None) -> tuple[dict[str, Any], AppConfig, str]:
    """The file's content with absolute paths and the port wished for, its configuration, the application's name."""
    configs, problems = check_file(file)
    if problems:
        raise DemoError("\n".join(problems))
    content = copy.deepcopy(read(file))
    index, _ = next(iter(chain_applications(content)))
    config = configs[0]
    application = content["applications"][index]
    set_paths(application["args"], config)
    content["http_options"] = {**(content.get("http_options") or {}), **({"port": port} if port else {})}
    return content, config, str(application.get("name", "default"))


def _core_problems(config: AppConfig) -> list[str]:
    """Cores that this machine does not have."""
    here = os.sched_getaffinity(0)
    wanted = {"args.target.cores": config.target.cores or []}
    wanted |= {f"args.drafts[{i}].cores": draft.cores or [] for i, draft in enumerate(config.drafts) if draft.replicas}
    return [
        f"{path}: this machine has no core {core}; it has {', '.join(str(c) for c in sorted(here))}"
        for path, cores in wanted.items()
        for core in cores
        if core not in here
    ]


def _wait(progress: Progress, application: str, config: AppConfig, logs: Path) -> None:
    names = deployment_names(config)
    building = progress.add_task("building the application")
    steps: dict[str, Any] = {}
    for states in watch(application, config.fault_policy.start_timeout_s, names, logs):
        for name, state in states.items():
            if name not in steps:
                _done(progress, building)
                steps[name] = progress.add_task(f"starting {name}")
            if state.status == "HEALTHY":
                _done(progress, steps[name])
    count = sum(draft.replicas for draft in config.drafts)
    step = progress.add_task("connecting the target to its drafts")
    connected = wait_for_drafts(application, target_name(config.target.name), count, DRAFT_WAIT_S, progress.refresh)
    if connected < count:
        raise DemoError(f"the target reached {connected} of {count} draft replicas within {DRAFT_WAIT_S:.0f} s")
    _done(progress, step)


def _chat(url: str, model: str) -> tuple[Answer, Answer]:
    """The same question with and without drafts, after a warm-up of both."""
    for enabled in (True, False):
        chat(url, body(model, WARM_UP, {"enabled": enabled}, max_tokens=16))
    return chat(url, body(model, PROMPT, {"trace": True})), chat(url, body(model, PROMPT, {"enabled": False}))


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/green]"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
    )


def _done(progress: Progress, task: Any) -> None:
    if not progress.tasks[task].finished:
        progress.update(task, total=1, completed=1)
        if not progress.console.is_terminal:
            progress.console.print(f"{progress.tasks[task].description}: done")


if __name__ == "__main__":
    sys.exit(main())
