"""What an example is: some requests, what came of them, and what in that was right or wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.demo.client import Answer
from scripts.examples_lib.app import App

ATTEMPTS = 6
PAUSE_S = 1.0  # longer than a circuit that has just opened stays open


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One request in answer mode."""

    question: str
    answer: Answer
    names: dict[str, str] = field(default_factory=dict)  # what to call a source here: "given#0" says little

    @property
    def told(self) -> dict[str, Any]:
        """What the trace says of the drafts."""
        chain = self.answer.chain or {}
        result: dict[str, Any] = chain.get("answer") or {}
        return result

    def name(self, index: int) -> str:
        """Who wrote draft ``index``."""
        source = str(self.told["drafts"][index]["source"])
        return self.names.get(source, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a program can check of an answer."""

    right: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an example did."""

    steps: list[Step]
    shows: str  # what this is an example of
    findings: list[Finding]
    unchecked: str = ""  # what nobody checked

    @property
    def mistakes(self) -> list[str]:
        return [finding.text for finding in self.findings if not finding.right]

    def as_dict(self) -> dict[str, Any]:
        steps = [
            {
                "question": step.question,
                "names": step.names,
                "answer": step.answer.text,
                "tokens": step.answer.tokens,
                "seconds": round(step.answer.seconds, 3),
                "chain": step.answer.chain,
            }
            for step in self.steps
        ]
        findings = [{"right": finding.right, "text": finding.text} for finding in self.findings]
        return {"steps": steps, "shows": self.shows, "findings": findings, "unchecked": self.unchecked}


def patiently(ask: Callable[[], Step], whole: Callable[[dict[str, Any]], bool] = lambda told: True) -> Step:
    """Ask again where part of the trace is missing because a source, a validator or the scoring was late: mostly it is there then."""
    for _ in range(ATTEMPTS - 1):
        step = ask()
        if whole(step.told) and "score" not in step.told.get("reasons", {}):
            return step
        time.sleep(PAUSE_S)
    return ask()


def drafted(source: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a source drafted, or had nothing to say, or was not needed."""
    return lambda told: told.get("reasons", {}).get(source) in (None, "not_needed", "no_match")


class Example(Protocol):
    """A module of :mod:`scripts.examples_lib`."""

    LINE: str  # what it is about, in one line

    def run(self, app: App) -> Report:
        """Raises DemoError where the application does not answer."""
