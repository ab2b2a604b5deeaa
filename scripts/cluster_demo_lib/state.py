"""What the cluster looks like at one moment: replicas by deployment with their nodes, and what they have counted."""

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

RUNNING = "RUNNING"
ASK_S = 3.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica, as Serve's controller sees it."""

    deployment: str
    state: str
    node: str  # address
    pid: int
    actor: str


@dataclass(frozen=True, slots=True)
class State:
    """All replicas of an application, and the status of each deployment."""

    replicas: tuple[Replica, ...]
    statuses: dict[str, str] = field(default_factory=dict)

    def running(self, deployment: str) -> list[Replica]:
        return [r for r in self.replicas if r.deployment == deployment and r.state == RUNNING]


def replicas(application: str) -> State:
    """Ask the controller; raises what Ray raises while it is away."""
    from ray.serve.context import _get_global_client

    details = _get_global_client().get_serve_details()
    app = details["applications"].get(application, {})
    found, statuses = [], {}
    for name, deployment in app.get("deployments", {}).items():
        statuses[name] = str(deployment["status"])
        for replica in deployment["replicas"]:
            found.append(
                Replica(
                    name,
                    str(getattr(replica["state"], "value", replica["state"])),
                    str(replica.get("node_ip") or ""),  # these come once it has a process
                    int(replica.get("pid") or 0),
                    str(replica.get("actor_name") or ""),
                )
            )
    return State(tuple(found), statuses)


def totals(application: str, deployment: str, method: str) -> dict[str, float]:
    """The counters that ``method`` returns, of every running replica that answers, added up.

    Those of replicas that have ended are not among them, so totals can fall.
    """
    from ray import serve

    total: Counter[str] = Counter()
    try:
        response = serve.get_deployment_handle(deployment, application).broadcast(method)
        answers = response.results(timeout_s=ASK_S)
    except Exception as error:  # a replica that dies just now, or none at all: Serve raises many kinds
        logger.debug("%s of %s: %r", method, deployment, error)
        return {}
    for answer in answers:
        total.update(answer.get("counters", answer))
    return dict(total)
