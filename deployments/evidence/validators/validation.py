"""Validation as the rest of the system sees it: texts and validators in, tags out, within a budget."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy
from deployments.evidence.validators.base import MAX_TEXT, ParameterError, Tag, unknown
from deployments.evidence.validators.jobs import Backend, Job
from deployments.evidence.validators.registry import Registry, Spec

MAX_TEXTS = 32
MAX_VALIDATORS = 8  # of one request
MAX_CONTEXT_BYTES = 64 * 1024
OTHER = "other"  # for counting: a validator that is not there
BREAKING = ("hung", "died")  # failures that cost a process and the time of those who wait behind it
CIRCUITS = 1024


class Validation:
    """Runs validators on texts. Results are kept by digest; equal jobs under way are run once.

    A tag that is not there when the budget ends is ``unknown``; its job goes on, to its own limit, and is there when asked again.
    A validator (with its parameters) that hangs or dies again and again is left alone for a while.
    """

    def __init__(
        self,
        registry: Registry,
        backend: Backend,
        faults: FaultPolicy,
        *,
        cache: int = 4096,
        tagged: Callable[[str, str, str], None] = lambda validator, tag, failure: None,
    ) -> None:
        """``tagged`` hears of each tag that is handed out: the validator's name (one of the registry's, else ``OTHER``), the tag, and
        why it is no verdict, in one word; empty where it is one.
        """
        self.registry = registry
        self._tagged, self._names = tagged, frozenset(registry.names())
        self._backend, self._faults, self._size = backend, faults, cache
        self._cache: OrderedDict[bytes, Tag] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Tag]] = {}
        self._circuits: OrderedDict[bytes, Circuit] = OrderedDict()
        self._counts: Counter[str] = Counter()

    async def validate(
        self,
        texts: Sequence[str],
        validators: Sequence[Spec],
        budget_s: float,
        context: Mapping[str, Any] | None = None,
    ) -> list[list[dict[str, str]]]:
        """For each text, for each validator ``{"validator": name, "tag": "valid"|"invalid"|"unknown", "why": …}``.

        ``context``: ``question``, ``tenant``, ``today`` (default: UTC's), and ``finished``, a bool for each text: False says that it
        was cut at its length limit. Never raises for what a validator or a request does; see :meth:`check` for requests.
        """
        shared = self._context(context or {})
        finished = (context or {}).get("finished")
        rows: list[list[Tag | asyncio.Task[Tag]]] = []
        for index, text in enumerate(texts):
            whole = not isinstance(finished, Sequence) or index >= len(finished) or bool(finished[index])
            row = {**shared, "finished": whole}
            rows.append(
                [
                    self._submit(text, spec, row) if index < MAX_TEXTS and place < MAX_VALIDATORS else TOO_MANY
                    for place, spec in enumerate(validators)
                ]
            )
        tasks = {item for row in rows for item in row if isinstance(item, asyncio.Task)}
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, budget_s))
        return [
            [self._wire(spec, self._now(spec, item, budget_s)) for spec, item in zip(validators, row, strict=True)]
            for row in rows
        ]

    def check(self, validators: Sequence[Spec]) -> None:
        """Whether a request may ask for these.

        Raises:
            ParameterError: names the validator or parameter at fault and what there is.
        """
        if len(validators) > MAX_VALIDATORS:
            raise ParameterError(f"at most {MAX_VALIDATORS} validators, not {len(validators)}")
        for spec in validators:
            self.registry.resolve(spec)

    async def close(self) -> None:
        """Stop the back-end; what still runs ends unknown."""
        await self._backend.close()
        for task in list(self._running.values()):
            task.cancel()

    def stats(self) -> dict[str, int]:
        """Counters: tags by verdict, cache hits, failures by reason, and the back-end's own."""
        return {**self._counts, "cached": len(self._cache), **self._backend.stats()}

    # --- one job --------------------------------------------------------------------------------------------------

    def _submit(self, text: Any, spec: Spec, context: dict[str, Any]) -> Tag | asyncio.Task[Tag]:
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            return unknown(f"no text of at most {MAX_TEXT} characters", "bad_text")
        try:
            self.registry.resolve(spec)
        except ParameterError as error:
            return unknown(str(error), "bad_parameters")
        job = Job(spec=dict(spec), text=text, context=context, limit_s=self._faults.validator_limit_s)
        try:
            key = job.digest
        except ValueError:  # half a surrogate pair, say
            return unknown("not valid Unicode", "bad_text")
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self._counts["cache_hits"] += 1
            return known
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._run(job))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return task

    async def _run(self, job: Job) -> Tag:
        circuit = self._circuit(job)
        if not circuit.allows(time.monotonic()):
            return unknown(
                f"{job.validator} failed {circuit.failures} times; it is left alone for a while", "circuit_open"
            )
        tag = await self._backend.run(job)
        if tag.failure in BREAKING:
            circuit.failure(time.monotonic())
        elif not tag.failure:
            circuit.success()
            self._cache[job.digest] = tag
            while len(self._cache) > self._size:
                self._cache.popitem(last=False)
        return tag

    def _circuit(self, job: Job) -> Circuit:
        """By validator, its parameters and tenant: one tenant's hopeless schema is not another's problem."""
        tenant = job.context.get("tenant", "")
        key = Job(spec=job.spec, text="", context={"tenant": tenant}, limit_s=0.0).digest
        circuit = self._circuits.setdefault(key, Circuit(self._faults))
        self._circuits.move_to_end(key)
        while len(self._circuits) > CIRCUITS:
            self._circuits.popitem(last=False)
        return circuit

    def _now(self, spec: Any, item: Tag | asyncio.Task[Tag], budget_s: float) -> Tag:
        tag = item if isinstance(item, Tag) else _result(item, budget_s)
        self._counts[f"tag:{tag.tag}"] += 1
        if tag.failure:
            self._counts[f"failure:{tag.failure}"] += 1
        name = _name(spec)
        self._tagged(name if name in self._names else OTHER, tag.tag, tag.failure)
        return tag

    @staticmethod
    def _wire(spec: Any, tag: Tag) -> dict[str, str]:
        return {"validator": _name(spec), "tag": tag.tag, "why": tag.why}

    @staticmethod
    def _context(given: Mapping[str, Any]) -> dict[str, Any]:
        """What validators see of it; a validator that is pure gives one tag for one context, so the day is part of it."""
        kept = {key: value for key, value in given.items() if key != "finished"}
        try:
            small = len(msgspec.msgpack.encode(kept)) <= MAX_CONTEXT_BYTES
        except (TypeError, ValueError, OverflowError, RecursionError):
            small = False
        kept = kept if small else {"tenant": str(given.get("tenant", ""))[:256]}
        return {"today": datetime.now(UTC).date().isoformat(), **kept}


def _name(spec: Any) -> str:
    name = spec.get("name") if isinstance(spec, Mapping) else None
    return str(name)[:64]


TOO_MANY = unknown(f"more than {MAX_TEXTS} texts or {MAX_VALIDATORS} validators", "too_many")


def _result(task: asyncio.Task[Tag], budget_s: float) -> Tag:
    if not task.done():
        return unknown(f"not there within {budget_s:g} s", "late")
    if task.cancelled():
        return unknown("validation has stopped", "stopped")
    error = task.exception()
    return task.result() if error is None else unknown(f"{type(error).__name__}: {error}", "raised")
