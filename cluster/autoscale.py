"""How many replicas a deployment should have: one pure rule, and the Serve policy that feeds it.

Serve pickles this module by value into its controller, whose environment need not hold this project: standard library only.
Delays between a wish and its fulfilment, bounds, and the first replica out of none are Serve's own
(``ray/serve/autoscaling_policy.py``, which wraps every custom policy); the rule here says what the load asks for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLIND_SINCE = "blind_since"  # in the policy's state: when a signal went missing, seconds since the epoch
REQUESTS = "requests"  # Serve's own count: running and queued at handles, over all replicas


@dataclass(frozen=True)
class Goals:
    """What one replica should carry. Names are those a replica reports with ``record_autoscaling_stats``."""

    loads: Mapping[str, float]  # signal: its value in one well-used replica; the most loaded signal decides
    alarms: Mapping[str, float] = field(default_factory=dict)  # signal: from this mean on, one replica more
    activity: Sequence[str] = ()  # signals that are all exactly 0 where nothing is left to do
    tolerance: float = 0.1  # hysteresis: a change must be asked for by so much more (or less) than the present load
    hold_s: float = 60.0  # a signal that is missing keeps the deployment from shrinking for so long
    alarm_from: float = 0.5  # alarms of replicas less loaded than this have causes that more replicas do not cure


@dataclass(frozen=True)
class Reading:
    """What is known at one moment."""

    now: float  # seconds since the epoch
    replicas: int  # running
    target: int  # decided on before; more than run while some start
    signals: Mapping[str, Sequence[float]]  # one value a running replica; NaN where it is not known
    requests: float = math.nan  # over all replicas


def decide(reading: Reading, goals: Goals, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of replicas wished for, and what to hand in again as ``state`` the next time.

    Grows on any signal that is there; shrinks only when all are. A signal that stays away for ``hold_s`` is left out
    thereafter, and with none left the wish is one replica fewer each time.
    """
    if reading.replicas == 0:
        return reading.target, {}  # nobody there to report: Serve itself starts the first one when a request waits
    needs, missing = _needs(reading, goals)
    if _idle(reading, goals):
        needs, missing = [0.0], False
    wish = _steady(max(needs), reading.target, goals.tolerance) if needs else reading.target
    loaded = bool(needs) and max(needs) >= goals.alarm_from * reading.replicas
    if loaded and any(_mean(reading.signals.get(name, ())) > bound for name, bound in goals.alarms.items()):
        wish = max(wish, reading.replicas + 1)
    if not missing:
        return wish, {}
    since = float(state.get(BLIND_SINCE, reading.now))
    seen: dict[str, Any] = {BLIND_SINCE: since}
    if wish > reading.target:
        return wish, seen
    if reading.now - since < goals.hold_s:
        return reading.target, seen
    return (wish if needs else max(0, reading.target - 1)), seen


def _needs(reading: Reading, goals: Goals) -> tuple[list[float], bool]:
    """Replicas that each known signal asks for (not rounded), and whether any is not known."""
    needs, missing = [], False
    for name, goal in goals.loads.items():
        mean = reading.requests / reading.replicas if name == REQUESTS else _mean(reading.signals.get(name, ()))
        if math.isfinite(mean):
            needs.append(max(0.0, mean) * reading.replicas / goal)
        else:
            missing = True
    return needs, missing


def _mean(values: Sequence[float]) -> float:
    """Of what is known; NaN when that is less than half: a replica that just started says nothing yet."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known and 2 * len(known) >= len(values) else math.nan


def _idle(reading: Reading, goals: Goals) -> bool:
    """Does every replica report that it has nothing to do?"""
    return bool(goals.activity) and all(
        len(values := reading.signals.get(name, ())) == reading.replicas and not any(value != 0 for value in values)
        for name in goals.activity
    )


def _steady(need: float, target: int, tolerance: float) -> int:
    """``need`` rounded up, unless the present number is right within the tolerance."""
    rise, fall = math.ceil(need / (1 + tolerance) - 1e-9), math.ceil(need * (1 + tolerance) - 1e-9)
    if rise > target:
        return rise
    return fall if fall < target else target


class Scaler:
    """A Serve autoscaling policy: ``AutoscalingConfig(policy={"policy_function": "cluster.autoscale:Scaler", …})``."""

    def __init__(self, **goals: Any) -> None:
        """``goals``: fields of :class:`Goals`, as JSON."""
        self._goals = Goals(**goals)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """``context``: a ``ray.serve.config.AutoscalingContext``."""
        state = context.policy_state
        return decide(read(context, self._goals), self._goals, state if isinstance(state, Mapping) else {})


def read(context: Any, goals: Goals) -> Reading:
    """A reading out of Serve's context. What a replica last said longer ago than a look-back period is not known."""
    raw, means = context.raw_metrics or {}, context.aggregated_metrics or {}
    replicas = list(context.running_replicas)
    oldest = context.current_time - context.config.look_back_period_s

    def value(name: str, replica: Any) -> float:
        series = raw.get(name, {}).get(replica) or ()
        mean = means.get(name, {}).get(replica)
        return math.nan if mean is None or not series or series[-1].timestamp < oldest else float(mean)

    names = {*goals.loads, *goals.alarms, *goals.activity} - {REQUESTS}
    requests = context.total_num_requests if REQUESTS in goals.loads else None
    return Reading(
        now=context.current_time,
        replicas=len(replicas),
        target=context.target_num_replicas,
        signals={name: [value(name, replica) for replica in replicas] for name in names},
        requests=math.nan if requests is None else float(requests),
    )
