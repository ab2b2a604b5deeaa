"""The configuration sections. Unknown keys are errors; every default says why it is what it is."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from cluster.pools import ACCELERATORS
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import MAX_DRAFT_TOKENS
from deployments.config.answer import Answer
from deployments.config.autoscaling import Autoscaling
from deployments.config.placement import allowed, pool_selectors, told_apart
from deployments.config.presets import with_shipped
from deployments.config.strict import Strict
from deployments.config.validators import Validators
from hw.providers import known_profiles

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=128)]
SOURCE_TOKENS = 24  # of a draft by look-up: runs that repeat are long and cost nothing to make
CoreIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

# Set by fields of our own or by the chain itself; a second way to set them would only hide which one won.
OWNED_ENGINE_KWARGS = {
    "model": "args.target.model",
    "served_model_name": "args.target.name",
    "dtype": "args.target.dtype",
    "max_model_len": "args.target.max_model_len",
    "max_num_seqs": "args.target.max_num_seqs",
    "tensor_parallel_size": "args.target.tensor_parallel_size",
    "enforce_eager": "args.target.eager",
    "kv_cache_memory_bytes": "args.target.kv_cache_gib",
    "speculative_config": "args.drafts and args.chain",
    "worker_cls": "nothing: the chain brings its own worker",
    "additional_config": "nothing: the chain passes its own",
    "distributed_executor_backend": "nothing: it follows from the pool",
}


class Pool(Strict):
    """A kind of hardware: what one replica placed on it asks of Ray."""

    cpus: float = Field(default=1.0, ge=0, description="CPUs of one replica")
    gpus: float = Field(
        default=0.0, ge=0, description="GPUs of one replica; for a target, of each tensor-parallel rank"
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="custom Ray resources, for example {NPU: 1}"
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Ray node labels that must match")
    runtime_env: dict[str, Any] = Field(default_factory=dict, description="Ray runtime_env of replicas on this pool")
    beside_target: bool = Field(
        default=False, description="drafts of this pool may run on nodes that hold the target's GPUs"
    )
    near: Name | None = Field(
        default=None,
        description="a pool whose kind of node this one shares (its labels are taken over): shared memory instead of a network",
    )
    apart: list[Name] = Field(default_factory=list, description="pools whose nodes this one keeps off")

    @field_validator("resources")
    @classmethod
    def _no_builtin_resources(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if name in ("CPU", "GPU", "memory"):
                raise ValueError(f"{name} is not a custom resource: use cpus and gpus")
            if name in ACCELERATORS and value[name] > 1 and value[name] % 1:
                raise ValueError(f"{name}: Ray gives out shares of one device, or whole devices, not {value[name]:g}")
        return value

    def wants(self) -> dict[str, float]:
        """What one replica asks for, in Ray's resource names, without entries of zero."""
        wants = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in wants.items() if amount > 0}


class Target(Strict):
    """The model that answers."""

    name: ModelId = Field(description="model id that clients send")
    model: Path = Field(description="checkpoint folder")
    pool: Name
    replicas: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2, description="None: what the checkpoint says")
    max_num_seqs: int = Field(default=16, ge=1, description="sequences in one engine step")
    tensor_parallel_size: int = Field(default=1, ge=1)
    eager: bool = Field(default=False, description="skip compilation: starts in seconds, a little slower afterwards")
    cores: CoreIds | None = Field(
        default=None,
        description="CPU ids of the engine's threads (CPU pools); the last ones may be a draft's, too: lent while it works",
    )
    kv_cache_gib: float | None = Field(default=None, gt=0, description="None: vLLM decides")
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, description="further vLLM arguments, passed through")

    @field_validator("engine_kwargs")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in OWNED_ENGINE_KWARGS:
                raise ValueError(f"{key} is not set here; use {OWNED_ENGINE_KWARGS[key]}")
        return value


class DraftSpec(Strict):
    """One draft deployment."""

    name: Name
    model: Path = Field(description="folder of the ONNX draft")
    pool: Name
    provider: str = Field(default="cpu", description="execution-provider profile")
    replicas: int = Field(default=1, ge=0, description="0 keeps the draft configured but off")
    context: int = Field(default=2048, ge=16, description="longest sequence it drafts for; longer ones decode plainly")
    slots: int = Field(default=16, ge=1, description="sequences whose KV it holds")
    tokens: int = Field(default=4, ge=1, le=MAX_DRAFT_TOKENS, description="most tokens asked of it in a round")
    top_k: int = Field(
        default=8,
        ge=0,
        le=64,
        description="probabilities sent with each token to requests with a lossy policy; 0: none, such requests decode losslessly",
    )
    predraft: bool = Field(
        default=True, description="draft for likely outcomes while the target verifies; false: only when asked"
    )
    answers_share: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="of the time between messages, for whole answers while drafting wants it too; they always get what is left",
    )
    answers_diversity: float = Field(
        default=0.7,
        gt=0.0,
        le=5.0,
        description="temperature of all whole answers but the first where a request is greedy",
    )
    answers_waiting: int = Field(
        default=16, ge=1, le=1024, description="requests for whole answers held at once; a tenant has at most half"
    )
    threads: int = Field(default=1, ge=1)
    cores: CoreIds | None = Field(default=None, description="CPU ids of its threads")

    @field_validator("provider")
    @classmethod
    def _known_provider(cls, value: str) -> str:
        if value not in known_profiles():
            raise ValueError(f"no provider profile {value!r}; known: {', '.join(known_profiles())}")
        return value

    @model_validator(mode="after")
    def _one_core_a_thread(self) -> "DraftSpec":
        if self.cores is not None and len(self.cores) != self.threads:
            raise ValueError(f"{self.threads} threads need {self.threads} cores or none, not {self.cores}")
        return self


