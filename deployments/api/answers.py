"""What a request asks of the answer chain, checked, with the application's defaults in the gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.api.chain_field import ANSWER_ONLY, ChainField
from deployments.api.errors import RequestError
from deployments.api.parameters import given_texts
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.chain.answer.consensus import Thresholds
from deployments.chain.answer.resolution import Resolve
from deployments.config.answer import Answer
from deployments.config.errors import nearest
from deployments.evidence.validators.base import ParameterError
from deployments.evidence.validators.registry import Registry

MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Who can draft whole answers in this application, by the names that requests use."""

    models: tuple[str, ...] = ()  # draft deployments
    evidence: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """``model`` is all draft models, ``model:NAME`` one of them."""
        models = [MODEL, *(f"{MODEL}:{name}" for name in self.models)] if self.models else []
        return [*models, *self.evidence]

    def named(self, names: Sequence[str] | None, param: str) -> "Sources":
        """Those of ``names``, None: all. Raises RequestError for one that is not there."""
        if names is None:
            return self
        for name in names:
            if name not in self.names:
                there = ", ".join(self.names) or "none"
                raise RequestError(f"{param}: no source {name!r} of whole answers here; there are: {there}.", param)
        models = tuple(name for name in self.models if MODEL in names or f"{MODEL}:{name}" in names)
        return Sources(models=models, evidence=tuple(name for name in self.evidence if name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """One request's wishes."""

    k: int
    length: int
    thresholds: Thresholds
    resolve: Resolve
    sources: Sources
    escalate: Sources | None  # asked when the first drafts diverge
    validators: tuple[dict[str, Any], ...]
    scaffold: bool
    trace: bool
    events: bool  # trace as SSE events of their own instead of comments
    temperature: float | None  # of the drafts; None: the request's
    texts: tuple[str, ...] = ()  # drafts that the request brought
    judge: bool = True  # somebody sees, or feels, which draft the target likes best


def answer_plan(
    request: ChainChatRequest | ChainCompletionRequest,
    defaults: Answer,
    sources: Sources,
    *,
    trace: bool,
    validators: Registry | None = None,
) -> AnswerPlan | None:
    """The plan of a request in answer mode, None in token mode. ``trace``: whether the application allows traces.

    ``validators``: those there are; None: nobody runs any.

    Raises:
        RequestError: 400 naming the parameter.
    """
    field = request.chain or ChainField()
    if field.mode == "token":
        for name in ANSWER_ONLY:
            if name in field.model_fields_set:
                raise RequestError(f'chain.{name} only acts with chain.mode: "answer".', f"chain.{name}")
        return None
    if not isinstance(request, ChainChatRequest):
        raise RequestError('chain.mode: "answer" is offered by /v1/chat/completions.', "chain.mode")
    if not defaults.enabled or field.enabled is False:
        raise RequestError('chain.mode: "answer" is switched off.', "chain.mode")
    resolve: Resolve = field.resolve or defaults.resolve
    _refuse_unsupported(request, field, resolve)
    return AnswerPlan(
        k=defaults.k if field.k is None else field.k,
        length=field.length or defaults.length,
        thresholds=_thresholds(field, defaults),
        resolve=resolve,
        sources=sources.named(field.sources, "chain.sources"),
        escalate=None if field.escalate is None else sources.named(field.escalate, "chain.escalate"),
        validators=_validators(field.validators or (), validators),
        scaffold=field.scaffold,
        trace=bool(field.trace) and trace,
        events=field.trace == "events",
        temperature=defaults.temperature,
        texts=tuple(given_texts(request)),
        judge=bool(field.trace and trace) or field.scaffold or field.policy is not None,
    )


def _refuse_unsupported(request: ChainChatRequest, field: ChainField, resolve: Resolve) -> None:
    if (request.n or 1) != 1:
        raise RequestError('chain.mode: "answer" gives one answer: n must be 1.', "n")
    if request.tools and request.tool_choice != "none":
        raise RequestError('tools: chain.mode: "answer" compares answers, not calls; send them without it.', "tools")
    if request.continue_final_message or not request.add_generation_prompt:
        name = "continue_final_message" if request.continue_final_message else "add_generation_prompt"
        raise RequestError(f'{name}: chain.mode: "answer" drafts a whole new message.', name)
    formatted = request.structured_outputs is not None or getattr(request.response_format, "type", "text") != "text"
    if formatted and field.scaffold:
        raise RequestError("chain.scaffold adds lines of its own, which no response_format has.", "chain.scaffold")
    if formatted and resolve == "abstain":
        raise RequestError("chain.resolve: an abstention is plain text, which no response_format has.", "chain.resolve")


def _thresholds(field: ChainField, defaults: Answer) -> Thresholds:
    given = field.thresholds
    if given is None:
        return defaults.thresholds
    try:
        return Thresholds(
            agree=defaults.agree if given.agree is None else given.agree,
            diverge=defaults.diverge if given.diverge is None else given.diverge,
            guard=defaults.guard if given.guard is None else given.guard,
        )
    except ValueError as error:
        raise RequestError(f"chain.thresholds: {error}.", "chain.thresholds") from None


def _validators(asked: Sequence[str | Mapping[str, Any]], known: Registry | None) -> tuple[dict[str, Any], ...]:
    """Their names and parameters."""
    if asked and known is None:
        raise RequestError(
            "chain.validators: none here; they run where args.evidence is configured.", "chain.validators"
        )
    found = []
    for index, validator in enumerate(asked):
        spec = {"name": validator} if isinstance(validator, str) else dict(validator)
        if not isinstance(spec.get("name"), str):
            where = f"chain.validators.{index}"
            raise RequestError(f"{where}: a name, or an object with name and parameters{nearest('name', spec)}", where)
        try:
            assert known is not None
            known.check(spec)
        except ParameterError as error:
            raise RequestError(f"chain.validators.{index}: {error}.", f"chain.validators.{index}") from None
        found.append(spec)
    return tuple(found)
