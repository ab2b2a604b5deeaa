"""Device-direct transfer: KV goes from one accelerator's memory to another's through Ray's tensor transport over NIXL.

Nothing here copies through host memory, and nothing falls back to it: a process that lacks a part is told which, and
``choose_transport`` then takes another kind. Other than with the byte transports, what travels is a Ray reference, passed as
an argument between actors, because Ray keeps what NIXL needs (addresses, registrations) with it.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

from hw.kv.transports.base import Kind, Late, Limits, Malformed, Missing, TooLarge, Unavailable

_TRANSPORT = "nixl"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What this process has of what device-direct transfer needs."""

    accelerator: str = ""  # torch device type of the caches ("cuda"); "" for none
    nixl: bool = False  # the nixl package
    tensor_transport: bool = False  # a Ray that has tensor transports
    actor: bool = False  # only Ray actors can send and receive tensors


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def probe() -> DeviceFacts:
    """Facts of this process; imports torch and asks Ray, connects to nothing."""
    accelerator = ""
    if _has("torch"):
        import torch

        accelerator = "cuda" if torch.cuda.is_available() else ""
    transport, actor = _has("ray.experimental.rdt"), False
    if transport:
        import ray

        actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return DeviceFacts(accelerator, _has("nixl"), transport, actor)


def missing(facts: DeviceFacts) -> tuple[str, ...]:
    """What is lacking, each with what to do about it; empty where device-direct transfer can be tried."""
    lacks = []
    if not facts.accelerator:
        lacks.append("an accelerator that torch sees")
    if not facts.nixl:
        lacks.append("the nixl package (pip install nixl)")
    if not facts.tensor_transport:
        lacks.append("a Ray with tensor transports")
    if not facts.actor:
        lacks.append("a Ray actor to run in (enable_tensor_transport=True)")
    return tuple(lacks)


class TensorRay(Protocol):
    """The part of Ray that is used."""

    exceptions: Any

    def put(self, value: Any, *, _tensor_transport: str) -> Any:
        """A reference to a tensor that stays where it is."""
        ...

    def get(self, reference: Any, *, timeout: float) -> Any:
        """The tensor, moved here."""
        ...


class DeviceSlot:
    """Sends and receives caches as device tensors. Raises ``Unavailable`` at once, naming everything that is missing."""

    kind: Kind = "device"

    def __init__(
        self, limits: Limits | None = None, *, facts: DeviceFacts | None = None, ray_api: TensorRay | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.facts = probe() if facts is None else facts
        lacks = missing(self.facts)
        if lacks:
            raise Unavailable(f"no device-direct transfer here; missing: {'; '.join(lacks)}. Use another transport")
        if ray_api is None:
            import ray

            ray_api = ray
        self._ray = ray_api

    def offer(self, tensor: Any) -> Any:
        """A Ray reference to ``tensor``, to be passed to the receiving actor.

        The tensor must not be changed while the reference lives: it is not copied. Raises ``Malformed`` for one that is not
        contiguous or not on the accelerator, ``TooLarge``.
        """
        self._check(tensor)
        return self._ray.put(tensor, _tensor_transport=_TRANSPORT)

    def fetch(self, reference: Any, nbytes: int, deadline_s: float | None = None) -> Any:
        """The tensor behind ``reference``, on this actor's device.

        Raises ``Late`` after ``deadline_s`` seconds, ``Missing`` where its sender is gone, ``Malformed`` where it is not
        ``nbytes`` long.
        """
        try:
            tensor = self._ray.get(reference, timeout=self.limits.fetch_s if deadline_s is None else deadline_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise Late("the tensor did not come by the deadline") from error
        except self._ray.exceptions.RayError as error:
            raise Missing(f"the tensor is gone ({type(error).__name__})") from error
        self._check(tensor)
        if tensor.nbytes != nbytes:
            raise Malformed(f"a tensor of {tensor.nbytes} bytes where {nbytes} were announced")
        return tensor

    def _check(self, tensor: Any) -> None:
        if tensor.device.type != self.facts.accelerator or not tensor.is_contiguous():
            raise Malformed(f"a contiguous tensor on {self.facts.accelerator} is wanted, not one on {tensor.device}")
        if tensor.nbytes > self.limits.block_bytes:
            raise TooLarge(f"a tensor of {tensor.nbytes} bytes; at most {self.limits.block_bytes} are taken")
