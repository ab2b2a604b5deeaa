"""The answer chain of one request: drafts, what they amount to, who decides, and what the target is given to verify."""

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from deployments.api.answers import AnswerPlan
from deployments.chain.answer.candidate import Candidate
from deployments.chain.answer.consensus import Consensus
from deployments.chain.answer.distance import distance
from deployments.chain.answer.resolution import resolver_text, standings
from deployments.chain.faults import FaultPolicy
from deployments.chain.given import MAX_DRAFTS
from deployments.config.answer import Answer
from deployments.router.answer_metrics import AnswerMetrics
from deployments.router.calls import Calls, Plain
from deployments.router.drafting import HARMLESS, Asked, Drafting, Drafts, Tell, as_told, reason_of
from deployments.router.prompts import Prompts, question_of

logger = logging.getLogger(__name__)

TOO_LONG = "too_long"
FAILED = "failed"
How = Literal["agreed", "only", "likeliest", "unscored", "written", "abstained", "plain"]


@dataclass(slots=True, kw_only=True)
class Decision:
    """What to ask of the target, and why."""

    outcome: str  # of the drafts, see consensus.py; "failed": there was no chain
    how: How = "plain"
    chosen: int | None = None
    given: list[int] = field(default_factory=list)  # drafts for the target to verify, by index
    message: str | None = None  # instead of the last user message
    found: Drafts = field(default_factory=Drafts)
    consensus: Consensus | None = None
    standing: dict[int, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    def tokens(self) -> list[list[int]]:
        """The drafts for the target, tokens only."""
        return [list(self.found.candidates[index].tokens) for index in self.given]

    def tops(self) -> list[dict[str, str] | None]:
        """What their writers thought of those tokens, in the form of the target's options; None where nobody said."""
        return [_top(self.found.candidates[index]) for index in self.given]

    def told(self) -> Plain:
        """As the trace shows it."""
        drafts = []
        for index, candidate in enumerate(self.found.candidates):
            tags = self.found.tags[index] if index < len(self.found.tags) else []
            drafts.append({**as_told(candidate), "tags": tags, "standing": self.standing.get(index)})
        matrix = self.consensus.distances.round(4).tolist() if self.consensus is not None else []
        return {
            "outcome": self.outcome,
            "decision": self.how,
            "chosen": self.chosen,
            "given": self.given,
            "agreeing": list(self.consensus.agreeing) if self.outcome == "consensus" and self.consensus else [],
            "drafts": drafts,
            "distances": matrix,
            "objections": [list(item) for item in self.consensus.objections] if self.consensus is not None else [],
            "reasons": self.found.reasons,
            "ms": self.ms,
        }


def _top(candidate: Candidate) -> dict[str, str] | None:
    if candidate.top_ids is None or candidate.top_probs is None:
        return None
    parts = {"ids": candidate.top_ids.astype("<i4"), "probs": candidate.top_probs.astype("<f2")}
    return {name: base64.b64encode(part.tobytes()).decode() for name, part in parts.items()}


class AnswerChain:
    """Decides; one for all requests of a router."""

    def __init__(
        self,
        calls: Calls,
        prompts: Prompts,
        settings: Answer,
        faults: FaultPolicy,
        metrics: AnswerMetrics,
        *,
        vocab_size: int,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self._prompts, self._settings, self._faults = calls, prompts, settings, faults
        self._metrics, self._clock = metrics, clock
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._drafting = Drafting(calls, prompts.tokenized, vocab_size, faults, clock)
        self._specials = prompts.specials

    async def decide(
        self,
        messages: Sequence[Any],
        plan: AnswerPlan,
        *,
        tenant: str,
        temperature: float,
        seed: int | None,
        max_tokens: int | None,
        stop: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        tell: Tell = lambda event, details: None,
    ) -> Decision:
        """Never raises for what others do: what fails is left out, and the decision says so.

        ``temperature``: the request's. ``stop``: token ids that end its answer beside the target's own. ``tell`` hears what happens.
        """
        found = Drafts()
        try:
            length = min(plan.length, max_tokens or plan.length)
            question = question_of(messages, tenant, length)
            prompt = self._prompts.prompt(question, template_kwargs)
            asked = Asked(
                question=question,
                prompt=prompt,
                plan=plan,
                temperature=temperature if plan.temperature is None else plan.temperature,
                seed=secrets.randbits(62) if seed is None else seed % (1 << 62),
                top_k=self._settings.top_k,
                stop=sorted({*self._prompts.stop, *stop}),
            )
            decision = await self._decide(asked, found, max_tokens, tell)
        except Exception as error:
            logger.warning("an answer comes without its chain: %r", error)
            found.reasons["chain"] = f"{FAILED}: {error}" if isinstance(error, ValueError) else FAILED
            decision = Decision(outcome=FAILED, found=found)
        self._count(decision)
        tell("decision", decision.told())
        return decision

    async def _decide(self, asked: Asked, found: Drafts, max_tokens: int | None, tell: Tell) -> Decision:
        began, plan = self._clock(), asked.plan
        consensus = await self._drafting.collect(asked, plan.sources, found, tell)
        if consensus.outcome in ("divergence", "none") and plan.escalate is not None:
            consensus = await self._drafting.collect(asked, plan.escalate, found, tell)
        drafted = self._clock()
        decision = Decision(outcome=consensus.outcome, found=found, consensus=consensus, chosen=consensus.chosen)
        if consensus.outcome == "consensus":
            decision.how, decision.given = "agreed", list(consensus.agreeing)
        elif consensus.chosen is not None:
            decision.how, decision.given = "only", [consensus.chosen]
        elif consensus.outcome == "divergence" and plan.resolve == "abstain":
            decision.how = "abstained"
        elif consensus.outcome == "divergence" and plan.resolve == "write" and self._write(asked, decision, max_tokens):
            decision.how, decision.given = "written", list(consensus.agreeing)
        elif consensus.outcome != "none":
            await self._choose(asked, decision)
        decision.given = decision.given[:MAX_DRAFTS]
        decision.ms = {
            "drafts": round(1e3 * (drafted - began), 1),
            "resolution": round(1e3 * (self._clock() - drafted), 1),
        }
        return decision

    def _write(self, asked: Asked, decision: Decision, max_tokens: int | None) -> bool:
        """Put all drafts before the target; False where they do not fit."""
        assert decision.consensus is not None
        drafts = [decision.found.candidates[index] for index in decision.consensus.agreeing]
        message = resolver_text(
            asked.question.text,
            drafts,
            template=self._settings.template,
            mark=f"#{secrets.token_hex(8)}",
            specials=self._specials,
        )
        added = self._prompts.count(message) - self._prompts.count(asked.question.text)
        if len(asked.prompt) + added + (max_tokens or asked.question.length) >= self._max_model_len:
            decision.found.reasons["write"] = TOO_LONG
            return False
        decision.message = message
        return True

    async def _choose(self, asked: Asked, decision: Decision) -> None:
        """The likeliest of the drafts that take part; where the target cannot say, all of them are given to it.

        So they are where nobody would know the difference: a lossless answer is the same, comes as fast, and costs no scoring.
        """
        assert decision.consensus is not None
        part = list(decision.consensus.agreeing)[:MAX_DRAFTS]
        if not asked.plan.judge:
            decision.how, decision.given = "unscored", part
            return
        drafts = [list(decision.found.candidates[index].tokens) for index in part]
        deadline_s = self._faults.answer_score_s
        try:
            answers = await self._calls.score(asked.prompt, drafts, 0, deadline_s, asked.question.tenant)
            scores = msgspec.convert(answers, list[Scored])
        except Exception as error:
            logger.warning("drafts could not be scored: %r", error)
            decision.found.reasons["score"] = reason_of(error)
            decision.how, decision.given = "unscored", part
            return
        complete = [
            score.logprobs if not score.reason and len(score.logprobs) == len(draft) else None
            for score, draft in zip(scores, drafts, strict=False)
        ]
        failed = next((score.reason for score in scores if score.reason), "")
        ranked = standings(complete)
        if failed or len(ranked) < len(part):
            decision.found.reasons["score"] = failed or "bad_answer"
        if not ranked:
            decision.how, decision.given = "unscored", part
            return
        decision.standing = {part[standing.index]: round(standing.mean, 4) for standing in ranked}
        decision.how, decision.chosen = "likeliest", part[ranked[0].index]
        decision.given = [decision.chosen]

    def _count(self, decision: Decision) -> None:
        self._metrics.answered(decision.outcome)
        for name, reason in decision.found.reasons.items():
            if reason not in HARMLESS:
                # the sample, the deployment and a sentence are for the trace: labels stay few
                self._metrics.failed(name.split(":")[0], reason if reason.isidentifier() else "other")
        for part, ms in decision.ms.items():
            self._metrics.waited(part, ms)

    async def given_by_evidence(self, messages: Sequence[Any], sources: Sequence[str], tenant: str) -> list[list[int]]:
        """Drafts of sources without a model for the token chain; none where something fails, for it only saves time."""
        try:
            question = question_of(messages, tenant, self._settings.length)
            found = await self._drafting.evidence(question, sources, self._faults.answer_given_s)
        except Exception as error:
            logger.warning("no drafts by %s: %r", ", ".join(sources), error)
            self._metrics.failed("chain", FAILED)
            return []
        for name, reason in found.reasons.items():
            if reason not in HARMLESS:
                self._metrics.failed(name, reason)
        return [list(candidate.tokens) for candidate in found.candidates if candidate.tokens]

    async def distances(self, decision: Decision, answer: str) -> list[float]:
        """How far the answer came out from each draft, by tokens alone."""
        said = self._prompts.tokenized(Candidate(source="answer", text=answer))
        candidates = decision.found.candidates
        return await asyncio.to_thread(
            lambda: [round(distance(said, candidate, self._vocab_size), 4) for candidate in candidates]
        )

    async def learn(self, messages: Sequence[Any], tenant: str, answer: str) -> None:
        """Let the evidence deployment remember an answer; a failure is counted."""
        try:
            question = question_of(messages, tenant, self._settings.length)
            await self._calls.learn(msgspec.to_builtins(question), answer, self._faults.rpc_timeout_s)
        except Exception as error:
            logger.warning("an answer was not remembered: %r", error)
            self._metrics.failed("learn", reason_of(error))


class Scored(msgspec.Struct, frozen=True):
    """What the target thinks of one draft, off the wire."""

    logprobs: list[float]
    reason: str = ""
