"""Recent outputs by tenant: the one place where tokens outlive their request, and the bounds of it."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from deployments.target.sources.source import Limits


class Outputs(Protocol):
    """The searchable outputs of one tenant."""

    @property
    def bytes(self) -> float:
        """Estimate of the memory held; nothing where there are no outputs."""

    def __len__(self) -> int:
        """Outputs held."""

    def add(self, tokens: list[int]) -> None:
        """Remember one more output."""

    def evict(self) -> None:
        """Forget the oldest output; there is one."""


OutputsT = TypeVar("OutputsT", bound=Outputs)


class Tenants(Generic[OutputsT]):
    """Outputs of each tenant, the tenant used last at the end. A tenant never sees another one's."""

    def __init__(self, make: Callable[[], OutputsT], limits: Limits) -> None:
        self._make = make
        self._limits = limits
        self._tenants: OrderedDict[str, OutputsT] = OrderedDict()
        self.bytes = 0.0
        self.outputs = 0
        self.evictions = 0

    def get(self, tenant: str) -> OutputsT | None:
        """Return what the tenant may be drafted from; None if nothing."""
        return self._tenants.get(tenant)

    def touch(self, tenant: str) -> None:
        """Note that the tenant is in use."""
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)

    def add(self, tenant: str, tokens: list[int]) -> None:
        """Remember a finished output of the tenant, at the expense of the oldest where a bound is passed."""
        if not tenant or not tokens:
            return
        outputs = self._tenants.pop(tenant, None) or self._make()
        self._tenants[tenant] = outputs
        before = outputs.bytes
        outputs.add(tokens)
        self.bytes += outputs.bytes - before
        self.outputs += 1
        self._bound(tenant, outputs)

    def grew(self, grown_bytes: float) -> None:
        """An output of some tenant became longer by so much memory."""
        self.bytes += grown_bytes
        while self.bytes > self._limits.shared_bytes and self._tenants:
            self._evict(next(iter(self._tenants)))

    def dropped(self, tenant: str, freed_bytes: float) -> None:
        """One output of the tenant was taken back, which freed so much memory."""
        self.bytes -= freed_bytes
        self.outputs -= 1
        if not len(self._tenants[tenant]):
            del self._tenants[tenant]

    def _bound(self, tenant: str, outputs: OutputsT) -> None:
        while len(outputs) > self._limits.outputs:
            self._evict(tenant)
        while self.bytes > self._limits.shared_bytes and self._tenants:
            self._evict(next(iter(self._tenants)))

    def clear(self) -> None:
        """Forget every output."""
        self._tenants.clear()
        self.bytes = 0.0
        self.outputs = 0

    def stats(self) -> dict[str, float]:
        """Sizes and evictions, as every source reports them."""
        return {
            "tenants": len(self._tenants),
            "outputs": self.outputs,
            "bytes": self.bytes,
            "evictions": self.evictions,
        }

    def _evict(self, tenant: str) -> None:
        outputs = self._tenants[tenant]
        before = outputs.bytes
        outputs.evict()
        self.bytes += outputs.bytes - before
        self.outputs -= 1
        self.evictions += 1
        if not len(outputs):
            del self._tenants[tenant]
        if not self._tenants:
            self.bytes = 0.0  # no rounding left over