class Tenants(Strict):
    """Whose request a request is. What crosses requests (earlier outputs, shares of a draft) stays within a tenant."""

    header: str = Field(
        default="authorization",
        min_length=1,
        description="request header whose value names the tenant; only a keyed hash of it is kept",
    )
    share_anonymous: bool = Field(
        default=False,
        description="requests without the header form one tenant and learn from one another; false: each is on its own",
    )


class Semantic(Strict):
    """The sentence model behind the policy ``semantic``: it compares the draft's words with the target's where they differ."""

    model: Path = Field(default=Path("models/sentences"), description="its folder; scripts/prepare_models makes it")
    budget_ms: float = Field(
        default=20.0,
        ge=0.0,
        le=1000.0,
        description="most time in one engine step, for all its requests; what is not compared by then does not pass",
    )


class Chain(Strict):
    """Defaults of the token chain; a request's ``chain`` field can override them downwards."""

    enabled: bool = True
    sources: tuple[Literal["suffix", "lookup"], ...] = Field(
        default=("suffix",),
        description="drafts without a model, made in the target itself from the request and the tenant's earlier outputs",
    )
    adaptive: bool = Field(
        default=True,
        description="draft and verify only what measurably pays; false: always, for experiments",
    )
    tenants: Tenants = Field(default_factory=Tenants)
    tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="most draft tokens verified in a round; None: 24 with sources, else the largest of the drafts",
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        description="ask no draft model above so many running sequences; None: what pays is measured",
    )
    trace: bool = Field(default=True, description="answer requests for traces")
    allow_lossy: bool = Field(
        default=True, description="requests may ask for policies that accept tokens other than the target's own"
    )
    semantic: Semantic | None = Field(
        default=None, description="needed for the policy `semantic`; None: requests that ask for it are refused"
    )
    presets: dict[Name, dict[str, Any]] = Field(
        default={},
        validate_default=True,
        description="acceptance policies that requests can name, beside (or in place of) those shipped",
    )

    @field_validator("presets")
    @classmethod
    def _with_shipped(cls, value: dict[str, dict[str, Any]], info: ValidationInfo) -> dict[str, dict[str, Any]]:
        return with_shipped(value, semantic=info.data.get("semantic") is not None)


class Kv(Strict):
    """KV cache that moves between the target and its drafts."""

    enabled: bool = Field(
        default=True,
        description="drafts of the same weights start from the target's KV instead of reading prompts themselves",
    )
    memory_mib: int = Field(
        default=256, ge=1, description="shared memory of one target replica for KV on its way to drafts"
    )
    refresh: bool = Field(
        default=False,
        description="send drafts the KV of every committed position, not only of those they lack: coarse drafts agree better",
    )


class Evidence(Strict):
    """Drafts of whole answers without a model: documents, past answers, rules, templates."""

    pool: Name
    documents: Path | None = Field(default=None, description="folder of .md and .txt files; never written to")
    history: bool = Field(
        default=False, description="remember answers on disk and draft them for the same tenant's like questions"
    )
    index: Path | None = Field(
        default=None, description="folder of the embedding index, made where missing; documents and history need it"
    )
    sentences: Path = Field(default=Path("models/sentences"), description="folder of the sentence model")
    similarity: float = Field(
        default=0.55, ge=0, le=1, description="cosine from which a passage is a draft; measured in docs/evidence.md"
    )
    answer_similarity: float = Field(
        default=0.9, ge=0, le=1, description="cosine from which an earlier question may be the same; measured, too"
    )
    rules: Path | None = Field(default=None, description="YAML file of patterns and what they draft")
    templates: bool = Field(
        default=True, description="draft from answers to questions of the same shape, within a tenant; in memory only"
    )
    threads: int = Field(default=1, ge=1, description="of the sentence model")
    validators: Validators = Field(default_factory=Validators)

    @model_validator(mode="after")
    def _index_where_needed(self) -> "Evidence":
        if (self.documents or self.history) and self.index is None:
            raise ValueError("documents and history need index: the folder their embeddings are kept in")
        return self

    @property
    def retrieval(self) -> bool:
        """Whether there is anything to look up by meaning."""
        return self.documents is not None or self.history


