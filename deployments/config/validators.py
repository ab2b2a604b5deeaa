"""The section ``args.evidence.validators``: which validators requests may name, and where they run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from deployments.config.strict import Strict

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


class RedisStream(Strict):
    """Validators elsewhere: processes of ``scripts/validator_worker`` that serve a Redis stream."""

    url: str | None = Field(
        default=None,
        repr=False,
        description="redis://, rediss:// (TLS) or unix://; may hold a password: it is never logged",
    )
    url_env: str | None = Field(default=None, description="environment variable that holds the URL, instead of url")
    stream: str = Field(default="chain:validators", min_length=1, max_length=128, description="key of the stream")
    queue: int = Field(default=1024, ge=1, le=1_000_000, description="jobs in the stream; more are unknown at once")

    @model_validator(mode="after")
    def _one_url(self) -> "RedisStream":
        if (self.url is None) == (self.url_env is None):
            raise ValueError("redis needs url or url_env, and not both")
        return self

    def address(self) -> str:
        """The URL. Raises ValueError naming the variable that is not set."""
        if self.url is not None:
            return self.url
        found = os.environ.get(self.url_env or "")
        if not found:
            raise ValueError(f"the environment variable {self.url_env} that redis.url_env names is not set")
        return found


class Validators(Strict):
    """Validators and the queue they run in; docs/validators.md has the kinds and their parameters."""

    configured: dict[Name, dict[str, Any]] = Field(
        default_factory=dict,
        description="name: {kind: …, parameters}: what requests may name beside the kinds without files and functions",
    )
    workers: int = Field(
        default=1, ge=1, le=64, description="processes for what may hang: own functions, schemas, compiling"
    )
    queue: int = Field(default=256, ge=1, description="jobs waiting or running; more are unknown at once")
    cache: int = Field(default=4096, ge=0, description="tags kept by digest of text, validator and context")
    memory_mib: int = Field(default=1024, ge=128, description="address space of one such process")
    redis: RedisStream | None = Field(default=None, description="run validators there; None: here")

    def resolved(self, resolve: Callable[[Path], Path]) -> "Validators":
        """The same with the paths of tables resolved."""
        configured = {
            name: {**spec, "file": str(resolve(Path(spec["file"])))} if isinstance(spec.get("file"), str) else spec
            for name, spec in self.configured.items()
        }
        return self.model_copy(update={"configured": configured})

    def problem(self) -> str:
        """What is wrong with a configured validator, led by its path in this section; empty if nothing is."""
        from deployments.evidence.validators.base import ParameterError  # it needs no configuration, and comes later
        from deployments.evidence.validators.registry import Registry

        try:
            Registry(self.configured)
        except ParameterError as error:
            return f"configured.{error}"
        return ""
