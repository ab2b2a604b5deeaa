"""What the worker is told about the chain, as it travels in vLLM's ``additional_config``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

PREFIX = "chain_"


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """The same for every request of an engine."""

    faults: dict[str, Any] = field(default_factory=dict)  # overrides of FaultPolicy
    max_batch: int = 0  # no model drafts for more running sequences; 0: no cap of the operator's
    model_tokens: int = 0  # most tokens asked of a draft model a round; 0: as many as the engine verifies
    sources: tuple[str, ...] = ()  # sources without weights, see deployments.target.sources
    adaptive: bool = True  # decide by measurement; False: verify everything that is drafted
    kv_mib: int = 0  # shared memory for KV on its way to drafts; 0: drafts read prompts themselves
    hidden: bool = False  # keep the last hidden states for drafts that ask for them
    kv_refresh: bool = False  # send drafts the KV of every committed position, not only of those they lack
    semantic_model: str = ""  # folder of the sentence model; empty: the policy `semantic` lets nothing pass
    semantic_budget_ms: float = 0.0  # most time it may take of an engine step
    own_threads: int = 0  # threads left to the engine while a draft works on a core it shares; 0: shares none

    @classmethod
    def of(cls, additional_config: Mapping[str, Any] | None) -> Self:
        """Read them; keys of others are ignored. Raises ValueError for an unknown one of ours."""
        known = {item.name for item in fields(cls)}
        given: dict[str, Any] = {}
        for key, value in (additional_config or {}).items():
            if key.startswith(PREFIX):
                name = key.removeprefix(PREFIX)
                if name not in known:
                    raise ValueError(
                        f"no setting {key}; there are: {', '.join(PREFIX + name for name in sorted(known))}"
                    )
                given[name] = tuple(value) if name == "sources" else value
        return cls(**given)

    def as_config(self) -> dict[str, Any]:
        """The inverse of :meth:`of`."""
        values = {PREFIX + name: value for name, value in asdict(self).items()}
        return {**values, PREFIX + "sources": list(self.sources)}
