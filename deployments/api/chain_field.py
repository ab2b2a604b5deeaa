"""The ``chain`` field of a request: what a client may ask of the chain."""

import json
import secrets
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from deployments.chain.acceptance.policy import LOSSLESS, Policy
from deployments.chain.answer.resolution import Resolve
from deployments.chain.given import MAX_DRAFTS
from deployments.chain.protocol import MAX_DRAFT_TOKENS
from deployments.config.answer import MOST_DRAFTS, MOST_TOKENS

SEED_MASK = (1 << 63) - 1
ANSWER_ONLY = ("k", "length", "thresholds", "resolve", "escalate", "validators", "scaffold")
MOST_VALIDATORS = 8

Share = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1)]


class ThresholdsField(BaseModel):
    """Distances between drafts that decide about agreement; see docs/answer_chain.md."""

    model_config = ConfigDict(extra="forbid")

    agree: Share | None = None
    diverge: Share | None = None
    guard: StrictBool | None = None


class ChainField(BaseModel):
    """``{"enabled": false}`` is plain decoding; ``{"trace": true}`` returns the rounds; ``tokens`` caps a round's draft;
    ``sources`` lets only these draft: ``"model"`` (the draft deployments) and the configured sources without a model.
    ``policy`` says what of a draft is accepted: a preset's or policy's name, or ``{"name": "nkl", "delta": 0.1}``.
    ``mode: "answer"`` collects whole drafts first, and the fields from ``k`` on act; None: the application's default.
    """

    model_config = ConfigDict(extra="forbid")

    enabled: StrictBool | None = Field(default=None, description="None: the application's default")
    trace: StrictBool | Literal["events"] = False
    tokens: StrictInt | None = Field(default=None, ge=1, le=MAX_DRAFT_TOKENS)
    sources: list[StrictStr] | None = Field(default=None, description="None: all there are")
    policy: StrictStr | dict[str, Any] | None = Field(default=None, description="None: lossless")
    mode: Literal["token", "answer"] = "token"
    k: StrictInt | None = Field(default=None, ge=0, le=MOST_DRAFTS)
    length: StrictInt | None = Field(default=None, ge=1, le=MOST_TOKENS)
    thresholds: ThresholdsField | None = None
    resolve: Resolve | None = None
    escalate: list[StrictStr] | None = Field(default=None, min_length=1, description="sources asked after a divergence")
    validators: list[StrictStr | dict[str, Any]] | None = Field(default=None, max_length=MOST_VALIDATORS)
    scaffold: StrictBool = False
    drafts: list[StrictStr] | None = Field(
        default=None, max_length=MAX_DRAFTS, description="texts the answer may resemble"
    )


def engine_options(
    field: ChainField | None,
    *,
    enabled: bool,
    trace: bool,
    seed: int | None,
    min_p: float,
    logit_bias: dict[str, float] | None,
    tenant: str = "",
    policy: Policy = LOSSLESS,
    texts: Sequence[str] = (),
) -> str:
    """The JSON string that reaches the worker as ``extra_args["chain"]``.

    ``enabled`` and ``trace`` are the application's: the default of the one, permission for the other. ``texts``: drafts that came
    with the request, for whoever has the target's tokenizer.
    """
    asked = field or ChainField()
    options: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "enabled": enabled if asked.enabled is None else asked.enabled,
        "trace": bool(asked.trace) and trace,
        "seed": secrets.randbits(63) if seed is None else seed & SEED_MASK,
    }
    if asked.tokens is not None:
        options["tokens"] = asked.tokens
    if asked.sources is not None:
        options["sources"] = asked.sources
    if policy.lossy:
        options["policy"] = msgspec.to_builtins(policy)
    if tenant:
        options["tenant"] = tenant
    if min_p:
        options["min_p"] = min_p
    if logit_bias:
        options["logit_bias"] = logit_bias
    if texts:
        options["texts"] = list(texts)
    return json.dumps(options)
