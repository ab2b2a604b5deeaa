"""The autoscaling rule on traces, and as Serve runs it: pickled, wrapped, with delays."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig

from cluster.autoscale import Goals, Reading, decide
from deployments.config.autoscaling import Autoscaling, DraftScaling, RequestScaling, TargetScaling

NAN = math.nan
BUSY = Goals(loads={"busy": 0.5}, alarms={"late": 0.1}, activity=["sessions"], tolerance=0.1, hold_s=60)


def reading(target: int, busy: list[float], now: float = 0.0, **signals: list[float]) -> Reading:
    sessions = signals.pop("sessions", [1.0] * len(busy))
    return Reading(now, len(busy), target, {"busy": busy, "late": [0.0] * len(busy), "sessions": sessions, **signals})


def wish(*args: Any, state: dict[str, Any] | None = None, **kwargs: Any) -> int:
    return decide(reading(*args, **kwargs), BUSY, state or {})[0]


class TestRule:
    def test_rises_with_the_load_and_falls_with_it(self) -> None:
        trace, target = [0.2, 0.9, 1.8, 1.8, 0.9, 0.2], 1
        seen = []
        for load in trace:  # spread evenly over what runs
            target = wish(target, [load / target] * target)
            seen.append(target)
        assert seen == [1, 2, 4, 4, 2, 1]

    def test_the_most_loaded_signal_decides(self) -> None:
        goals = Goals(loads={"busy": 0.5, "kv": 0.8})
        found = decide(Reading(0, 2, 2, {"busy": [0.1, 0.1], "kv": [1.0, 1.0]}), goals, {})
        assert found == (3, {})

    def test_does_not_flap_around_a_boundary(self) -> None:
        for start in (2, 3):
            target = start
            for step in range(50):
                target = wish(
                    target, [(0.97 + 0.06 * (step % 2)) / target] * target
                )  # wants 1.94 and 2.06 replicas by turns
                assert target <= start
            assert target == 2 if start == 2 else target in (2, 3)

    def test_replicas_that_start_are_not_asked_for_twice(self) -> None:
        assert wish(2, [1.0]) == 2  # one runs and has work for two, the second starts
        assert wish(2, [0.9]) == 2
        assert wish(2, [0.45], late=[0.5]) == 2  # the alarm's one more is on its way

    def test_late_answers_ask_for_one_more(self) -> None:
        assert wish(2, [0.4, 0.4], late=[0.3, 0.2]) == 3

    def test_late_answers_of_an_idle_pool_do_not(self) -> None:
        """Its hardware is too slow for one sequence; more of it would be, too."""
        assert wish(2, [0.1, 0.1], late=[0.9, 0.9]) <= 2

    def test_idle_is_zero_only_when_all_say_so(self) -> None:
        assert wish(1, [0.01], sessions=[0.0]) == 0
        assert wish(2, [0.01, 0.0], sessions=[0.0, 1.0]) == 1
        assert wish(2, [0.01, 0.0], sessions=[0.0, NAN]) == 1
        assert wish(2, [0.01, 0.0], sessions=[]) == 1

    def test_nobody_to_ask(self) -> None:
        assert wish(0, []) == 0
        assert wish(1, []) == 1  # it starts; that is no missing signal

    @pytest.mark.parametrize("broken", [[NAN, NAN], [], [math.inf, NAN]])
    def test_a_missing_signal_holds_then_shrinks(self, broken: list[float]) -> None:
        state: dict[str, Any] = {}
        seen = []
        target = 2
        for now in (0.0, 30.0, 59.0, 61.0, 62.0, 63.0):
            signals = {"busy": broken, "late": [], "sessions": []}
            target, state = decide(Reading(now, 2, target, signals), BUSY, state)
            seen.append(target)
        assert seen == [2, 2, 2, 1, 0, 0]  # bounds are Serve's

    def test_a_signal_that_comes_back_starts_the_wait_anew(self) -> None:
        _, state = decide(reading(2, [NAN, NAN]), BUSY, {})
        _, state = decide(reading(2, [0.5, 0.5], 50.0), BUSY, state)
        target, _ = decide(reading(2, [NAN, NAN], 70.0), BUSY, state)
        assert target == 2

    def test_a_signal_that_is_there_may_grow_while_another_is_missing(self) -> None:
        goals = Goals(loads={"requests": 4.0, "kv": 0.8}, hold_s=60)
        missing: dict[str, list[float]] = {"kv": [NAN, NAN]}
        assert decide(Reading(0, 2, 2, missing, requests=20), goals, {})[0] == 5
        held, state = decide(Reading(0, 2, 2, missing, requests=1), goals, {})
        assert held == 2
        assert decide(Reading(61, 2, 2, missing, requests=1), goals, state)[0] == 1

    def test_one_replica_of_three_that_says_nothing_is_taken_for_the_mean(self) -> None:
        assert wish(3, [0.9, NAN, 0.9]) == 5
        assert wish(3, [0.1, NAN, NAN]) == 3  # too few to shrink by


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: self.now)


class Deployment:
    """A deployment as Serve's autoscaler sees it; replicas start and end at once."""

    def __init__(self, scaling: DraftScaling | TargetScaling | RequestScaling, clock: Clock, start: int = 1) -> None:
        self.config = AutoscalingConfig(**scaling.serve_config(start))
        self.policy = _apply_autoscaling_config(_resolve_policy_callable(self.config.policy))
        self.clock, self.target, self.state = clock, start, {}

    def tick(self, seconds: float, requests: float = 0.0, **signals: float) -> int:
        self.clock.now += seconds
        replicas = [f"r{index}" for index in range(self.target)]
        point = [SimpleNamespace(timestamp=self.clock.now, value=0.0)]
        context = SimpleNamespace(
            current_num_replicas=len(replicas), running_replicas=replicas, target_num_replicas=self.target,
            total_num_requests=requests, policy_state=self.state, config=self.config, current_time=self.clock.now,
            raw_metrics={name: dict.fromkeys(replicas, point) for name in signals},
            aggregated_metrics={name: dict.fromkeys(replicas, value) for name, value in signals.items()},
        )  # fmt: skip
        wanted, self.state = self.policy(context)
        self.target = max(self.config.min_replicas, min(self.config.max_replicas, math.ceil(wanted)))
        return self.target


