"""The section ``args.answer``: defaults of requests with ``chain.mode: answer``."""

from pydantic import Field, field_validator, model_validator

from deployments.chain.answer.consensus import Thresholds
from deployments.chain.answer.resolution import TEMPLATE, Resolve, check_template
from deployments.config.strict import Strict

MOST_DRAFTS = 8  # of models, for one request
MOST_TOKENS = 1_024  # of one draft; comparing two takes a tenth of a second then


class Answer(Strict):
    """The answer chain. Deadlines are in ``args.faults``."""

    enabled: bool = Field(default=True, description="requests may ask for it")
    k: int = Field(default=3, ge=0, le=MOST_DRAFTS, description="drafts asked of the draft models, all together")
    length: int = Field(default=64, ge=1, le=MOST_TOKENS, description="most tokens of a draft")
    agree: float = Field(default=0.1, ge=0, le=1, description="drafts closer than this agree")
    diverge: float = Field(default=0.15, ge=0, le=1, description="nobody closer than this: the drafts diverge")
    guard: bool = Field(
        default=True, description="drafts that differ in a number, a negation or a name never agree, however close"
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="of drafts; None: the request's")
    top_k: int = Field(default=8, ge=0, le=64, description="probabilities a draft model sends with each token")
    resolve: Resolve = Field(default="choose", description="who decides where drafts diverge")
    template: str = Field(default=TEMPLATE, description="of resolve: write; has $question, $drafts and $mark")
    abstention: str = Field(
        default="The drafts of an answer contradict each other, so none is given.",
        min_length=1,
        description="the answer of resolve: abstain",
    )

    @field_validator("template")
    @classmethod
    def _usable(cls, value: str) -> str:
        check_template(value)
        return value

    @model_validator(mode="after")
    def _ordered(self) -> "Answer":
        self.thresholds  # noqa: B018  # raises where they are in the wrong order
        return self

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(agree=self.agree, diverge=self.diverge, guard=self.guard)
