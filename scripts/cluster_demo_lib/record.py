"""What happened during a load: a sample each second, and what came of every request; as JSON and as a picture."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deployments.config import AppConfig
from deployments.config.load import REPOSITORY
from deployments.names import draft_name, target_name
from scripts.bench_lib.machine import commit, machine, versions
from scripts.cluster_demo_lib.load import Load, throughput
from scripts.cluster_demo_lib.state import State, totals

WINDOW_S = 5.0  # of a throughput
STARTING = ("STARTING", "PENDING_ALLOCATION", "PENDING_INITIALIZATION")
COUNTED = ("committed_tokens", "drafted_tokens", "accepted_tokens")


@dataclass(slots=True)
class Sample:
    """One moment."""

    at: float  # seconds since the load began
    clients: int
    drafts: int  # running replicas
    drafts_starting: int
    targets: int
    targets_starting: int
    tokens_per_s: float  # over the last seconds; replaced at the end, when it is known of all answers
    answers: int  # so far
    failed: int  # of them, neither whole nor refused


def phases(text: str) -> list[tuple[int, float]]:
    """``CLIENTS:SECONDS,…``; raises ArgumentTypeError."""
    try:
        found = [(int(part.split(":")[0]), float(part.split(":")[1])) for part in text.split(",")]
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r} is not CLIENTS:SECONDS,…") from None
    if any(clients < 0 or seconds <= 0 for clients, seconds in found):
        raise argparse.ArgumentTypeError("clients cannot be negative, and seconds are more than none")
    return found


class Recorder:
    """Of one run."""

    def __init__(self, config: AppConfig, application: str, plain: Sequence[str]) -> None:
        """``plain``: answers without drafts, by prompt."""
        self.application = application
        self.samples: list[Sample] = []
        self._target = target_name(config.target.name)
        self._drafts = [draft_name(draft.name) for draft in config.drafts]
        self._plain = list(plain)
        self._load: Load | None = None
        self._began = 0.0
        self._counted: Counter[str] = Counter()
        self._last: dict[str, float] = {}

    def begin(self, load: Load) -> None:
        """The load starts now."""
        self._load, self._began = load, time.monotonic()

    def draft_replicas(self, state: State) -> int:
        return sum(len(state.running(name)) for name in self._drafts)

    def sample(self, clients: int, state: State) -> Sample:
        """Take one."""
        assert self._load is not None
        now = time.monotonic()
        self._count()
        answers = self._load.answers
        sample = Sample(
            at=now - self._began,
            clients=clients,
            drafts=self.draft_replicas(state),
            drafts_starting=sum(r.deployment in self._drafts and r.state in STARTING for r in state.replicas),
            targets=len(state.running(self._target)),
            targets_starting=sum(r.deployment == self._target and r.state in STARTING for r in state.replicas),
            tokens_per_s=throughput(self._load.since(now - WINDOW_S), now - WINDOW_S, now),
            answers=len(answers),
            failed=sum(not answer.whole and not answer.refused for answer in answers),
        )
        self.samples.append(sample)
        return sample

    def _count(self) -> None:
        """Add what the targets counted since the last time; those that ended take their last second with them."""
        now = totals(self.application, self._target, "draft_stats")
        for name in COUNTED:
            grown = now.get(name, 0.0) - self._last.get(name, 0.0)
            self._counted[name] += int(max(0.0, grown))
        if now:
            self._last = now

    def end(self) -> None:
        """All requests have ended: throughput as it really was."""
        assert self._load is not None
        for sample in self.samples:
            at = self._began + sample.at
            sample.tokens_per_s = throughput(self._load.answers, at - WINDOW_S / 2, at + WINDOW_S / 2)

    def summary(self) -> dict[str, Any]:
        """What became of the requests, and how far the pools went."""
        assert self._load is not None
        answers = self._load.answers
        whole = [answer for answer in answers if answer.whole]
        return {
            "requests": len(answers),
            "whole": len(whole),
            "refused": sum(answer.refused for answer in answers),
            "failed": sum(not answer.whole and not answer.refused for answer in answers),
            "different_from_plain": sum(answer.text != self._plain[answer.prompt] for answer in whole),
            "drafts": [sample.drafts for sample in (self.samples[0], self._peak("drafts"), self.samples[-1])],
            "targets": [sample.targets for sample in (self.samples[0], self._peak("targets"), self.samples[-1])],
            "counted_by_targets": dict(self._counted),
        }

    def _peak(self, name: str) -> Sample:
        return max(self.samples, key=lambda sample: int(getattr(sample, name)))

    def said(self) -> str:
        """The summary for people."""
        found = self.summary()
        return (
            f"{found['requests']} requests: {found['whole']} whole, {found['refused']} refused, {found['failed']} failed, "
            f"{found['different_from_plain']} different from plain decoding; replicas at first, at most and at last: "
            f"drafts {found['drafts']}, targets {found['targets']}"
        )


def written(recorder: Recorder, options: argparse.Namespace) -> list[Path]:
    """Write the JSON and, where matplotlib is there, the picture; returns the files."""
    out: Path = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "about": "scripts/cluster_demo: four nodes on one machine, pools that scale by themselves",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(REPOSITORY),
        "machine": machine(),
        "versions": versions(),
        "config": options.config.resolve().relative_to(REPOSITORY).as_posix()
        if options.config.resolve().is_relative_to(REPOSITORY)
        else options.config.name,
        "tokens_per_answer": options.tokens,
        "phases": [{"clients": clients, "seconds": seconds} for clients, seconds in options.phases],
        "summary": recorder.summary(),
        "samples": [{k: round(v, 2) for k, v in asdict(sample).items()} for sample in recorder.samples],
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    try:
        return [out, draw(recorder.samples, out.with_suffix(".png"))]
    except ImportError:
        return [out]


def draw(samples: Sequence[Sample], file: Path) -> Path:
    """Clients, throughput and replicas over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    at = [sample.at for sample in samples]
    top.step(at, [sample.clients for sample in samples], where="post", color="#999999")
    top.set_ylabel("clients")
    middle.plot(at, [sample.tokens_per_s for sample in samples], color="#0072B2")
    middle.set_ylabel("tokens/s")
    bottom.step(at, [sample.drafts for sample in samples], where="post", color="#E69F00", label="draft replicas")
    bottom.step(
        at,
        [sample.targets for sample in samples],
        where="post",
        color="#009E73",
        linestyle="--",
        label="target replicas",
    )
    bottom.set_ylabel("running")
    bottom.set_xlabel("seconds")
    bottom.set_yticks(range(max([sample.drafts + sample.targets for sample in samples] + [2]) + 1))
    bottom.set_ylim(-0.1, max(max(sample.drafts, sample.targets) for sample in samples) + 0.5)
    bottom.legend(loc="upper left")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        axes.set_xlim(0, at[-1])
    figure.savefig(file, dpi=110)
    return file
