"""A prompt that changes hands, as said between engines and within one."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from hw.kv.prefix import Subject

VERSION = 1
FIELD = "chain_kv"  # of kv_transfer_params, beside upstream's two flags
EXPORT, IMPORT = "do_remote_decode", "do_remote_prefill"

_MAX_RANKS = 1024
_Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Hex16 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one worker gives out what it exported."""

    epoch: _Hex16  # new at every start of the worker
    address: Annotated[str, msgspec.Meta(max_length=256, pattern=r"^tcp://[^/@\s]+:[0-9]{1,5}$")]

    @property
    def host(self) -> str:
        """The machine, without the brackets of IPv6."""
        return self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


class HandOff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that can be taken over: ``kv_transfer_params["chain_kv"]`` of the answer that its reader gave."""

    version: int
    prefix: _Hex32  # name of the prompt's tokens, see hw/kv/prefix.py
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    places: Annotated[tuple[Place, ...], msgspec.Meta(min_length=1, max_length=_MAX_RANKS)]  # by rank

    def params(self) -> dict[str, Any]:
        """As ``kv_transfer_params`` of the request that continues it."""
        return {IMPORT: True, EXPORT: False, FIELD: msgspec.to_builtins(self)}

    @classmethod
    def of(cls, params: dict[str, Any]) -> "HandOff":
        """Strict inverse of :meth:`params`. Raises msgspec.ValidationError."""
        found = msgspec.convert(params.get(FIELD), cls)
        if found.version != VERSION:
            raise msgspec.ValidationError(f"version {found.version}, expected {VERSION}")
        return found


@dataclass(frozen=True, slots=True)
class Export:
    """The KV of a prompt that is complete after this step; ``blocks`` in the order of its positions."""

    request: str
    subject: Subject
    salt: bytes
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fill positions ``[start, subject.valid_tokens)`` of a request's blocks; those before are in the cache already."""

    request: str
    subject: Subject
    salt: bytes
    blocks: tuple[int, ...]
    start: int
    places: tuple[Place, ...]
