"""The connector beside the scheduler: which prompts are exported and which loads are begun. No bytes move here."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.kv import salt_of
from deployments.target.kv_connector.metadata import ChainMetadata
from deployments.target.kv_connector.prompts import (
    EXPORT,
    IMPORT,
    VERSION,
    Export,
    HandOff,
    Load,
    Place,
)
from hw.kv.codes import Code
from hw.kv.prefix import Subject

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

REFUSED = "import_refused:"


@dataclass(slots=True)
class _Exported:
    """A prompt that is to be handed on."""

    request: "Request"
    subject: Subject
    blocks: tuple[int, ...] = ()
    planned: bool = False


@dataclass(slots=True)
class _Wanted:
    """A prompt that another replica has read."""

    subject: Subject
    places: tuple[Place, ...]
    asked: bool = False  # once only: what failed is computed


@dataclass(slots=True)
class SchedulerSide:
    """State of the requests that are handed over; a request that is not costs one look at its parameters.

    ``ranks``: workers of this engine, each with its own part of the KV. ``hosts``: machines that may be asked.
    """

    producer: bool
    consumer: bool
    ranks: int
    hosts: frozenset[str]
    places: tuple[Place, ...] = ()  # where this engine's workers give out what they exported
    counts: Counter[str] = field(default_factory=Counter)
    _exported: dict[str, _Exported] = field(default_factory=dict)
    _wanted: dict[str, _Wanted] = field(default_factory=dict)
    _loads: list[Load] = field(default_factory=list)

    def added(self, request: "Request") -> None:
        """A request arrived."""
        params = request.kv_transfer_params
        if not params:
            return
        if self.producer and params.get(EXPORT):
            reason = _not_movable(request) or ("" if self.places else "no_place")
            if reason:
                self.counts[f"export_refused:{reason}"] += 1
            else:
                tokens = request.prompt_token_ids or []
                self._exported[request.request_id] = _Exported(request, _subject(tokens, request.cache_salt))
        if self.consumer and params.get(IMPORT):
            wanted, reason = self._want(request, params)
            if wanted is None:
                self.counts[REFUSED + reason] += 1
            else:
                self._wanted[request.request_id] = wanted

    def matched(self, request: "Request", computed: int) -> tuple[int, bool]:
        """How many tokens beyond the ``computed`` ones are to be loaded, and whether in the background (always)."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.asked or wanted.subject.valid_tokens == 1:  # the last token is always computed
            return 0, False
        more = wanted.subject.valid_tokens - computed
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        """``external`` tokens are to be loaded into the last of ``blocks``; 0: nothing."""
        wanted = self._wanted.get(request.request_id)
        if not external or wanted is None or wanted.asked:
            return
        wanted.asked = True
        subject = wanted.subject
        (ids,) = blocks.get_block_ids()
        self._loads.append(
            Load(
                request=request.request_id,
                subject=subject,
                salt=salt_of(request.cache_salt or ""),
                blocks=tuple(ids),
                start=subject.valid_tokens - external,
                places=wanted.places,
            )
        )

    def plan(self, scheduled: "SchedulerOutput") -> ChainMetadata:
        """What the workers do in this step."""
        loads, self._loads = self._loads, []
        exports = self._plan_exports(scheduled) if self._exported else []
        return ChainMetadata(exports, loads)

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """A request ended; what its answer says of where its prompt's KV is."""
        self._wanted.pop(request.request_id, None)
        exported = self._exported.pop(request.request_id, None)
        if exported is None:
            return None
        if not exported.planned:  # aborted before its prompt was read
            self.counts["export_refused:not_read"] += 1
            return None
        subject = exported.subject
        return HandOff(VERSION, subject.prefix_hash.hex(), subject.valid_tokens, self.places).params()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _want(self, request: "Request", params: Mapping[str, Any]) -> tuple[_Wanted | None, str]:
        """What to load for a request, or why nothing."""
        try:
            offer = HandOff.of(dict(params))
        except msgspec.ValidationError as error:
            logger.warning("kv_transfer_params of request %s are not a prompt's place: %s", request.request_id, error)
            return None, "malformed"
        reason = _not_movable(request)
        if reason:
            return None, reason
        if len(offer.places) != self.ranks:
            return None, "ranks"
        if any(place.host not in self.hosts for place in offer.places):
            logger.warning("request %s names a producer on a machine that is not in hosts", request.request_id)
            return None, "host_not_allowed"
        tokens = request.prompt_token_ids or []
        if offer.tokens > len(tokens):
            return None, Code.VALID_TOKENS
        subject = _subject(tokens[: offer.tokens], request.cache_salt)
        if subject.prefix_hash.hex() != offer.prefix:  # other tokens, or another salt
            return None, Code.PREFIX
        return _Wanted(subject, offer.places), ""

    def _plan_exports(self, scheduled: "SchedulerOutput") -> list[Export]:
        state = scheduled.kv_connector_block_state
        known = state.block_ids if state is not None else {}
        exports = []
        for name, exported in self._exported.items():
            if name in known:  # also after a preemption, then all of them anew
                exported.blocks = tuple(known[name][0])
            count = scheduled.num_scheduled_tokens.get(name)
            if not count or exported.planned:
                continue
            request = exported.request
            if request.num_computed_tokens + count >= exported.subject.valid_tokens:
                exported.planned = True
                salt = salt_of(request.cache_salt or "")
                exports.append(Export(name, exported.subject, salt, exported.blocks))
        return exports


def _subject(tokens: list[int], cache_salt: str | None) -> Subject:
    return Subject.of(tokens, salt=salt_of(cache_salt or ""), adapter="")


def _not_movable(request: "Request") -> str:
    """Why a request's KV is not that of its tokens alone; empty when it is."""
    if request.lora_request is not None:
        return "adapter"
    if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "not_tokens"
    if request.pooling_params is not None:
        return "pooling"
    return ""
