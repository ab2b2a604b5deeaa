"""The draft replica of the running application: to kill, to stop, to read its counters at the target."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from deployments.names import draft_name
from tests.cluster.conftest import App

# What a draft model does is tested without look-up, which would replay answers that were given before.
MODEL_ONLY = {"sources": ["model"]}
BACK_S = 120.0  # Serve notices, starts a process, loads the model; the target finds it and its circuit closes


def counter(app: App, name: str) -> float:
    """One of the target's counters."""
    return float(app.stats()["counters"].get(name, 0))


def wait_for_acceptance(app: App) -> None:
    """Until drafts are accepted again; requests are needed for it, because a circuit is probed by rounds only."""
    before, deadline = counter(app, "accepted_tokens"), time.monotonic() + BACK_S
    while counter(app, "accepted_tokens") <= before:
        assert time.monotonic() < deadline, f"no draft accepted in {BACK_S} s: {app.stats()}"
        app.chat(chain=MODEL_ONLY)


def draft_actor(app: App) -> Any:
    """Actor of the only replica of the first draft."""
    (actor,) = app.replica_actors(draft_name(app.config.drafts[0].name))
    return actor


@contextlib.contextmanager
def stuck_draft(app: App) -> Iterator[None]:
    """The draft's process stands still, alive. Serve replaces a replica after half a minute of that: be quick."""
    import ray

    pid = int(ray.get(draft_actor(app).is_allocated.remote(), timeout=60)[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
