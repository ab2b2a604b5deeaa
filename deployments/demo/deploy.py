"""Deploy a Serve config to the Ray this process is connected to, and watch it come up or fail."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.config import AppConfig
from deployments.demo.client import DemoError

POLL_S = 0.4
ENGINE_FAILED = "EngineCore failed to start"  # vLLM's words before the traceback
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


@dataclass(frozen=True, slots=True)
class State:
    """One deployment (or the build, named ``""``) as Serve sees it."""

    name: str
    status: str
    message: str


def set_paths(args: dict[str, Any], config: AppConfig) -> None:
    """Put the paths of ``config``, which knows where its file lies, into the ``args`` it was read from: replicas do not."""
    args["target"]["model"] = str(config.target.model)
    for entry, draft in zip(args.get("drafts") or [], config.drafts, strict=True):
        entry["model"] = str(draft.model)
    if config.chain.semantic is not None:
        args["chain"]["semantic"]["model"] = str(config.chain.semantic.model)
    if config.evidence is None:
        return
    evidence = args["evidence"]
    for name in ("documents", "index", "rules", "sentences"):
        if evidence.get(name):
            evidence[name] = str(getattr(config.evidence, name))
    for name, spec in ((evidence.get("validators") or {}).get("configured") or {}).items():
        if "file" in spec:
            spec["file"] = config.evidence.validators.configured[name]["file"]


def deploy(content: Mapping[str, Any]) -> None:
    """Hand the config to Serve; returns at once."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(dict(content))
    http = schema.http_options.model_dump(exclude_unset=True)
    serve.start(proxy_location=schema.proxy_location, http_options=http, logging_config=schema.logging_config)
    _get_global_client().deploy_apps(schema)


def watch(
    application: str, timeout_s: float, wanted: list[str], logs: Path | None = None
) -> Iterator[dict[str, State]]:
    """Yield the states of all deployments until every one of ``wanted`` is healthy.

    ``logs``: Ray's log folder, searched for what an engine process died of, which its parent does not know.

    Raises:
        DemoError: with the one cause, as soon as anything fails to start.
    """
    from ray import serve

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = serve.status().applications.get(application)
        if status is not None:
            states = {name: State(name, info.status.value, info.message) for name, info in status.deployments.items()}
            yield states
            # Serve starts a failed replica anew several times before it says so; what the engine died of stays the same.
            if logs is not None and (reason := engine_cause(logs)):
                raise DemoError(f"the target's engine failed to start: {reason}")
            for state in states.values():
                if state.status in FAILED or "failed to start" in state.message:
                    raise DemoError(f"{state.name} failed to start: {cause(state.message)}")
            if status.status.value in FAILED:
                raise DemoError(f"the application could not be built: {cause(status.message)}")
            if all(name in states and states[name].status == "HEALTHY" for name in wanted):
                return
        time.sleep(POLL_S)
    raise DemoError(f"not healthy after {timeout_s:.0f} s")


def cause(message: str) -> str:
    """The exception's own words out of Serve's message, which holds the traceback of every layer."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"^([\w.]+\.)?\w*(Error|Exception|Interrupt|Exit)\b.*:", line)]
    text = raised[-1] if raised else (lines[-1] if lines else "no reason given")
    return re.sub(r"^([\w.]+\.)?(\w*(Error|Exception)): ", "", text)


def engine_cause(logs: Path) -> str | None:
    """The exception that an engine process logged when it could not start; None while there is none."""
    for file in sorted(logs.glob("worker-*.out"), reverse=True):
        try:
            text = file.read_text(errors="replace")
        except FileNotFoundError:  # Ray has given the worker's log another name
            continue
        if ENGINE_FAILED not in text:
            continue
        for line in reversed(text.splitlines()):
            found = re.match(r"\(EngineCore[^)]*\) ERROR [^\]]*\] (?:[\w.]+\.)?\w+(?:Error|Exception): (.+)$", line)
            if found:
                return found.group(1)
    return None


def wait_for_drafts(application: str, target: str, count: int, timeout_s: float, tick: Callable[[], None]) -> int:
    """Wait until the target has connected to its drafts; returns to how many it did."""
    from ray import serve

    handle = serve.get_deployment_handle(target, application)
    deadline = time.monotonic() + timeout_s
    connected = 0
    while connected < count and time.monotonic() < deadline:
        tick()
        connected = len(handle.draft_stats.remote().result(timeout_s=timeout_s)["connected"])
        if connected < count:
            time.sleep(POLL_S)
    return connected