class TestUnderServe:
    def test_a_draft_goes_to_zero_and_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scaling = DraftScaling(
            min_replicas=0, max_replicas=3, upscale_delay_s=5, downscale_delay_s=30, downscale_to_zero_delay_s=90
        )
        draft = Deployment(scaling, Clock(monkeypatch))
        work = {"busy": 0.9, "sessions": 0.5, "answers": 0.0, "late": 0.0}
        rest = {"busy": 0.0, "sessions": 0.0, "answers": 0.0, "late": 0.0}
        assert [draft.tick(3, **work) for _ in range(3)] == [1, 1, 2]  # after its delay
        assert [draft.tick(10, **rest) for _ in range(4)] == [2, 2, 2, 1]
        assert [draft.tick(30, **rest) for _ in range(4)] == [1, 1, 1, 0]
        assert draft.tick(1000) == 0
        assert draft.tick(1, requests=1.0) == 1  # a target waits at its handle: at once

    def test_a_gap_in_the_load_ends_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draft = Deployment(
            DraftScaling(min_replicas=0, max_replicas=2, downscale_to_zero_delay_s=60), Clock(monkeypatch)
        )
        rest = {"busy": 0.0, "sessions": 0.0, "answers": 0.0, "late": 0.0}
        for _ in range(5):
            assert draft.tick(50, **rest) == 1
            assert draft.tick(1, **(rest | {"busy": 0.1, "sessions": 0.1})) == 1

    def test_replicas_that_fell_silent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = Deployment(
            TargetScaling(min_replicas=1, max_replicas=4, target_ongoing_requests=8, hold_s=60, downscale_delay_s=10),
            Clock(monkeypatch), start=3,
        )  # fmt: skip
        assert [target.tick(20, requests=0.0) for _ in range(4)] == [3, 3, 3, 3]  # no word of KV usage
        assert target.tick(20, requests=0.0) == 1

    def test_targets_by_requests_and_by_kv(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scaling = TargetScaling(max_replicas=4, target_ongoing_requests=8, upscale_delay_s=0)
        assert Deployment(scaling, Clock(monkeypatch)).tick(1, requests=20.0, kv_usage=0.1) == 3
        assert Deployment(scaling, Clock(monkeypatch)).tick(1, requests=2.0, kv_usage=0.99) == 2

    @pytest.mark.parametrize(("look_back", "interval"), [(3.0, 1.0), (15.0, 5.0), (120.0, 10.0)])
    def test_replicas_report_several_times_in_a_look_back_period(self, look_back: float, interval: float) -> None:
        scaling = RequestScaling(max_replicas=2, target_ongoing_requests=1, look_back_period_s=look_back)
        assert AutoscalingConfig(**scaling.serve_config(1)).metrics_interval_s == pytest.approx(interval)

    def test_old_values_are_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cluster.autoscale import read

        config = SimpleNamespace(look_back_period_s=10.0)
        series = [SimpleNamespace(timestamp=80.0, value=0.7)]
        context = SimpleNamespace(
            raw_metrics={"busy": {"r": series}}, aggregated_metrics={"busy": {"r": 0.7}}, running_replicas=["r"],
            current_time=100.0, config=config, target_num_replicas=1, total_num_requests=0.0,
        )  # fmt: skip
        assert math.isnan(read(context, BUSY).signals["busy"][0])
        config.look_back_period_s = 30.0
        assert read(context, BUSY).signals["busy"] == [0.7]

    def test_the_policy_runs_where_this_project_is_not_installed(self, tmp_path: Path) -> None:
        config = AutoscalingConfig(**RequestScaling(max_replicas=3, target_ongoing_requests=2).serve_config(1))
        (tmp_path / "policy.bin").write_bytes(config.policy.get_serialized_policy_def() or b"")
        program = (
            "import cloudpickle, sys, types\n"
            "policy = cloudpickle.loads(open('policy.bin', 'rb').read())(loads={'requests': 2.0})\n"
            "context = types.SimpleNamespace(raw_metrics={}, aggregated_metrics={}, running_replicas=['a'], current_time=0.0,\n"
            "    config=types.SimpleNamespace(look_back_period_s=1.0), target_num_replicas=1, total_num_requests=6.0,\n"
            "    policy_state={})\n"
            "assert not any(name.startswith(('cluster', 'deployments')) for name in sys.modules)\n"
            "print(policy(context))\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            cwd=tmp_path,
            env={"PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.stdout.strip(), done.stderr) == ("(3, {})", "")


class TestSection:
    def problems(self, **sections: Any) -> list[str]:
        return Autoscaling(**sections).problems(
            {"a": 1, "off": 0}, target=1, router=1, indexed=sections.pop("indexed", True)
        )

    def test_names_and_bounds(self) -> None:
        assert self.problems(drafts={"a": {"max_replicas": 2}}) == []
        assert self.problems(drafts={"b": {"max_replicas": 2}}) == ["drafts.b: no such draft; drafts: a, off"]
        two = {"min_replicas": 2, "max_replicas": 3, "target_ongoing_requests": 4}
        assert self.problems(router=two) == ["router: starts with 1, not between 2 and 3"]
        assert self.problems(evidence={"max_replicas": 2, "target_ongoing_requests": 4})[0].startswith(
            "evidence: an index has one"
        )

    @pytest.mark.parametrize(
        "section",
        [
            {"max_replicas": 1, "min_replicas": 2},
            {"max_replicas": 1, "min_replicas": 0, "downscale_to_zero_delay_s": 1},
            {},
        ],
    )
    def test_contradictions(self, section: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            DraftScaling(**section)
