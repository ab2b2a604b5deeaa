"""The router's calls to other deployments, each with a deadline, and cancelled when nobody waits for it any more."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from deployments.router.availability import replica_count

Plain = dict[str, Any]


class Unavailable(Exception):
    """Nobody is there to be asked."""


class Calls(Protocol):
    """What the answer chain asks of others. Each raises TimeoutError at its deadline, Unavailable, or what the other raised."""

    async def write(self, draft: str, request: Plain, deadline_s: float) -> list[Plain]:
        """``write_answers`` of a draft deployment."""

    async def draft(self, question: Plain, source: str, deadline_s: float) -> list[Plain]:
        """``draft`` of the evidence deployment, by one source."""

    async def validate(
        self, texts: Sequence[str], validators: Sequence[Plain], budget_s: float, context: Plain
    ) -> list[list[Plain]]:
        """``validate`` of the evidence deployment."""

    async def score(
        self, prompt: list[int], drafts: list[list[int]], top_k: int, deadline_s: float, tenant: str
    ) -> list[Plain]:
        """``score`` of the target."""

    async def learn(self, question: Plain, answer: str, deadline_s: float) -> None:
        """``learn`` of the evidence deployment."""


class ServeCalls:
    """Over Serve handles."""

    def __init__(
        self, target: DeploymentHandle, drafts: Mapping[str, DeploymentHandle], evidence: DeploymentHandle | None
    ) -> None:
        self._target, self._drafts, self._evidence = target, dict(drafts), evidence

    async def write(self, draft: str, request: Plain, deadline_s: float) -> list[Plain]:
        return list(await _call(self._drafts.get(draft), "write_answers", deadline_s, request))

    async def draft(self, question: Plain, source: str, deadline_s: float) -> list[Plain]:
        return list(await _call(self._evidence, "draft", deadline_s, question, [source], deadline_s))

    async def validate(
        self, texts: Sequence[str], validators: Sequence[Plain], budget_s: float, context: Plain
    ) -> list[list[Plain]]:
        # it answers by itself when the budget ends; the rest is for the way there and back
        args = (list(texts), list(validators), budget_s, context)
        return list(await _call(self._evidence, "validate", 2 * budget_s, *args))

    async def score(
        self, prompt: list[int], drafts: list[list[int]], top_k: int, deadline_s: float, tenant: str
    ) -> list[Plain]:
        return list(await _call(self._target, "score", deadline_s, prompt, drafts, top_k, deadline_s, tenant))

    async def learn(self, question: Plain, answer: str, deadline_s: float) -> None:
        await _call(self._evidence, "learn", deadline_s, question, answer)


async def _call(handle: DeploymentHandle | None, method: str, deadline_s: float, *args: Any) -> Any:
    if handle is None or not replica_count(handle):
        raise Unavailable(method)  # a handle would keep the call until a replica comes
    response = getattr(handle, method).remote(*args)
    try:
        async with asyncio.timeout(deadline_s):
            return await response
    except BaseException:
        response.cancel()
        raise
