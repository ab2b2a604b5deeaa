"""Rules: where a pattern matches the question, a text with the pattern's named groups is the draft.

::

    rules:
      - name: refund-period
        pattern: '\\brefund\\b.*\\border (?P<order>[A-Z]{2}\\d{4,8})\\b'
        draft: 'Order {order} can be returned within 30 days of delivery.'
        priority: 10          # higher ones are tried first; 0 if left out
        tenant: 3f…           # only for this tenant; for all if left out
        ignore_case: false    # true if left out
"""

import logging
import string
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import regex  # type: ignore[import-untyped]
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.chain.answer.candidate import Candidate, Question
from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy
from deployments.config.errors import ConfigError, explain, nearest

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_RULES = 10_000
MAX_PATTERN_CHARS = 2_000
MAX_DRAFT_CHARS = 8_000
MAX_GROUP_CHARS = 1_000  # a group that swallowed more of the question is no value to put into an answer
CHECK_EVERY_S = 1.0  # the file is looked at for changes at most so often


class RulesError(ConfigError):
    """The rules cannot be used; each problem names its rule."""


class RuleSpec(BaseModel):
    """One entry of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1, max_length=128)]
    pattern: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARS)]
    draft: Annotated[str, Field(min_length=1, max_length=MAX_DRAFT_CHARS)]
    tenant: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    priority: int = 0
    ignore_case: bool = True


class RulesFile(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rules: Annotated[list[RuleSpec], Field(max_length=MAX_RULES)]


@dataclass(slots=True)
class Rule:
    """A rule ready to be matched, and whether its pattern has shown to take too long."""

    spec: RuleSpec
    pattern: "regex.Pattern[str]"
    parts: tuple[tuple[str, str | None], ...]  # literal text, and the group behind it
    circuit: Circuit = field(repr=False)

    def draft(self, text: str, timeout_s: float) -> str | None:
        """The draft for a question; None where the pattern does not match or a group it needs took no part.

        Raises TimeoutError where matching takes longer than ``timeout_s``.
        """
        match = self.pattern.search(text, timeout=timeout_s, concurrent=True)
        if match is None:
            return None
        said = []
        for literal, group in self.parts:
            said.append(literal)
            if group is not None:
                value = match.group(group)
                if not value or len(value) > MAX_GROUP_CHARS:
                    return None
                said.append(value)
        return "".join(said)


def load_rules(path: Path, faults: FaultPolicy) -> list[Rule]:
    """The file's rules, those with the highest priority first, equal ones as they stand in the file.

    Raises:
        RulesError: naming every problem and its rule.
    """
    content = _read(path)
    try:
        specs = RulesFile.model_validate(content).rules
    except ValidationError as error:
        raise RulesError([f"{path}: {problem}" for problem in explain(error, RulesFile, "")]) from None
    problems: list[str] = []
    rules: list[Rule] = []
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            problems.append(f"{path}: two rules are named {spec.name!r}; names must differ")
        seen.add(spec.name)
        try:
            rules.append(_rule(spec, faults))
        except ValueError as error:
            problems.append(f"{path}: rule {spec.name!r}: {error}")
    if problems:
        raise RulesError(problems)
    return sorted(rules, key=lambda rule: -rule.spec.priority)


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RulesError([f"{path}: larger than {MAX_FILE_BYTES} bytes"])
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RulesError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise RulesError([f"{path}: not UTF-8"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise RulesError([f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}"]) from None
    if not isinstance(content, Mapping):
        raise RulesError([f"{path}: must be a mapping with `rules`, a list"])
    return content


def _rule(spec: RuleSpec, faults: FaultPolicy) -> Rule:
    try:
        pattern = regex.compile(spec.pattern, regex.IGNORECASE if spec.ignore_case else 0)
    except regex.error as error:
        raise ValueError(f"pattern: {error}") from None
    if pattern.fullmatch("", timeout=faults.rule_match_s) is not None:
        raise ValueError("pattern: matches the empty text, and so every question")
    try:
        pieces = list(string.Formatter().parse(spec.draft))
    except ValueError as error:
        raise ValueError(f"draft: {error}; write {{{{ and }}}} for braces") from None
    parts: list[tuple[str, str | None]] = []
    for literal, group, form, conversion in pieces:
        if group is not None:
            if form or conversion or not group.isidentifier():
                raise ValueError(f"draft: {{{group}}} must be the name of a group, nothing else")
            if group not in pattern.groupindex:
                raise ValueError(f"draft: no group {group!r} in the pattern{nearest(group, pattern.groupindex)}")
        parts.append((literal, group))
    return Rule(spec, pattern, tuple(parts), Circuit(faults))


class RuleSource:
    """Drafts of the first rule that matches. The file is read again when it changes; a broken one changes nothing."""

    name = "rules"

    def __init__(self, path: Path, faults: FaultPolicy) -> None:
        """Raises RulesError."""
        self._path = path
        self._faults = faults
        self._stamp = _stamp(path)
        self._rules = load_rules(path, faults)
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self._counts = {"reloads": 0, "reloads_failed": 0, "timeouts": 0}

    def draft(self, question: Question) -> Candidate | None:
        self._reload()
        for rule in self._rules:
            if rule.spec.tenant not in (None, question.tenant) or not rule.circuit.allows(time.monotonic()):
                continue
            try:
                text = rule.draft(question.text, self._faults.rule_match_s)
            except TimeoutError:
                rule.circuit.failure(time.monotonic())
                self._counts["timeouts"] += 1
                logger.warning("rule %s: matching took more than %g s", rule.spec.name, self._faults.rule_match_s)
                continue
            rule.circuit.success()
            if text is not None:
                return Candidate(source=self.name, text=text, note=f"rule {rule.spec.name}")
        return None

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._looked < CHECK_EVERY_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = now
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._rules = load_rules(self._path, self._faults)
                self._counts["reloads"] += 1
            except RulesError as error:
                self._counts["reloads_failed"] += 1
                logger.warning("rules stay as they were: %s", error)
        finally:
            self._lock.release()

    def learn(self, question: Question, answer: str) -> None:
        """Rules are written by people."""

    def stats(self) -> dict[str, float]:
        return {"rules": len(self._rules), **self._counts}

    def close(self) -> None:
        """Nothing is held."""


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does, also when another takes its place."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
