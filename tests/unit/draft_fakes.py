"""A tiny deterministic model for engine tests: its logits depend on every token of the sequence and on nothing else."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Drafts, Sampling, Step
from deployments.draft.engine import DraftEngine
from hw.onnx.costs import StepCosts

VOCAB = 40


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeModel:
    """KV is the token itself, per slot and position; garbage past what was computed, as in real slots.

    ``bad_token`` fails any call that has it, ``nan_token`` yields NaN for its row. Calls take their modelled cost.
    """

    def __init__(self, *, slots: int = 4, context: int = 64, clock: Clock | None = None) -> None:
        self.vocab_size, self.context, self.slots = VOCAB, context, slots
        self.costs = StepCosts()
        self.clock = clock
        self.bad_token = self.nan_token = -1
        self.calls: list[tuple[str, int]] = []
        self.history: Callable[[int], list[int]] | None = None  # tokens that a slot's line consists of
        self.kv = np.random.default_rng(0).integers(0, VOCAB, (slots, context))

    def _logits(self, slot: int, length: int) -> npt.NDArray[np.float32]:
        known = self.kv[slot, :length]
        mixed = int((known * (np.arange(length) * 7 + 3)).sum() + length) % 9973
        logits = np.random.default_rng(mixed).normal(size=VOCAB).astype(np.float32) * 2
        return np.full_like(logits, np.nan) if known[-1] == self.nan_token else logits

    def _spend(self, seconds: float) -> None:
        if self.clock:
            self.clock.now += seconds

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        assert 0 <= start < start + len(tokens) <= self.context
        self.calls.append(("prefill", len(tokens)))
        self._spend(self.costs.prefill(len(tokens)))
        if self.bad_token in tokens:
            raise RuntimeError("bad token")
        self.kv[slot, start : start + len(tokens)] = tokens
        self._check(slot, start + len(tokens))
        return self._logits(slot, start + len(tokens))

    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]
    ) -> list[npt.NDArray[np.float32]]:
        assert len(set(slots)) == len(slots)
        assert all(0 <= length < self.context for length in lengths)
        self.calls.append(("decode", len(slots)))
        self._spend(self.costs.decode(len(slots)))
        if self.bad_token in tokens:
            raise RuntimeError("bad token")
        for slot, token, length in zip(slots, tokens, lengths, strict=True):
            self.kv[slot, length] = token
            self._check(slot, length + 1)
        return [self._logits(slot, length + 1) for slot, length in zip(slots, lengths, strict=True)]

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        assert 0 <= start < length <= self.context
        self.calls.append(("move", length - start))
        self.kv[target, start:length] = self.kv[source, start:length]

    def write_kv(self, slot: int, start: int, kv: npt.NDArray[Any]) -> None:
        assert kv.shape == (2, 1, kv.shape[2], 2), kv.shape  # one layer, one head, two numbers: the token, twice
        self.calls.append(("write_kv", kv.shape[2]))
        self.kv[slot, start : start + kv.shape[2]] = kv[0, 0, :, 0].astype(int)

    def _check(self, slot: int, length: int) -> None:
        if self.history is not None:
            expected = self.history(slot)[:length]
            if self.kv[slot, :length].tolist() != expected:
                raise WrongKV(f"slot {slot} holds {self.kv[slot, :length]}, not {expected}")


class WrongKV(BaseException):
    """A call would have computed over KV of other tokens. Not an Exception: the engine must not take it for a bad session."""


def engine(model: FakeModel | None = None, **more: object) -> DraftEngine:
    """An engine over a fake model that checks, at every call, that slots hold the tokens of the lines they belong to."""
    model = model or FakeModel()
    arguments: dict[str, object] = {"paced": False, "top_k": 2, **more}
    drafter = DraftEngine(model, **arguments)  # type: ignore[arg-type]
    model.history = lambda slot: histories(drafter)[slot]
    return drafter


def histories(drafter: DraftEngine) -> dict[int, list[int]]:
    """The tokens of every session, branch and answer, by slot."""
    sessions = drafter._store.sessions.values()
    lines = [line for session in sessions for line in (session, *session.branches)]
    rows = [(job, row) for job in drafter._writer._running for row in job.holders]
    return {line.slot: line.history() for line in lines} | {row.slot: job.history(row) for job, row in rows}


def check_kv(drafter: DraftEngine) -> None:
    """Assert that slots hold what their lines computed, and spares and kept prompts what they claim to hold."""
    model = drafter._model
    assert isinstance(model, FakeModel)
    for kept in drafter._store.loans.kept:
        assert model.kv[kept.slot, : len(kept.tokens)].tolist() == kept.tokens
    for job in drafter._writer._running:
        for row in job.holders:
            known = job.history(row)[: max(row.copied, job.position(row) if row.copied == len(job.prompt) else 0)]
            assert model.kv[row.slot, : len(known)].tolist() == known
    for session in drafter._store.sessions.values():
        main = session.history()
        assert model.kv[session.slot, : session.computed].tolist() == main[: session.computed]
        for branch in session.branches:
            assert model.kv[branch.slot, : branch.computed].tolist() == branch.history()[: branch.computed]
        for spare in session.spares:
            assert model.kv[spare.slot, : spare.valid].tolist() == main[: spare.valid]


def step(
    drafter: DraftEngine,
    commits: Iterable[Commit] = (),
    closed: Iterable[str] = (),
    *,
    target: str = "t",
    number: int = 1,
    deadline_s: float = 10.0,
    worth_s: float = 0.0,
) -> Drafts:
    """One step, with the engine's bookkeeping and its KV checked after it."""
    answer = drafter.step(Step(PROTOCOL_VERSION, target, number, deadline_s, list(commits), list(closed), worth_s))
    drafter.check_integrity()
    check_kv(drafter)
    return answer


def opening(
    session: str,
    tokens: list[int],
    want: int = 4,
    *,
    epoch: int = 0,
    sampling: Sampling | None = None,
    tenant: str = "",
    verifying: list[int] | None = None,
    kv: bytes = b"",
) -> Commit:
    return Commit(session, epoch, len(tokens), list(tokens), want, sampling, tenant, verifying or [], kv)


def fresh_draft(tokens: list[int], want: int, sampling: Sampling | None, **more: object) -> list[int]:
    """What an engine that never saw anything else drafts after ``tokens``."""
    answer = step(engine(FakeModel(context=512), **more), [opening("x", tokens, want, sampling=sampling)])
    return answer.drafts[0].tokens
