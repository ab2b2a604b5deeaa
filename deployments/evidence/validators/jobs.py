"""One text for one validator, wherever it runs."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import msgspec
from blake3 import blake3

from deployments.evidence.validators.base import Tag

MAX_JOB_BYTES = 512 * 1024  # of a job on the wire: text, parameters and context have smaller bounds of their own


class Job(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Self-contained: whoever has the same configured validators comes to the same tag."""

    spec: dict[str, Any]  # as in a request: {"name": …, parameters}
    text: str
    context: dict[str, Any] = {}
    limit_s: float  # longest the validator works on it

    @property
    def validator(self) -> str:
        return str(self.spec.get("name", ""))

    @cached_property
    def digest(self) -> bytes:
        """Of everything the tag depends on. Who asks (``context["tenant"]``) is part of it, so tenants share no tags."""
        return blake3(msgspec.msgpack.encode([self.spec, self.text, self.context], order="deterministic")).digest()


class Backend(Protocol):
    """Runs jobs. Two implementations: processes and threads of this process' own, and a Redis stream."""

    async def run(self, job: Job) -> Tag:
        """Never raises: what goes wrong is an ``unknown`` tag with a ``failure``. Takes seconds, not minutes."""

    async def close(self) -> None:
        """Stop everything that was started."""

    def stats(self) -> Mapping[str, int]:
        """Counters."""
