"""Which draft replicas there are: asked again and again, told to the engine when it changes, never in a request's way."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deployments.chain.faults import FaultPolicy
from deployments.target.replicas import Answers

logger = logging.getLogger(__name__)

Endpoint = dict[str, Any]
Ask = Callable[[str, dict[str, Any]], Awaitable[Answers]]  # with this target's key, to be let in, and its offer of KV
Rpc = Callable[..., Awaitable[list[Any]]]


class DraftDiscovery:
    """Follows the replicas of every draft deployment for one target replica."""

    def __init__(self, drafts: Mapping[str, Ask], rpc: Rpc, faults: FaultPolicy) -> None:
        self._drafts = dict(drafts)
        self._rpc = rpc
        self._faults = faults
        self._key: str | None = None
        self._offer: dict[str, Any] | None = None  # what this target's KV is; None: not known yet
        self._connected: dict[str, Endpoint] = {}
        self._by_draft: dict[str, dict[str, Endpoint]] = {name: {} for name in drafts}

    @property
    def connected(self) -> list[str]:
        """Names of the draft replicas the engine was last told of."""
        return sorted(self._connected)

    async def run(self) -> None:
        """Look until cancelled. No failure ends it: drafts are an extra."""
        complained = ""
        while True:
            try:
                await self.look()
                complained = ""
            except Exception as error:
                if str(error) != complained:  # once, not once a second
                    logger.warning("looking for draft replicas failed, will retry: %r", error)
                complained = str(error)
            await asyncio.sleep(self._faults.discovery_period_s)

    async def look(self) -> None:
        """Ask all drafts at once, and tell the engine if anything changed."""
        if not self._drafts:
            return
        if self._key is None:
            keys = await self._rpc("client_key", timeout=self._faults.rpc_timeout_s)
            self._key = str(keys[0])
        if self._offer is None:
            offers = await self._rpc("kv_offer", timeout=self._faults.rpc_timeout_s)
            self._offer = offers[0]
        key, offer = self._key, self._offer or {}
        await asyncio.gather(*(self._ask(name, ask, key, offer) for name, ask in self._drafts.items()))
        found = {name: endpoint for known in self._by_draft.values() for name, endpoint in known.items()}
        if found == self._connected:
            return
        names = await self._rpc("connect_drafts", timeout=self._faults.rpc_timeout_s, args=(list(found.values()),))
        logger.info("drafts connected: %s", ", ".join(names[0]) or "none")
        self._connected = found

    async def _ask(self, draft: str, ask: Ask, key: str, offer: dict[str, Any]) -> None:
        known = self._by_draft[draft]
        try:
            answers = await ask(key, offer)
        except Exception as error:
            logger.warning("draft %s could not be asked: %r", draft, error)
            return  # Serve itself is in trouble; sockets that work go on working
        found = {endpoint["name"]: endpoint for endpoint in answers.results}
        if answers.silent:
            # A replica is there but slow. Which one cannot be told, so none is dropped: its circuit deals with it.
            found = {**known, **found}
        self._by_draft[draft] = found
