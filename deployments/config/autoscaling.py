"""The section ``args.autoscaling``: which deployments change their number of replicas, by what, and how fast.

Names that Serve has, too, mean what they mean there. Without a section a deployment keeps its number of replicas.
"""

from abc import abstractmethod
from typing import Annotated, Any

from pydantic import Field, model_validator

from cluster.autoscale import REQUESTS
from deployments.config.strict import Strict

POLICY = "cluster.autoscale:Scaler"
REPORTS = 3  # in a look-back period, so that the last one is known in spite of delays
REPORT_S = 10.0  # Serve's own pace, which is enough for long periods
DraftName = Annotated[str, Field(min_length=1, max_length=64)]


class Scaling(Strict):
    """What all deployments have in common."""

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    upscale_delay_s: float = Field(default=10.0, ge=0, description="a wish for more must last so long")
    downscale_delay_s: float = Field(default=120.0, ge=0, description="a wish for fewer must last so long")
    look_back_period_s: float = Field(
        default=15.0, ge=1, description="signals are means over so long; older is not known"
    )
    tolerance: float = Field(default=0.1, ge=0, lt=1, description="hysteresis, as a share of the present load")
    hold_s: float = Field(
        default=60.0, ge=0, description="a signal that is missing keeps replicas from ending for so long"
    )

    @model_validator(mode="after")
    def _in_order(self) -> "Scaling":
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is less than min_replicas {self.min_replicas}")
        return self

    @abstractmethod
    def goals(self) -> dict[str, Any]:
        """Fields of :class:`cluster.autoscale.Goals`."""

    def serve_config(self, initial: int) -> dict[str, Any]:
        """Serve's ``autoscaling_config`` of a deployment that starts with ``initial`` replicas."""
        goals = self.goals()
        return {
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas,
            "initial_replicas": initial,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
            "look_back_period_s": self.look_back_period_s,
            # at Serve's pace short periods would mostly be without any report
            "metrics_interval_s": min(REPORT_S, self.look_back_period_s / REPORTS),
            # what Serve shows in its metrics; the policy has its own copy
            "target_ongoing_requests": goals["loads"].get(REQUESTS, 1.0),
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {**goals, "tolerance": self.tolerance, "hold_s": self.hold_s},
            },
        }


class RequestScaling(Scaling):
    """By open requests: the router, and evidence, whose queue they are."""

    target_ongoing_requests: float = Field(gt=0, description="open requests of one replica, running and waiting")
    drain_s: float = Field(
        default=600.0, gt=0, description="a replica that is to end finishes its requests first, for at most so long"
    )

    def goals(self) -> dict[str, Any]:
        return {"loads": {REQUESTS: self.target_ongoing_requests}}


class TargetScaling(RequestScaling):
    """By open requests and by how full the KV cache is."""

    kv_usage: float = Field(default=0.8, gt=0, le=1, description="share of the KV cache in use in one replica")

    def goals(self) -> dict[str, Any]:
        return {"loads": {REQUESTS: self.target_ongoing_requests, "kv_usage": self.kv_usage}}


class DraftScaling(Scaling):
    """By how busy drafts are, how full, and how often they are late."""

    min_replicas: int = Field(
        default=1, ge=0, description="0: end the last one where nothing runs; targets go on plainly"
    )
    downscale_to_zero_delay_s: float = Field(
        default=300.0,
        ge=0,
        description="the last replica ends after so long without a session; it takes seconds to come back",
    )
    busy: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="share of time spent answering; working ahead does not count, for that fills any time there is",
    )
    sessions: float = Field(default=0.8, gt=0, le=1, description="share of slots with a session")
    late: float = Field(
        default=0.1, gt=0, lt=1, description="share of rounds unanswered in time; one replica more beyond"
    )
    answers: float = Field(default=4.0, gt=0, description="requests for whole answers, running and waiting")

    @model_validator(mode="after")
    def _forgets_in_time(self) -> "DraftScaling":
        if self.min_replicas == 0 and self.downscale_to_zero_delay_s < self.look_back_period_s:
            raise ValueError(
                "downscale_to_zero_delay_s is less than look_back_period_s: what was asked before would start the draft again"
            )
        return self

    def goals(self) -> dict[str, Any]:
        return {
            "loads": {"busy": self.busy, "sessions": self.sessions, "answers": self.answers},
            "alarms": {"late": self.late},
            "activity": ["sessions", "answers"],
        }

    def serve_config(self, initial: int) -> dict[str, Any]:
        return super().serve_config(initial) | {"downscale_to_zero_delay_s": self.downscale_to_zero_delay_s}


class Autoscaling(Strict):
    """One section for each deployment that scales; ``replicas`` elsewhere is then how many it starts with."""

    router: RequestScaling | None = None
    target: TargetScaling | None = None
    drafts: dict[DraftName, DraftScaling] = Field(default_factory=dict, description="by the names in args.drafts")
    evidence: RequestScaling | None = Field(default=None, description="only without index, which has one writer")

    def problems(self, drafts: dict[str, int], target: int, router: int, indexed: bool | None) -> list[str]:
        """What does not fit the rest of the configuration: numbers to start with, ``indexed`` None without evidence."""
        found = []
        for name in self.drafts:
            if name not in drafts:
                found.append(f"drafts.{name}: no such draft; drafts: {', '.join(sorted(drafts)) or 'none'}")
        if self.evidence is not None and indexed is None:
            found.append("evidence: there is no args.evidence to scale")
        elif self.evidence is not None and indexed:
            found.append("evidence: an index has one writer; leave this out, or args.evidence.index")
        starts: list[tuple[str, Scaling | None, int]]
        starts = [("router", self.router, router), ("target", self.target, target), ("evidence", self.evidence, 1)]
        starts += [
            (f"drafts.{name}", section, drafts[name]) for name, section in self.drafts.items() if drafts.get(name)
        ]
        for where, section, start in starts:
            if section is not None and not section.min_replicas <= start <= section.max_replicas:
                found.append(
                    f"{where}: starts with {start}, not between {section.min_replicas} and {section.max_replicas}"
                )
        return found