class Limits(Strict):
    """What is refused rather than queued without end."""

    max_ongoing_requests: int = Field(
        default=64, ge=1, description="in one target replica; the engine queues what exceeds a step"
    )
    max_queued_requests: int = Field(
        default=256, ge=-1, description="waiting in one router; more are answered 503; -1: no bound"
    )
    router_max_ongoing_requests: int = Field(default=1024, ge=1, description="open requests in one router")
    router_replicas: int = Field(default=1, ge=1)
    retry_after_s: int = Field(default=5, ge=1, description="sent with 503 while no target replica is there")


def _fault_section() -> type[Strict]:
    """The fields of FaultPolicy as a section, so that the two can never differ."""
    section: dict[str, Any] = {
        field.name: (Annotated[field.type, Field(gt=0)], field.default) for field in fields(FaultPolicy)
    }
    return create_model("Faults", __base__=Strict, __doc__="Overrides of FaultPolicy.", **section)


Faults: Any = _fault_section()


class AppConfig(Strict):
    """The ``args`` of the application."""

    target: Target
    drafts: list[DraftSpec] = Field(default_factory=list)
    pools: dict[str, Pool]
    chain: Chain = Field(default_factory=Chain)
    answer: Answer = Field(default_factory=Answer)
    kv: Kv = Field(default_factory=Kv)
    evidence: Evidence | None = Field(default=None, description="None: answers are drafted by models only")
    limits: Limits = Field(default_factory=Limits)
    faults: Faults = Field(default_factory=Faults)
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)

    @property
    def fault_policy(self) -> FaultPolicy:
        return FaultPolicy(**self.faults.model_dump())

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of one round: what the engine reserves room for."""
        longest = max((draft.tokens for draft in self.drafts if draft.replicas), default=1)
        return self.chain.tokens or (max(SOURCE_TOKENS, longest) if self.chain.sources else longest)

    @property
    def lent_cores(self) -> int:
        """How many of the target's cores it leaves to drafts while they work."""
        if not self.target.cores or self.pools[self.target.pool].gpus:
            return 0
        drafts = [draft for draft in self.drafts if draft.pool == self.target.pool and draft.replicas]
        return len({core for draft in drafts for core in draft.cores or ()} & set(self.target.cores))

    @model_validator(mode="after")
    def _agree(self) -> "AppConfig":
        if not self.pools:
            raise ValueError("args.pools: at least one pool is needed")
        for where, pool in (
            [("args.target", self.target.pool)]
            + [(f"args.drafts[{index}]", draft.pool) for index, draft in enumerate(self.drafts)]
            + ([("args.evidence", self.evidence.pool)] if self.evidence else [])
        ):
            if pool not in self.pools:
                known = ", ".join(sorted(self.pools))
                raise ValueError(f"{where}.pool: no pool {pool!r}; pools: {known}")
        names = [draft.name for draft in self.drafts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"args.drafts: two drafts are named {name!r}; names must differ")
        self._check_placement()
        self._check_cores()
        self._check_autoscaling()
        return self

    def _check_placement(self) -> None:
        target_pool = self.pools[self.target.pool]
        if not target_pool.gpus and self.target.tensor_parallel_size > 1 and self.target.cores:
            raise ValueError(
                "args.target.cores: lists the cores of one rank; leave it out with tensor_parallel_size > 1"
            )
        try:
            pool_selectors(self)
        except ValueError as error:
            raise ValueError(f"args.pools.{error}") from None
        if not target_pool.gpus:
            return
        for index, draft in enumerate(self.drafts):
            if allowed(self.pools, draft.pool, self.target.pool):
                beside = draft.pool != self.target.pool or self.pools[draft.pool].beside_target
            else:
                beside = told_apart(self, draft.pool)
            if not beside:
                raise ValueError(
                    f"args.drafts[{index}].pool: drafts of pool {draft.pool!r} could land on the target's GPU nodes; give "
                    "either pool a label, or this one a resource that those nodes lack, or allow it with beside_target: true"
                )

    def _check_autoscaling(self) -> None:
        starts = {draft.name: draft.replicas for draft in self.drafts}
        indexed = None if self.evidence is None else self.evidence.index is not None
        problems = self.autoscaling.problems(starts, self.target.replicas, self.limits.router_replicas, indexed)
        if problems:
            raise ValueError("; ".join(f"args.autoscaling.{problem}" for problem in problems))

    def _check_cores(self) -> None:
        """A draft may work on the target's last cores: the engine does without them for as long as it does."""
        lent, cores = self.lent_cores, self.target.cores or []
        if not lent:
            return
        if lent == len(cores):
            raise ValueError("args.drafts: the drafts' cores are all the target has; leave it at least one of its own")
        if self.target.tensor_parallel_size > 1:
            raise ValueError("args.drafts: cores cannot be shared with a target of several ranks")
        for index, draft in enumerate(self.drafts):
            wrong = set(draft.cores or ()) & set(cores[:-lent])
            if wrong and draft.pool == self.target.pool and draft.replicas:
                raise ValueError(
                    f"args.drafts[{index}].cores: core {min(wrong)} is shared but not one of the last {lent} of "
                    f"args.target.cores {cores}; list shared cores last there: those are the ones the engine can do without"
                )
