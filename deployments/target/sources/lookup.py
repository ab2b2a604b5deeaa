"""Prompt look-up in plain Python: n-grams of the request itself, and of its tenant's recent outputs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.target.sources.ngrams import BYTES_PER_TOKEN, SEPARATOR, NgramIndex
from deployments.target.sources.source import Limits, Proposal, best
from deployments.target.sources.tenants import Tenants


@dataclass(slots=True)
class _Request:
    tenant: str
    output: deque[int]
    index: NgramIndex = field(default_factory=NgramIndex)


class LookupSource:
    """The better of two guesses, by expected accepted tokens: from the request itself and from past outputs."""

    name = "lookup"

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = Limits() if limits is None else limits
        self._requests: dict[str, _Request] = {}
        self._shared = Tenants(OutputRing, self._limits)

    def begin(self, request: str, tenant: str, prompt: Sequence[int]) -> None:
        state = _Request(tenant, deque(maxlen=self._limits.output_tokens))
        state.index.append(int(token) for token in prompt[-self._limits.request_tokens :])
        self._requests[request] = state
        self._shared.touch(tenant)

    def extend(self, request: str, tokens: list[int]) -> None:
        state = self._requests.get(request)
        if state is None:
            return
        state.index.append(tokens)
        state.index.drop(len(state.index) - self._limits.request_tokens)
        state.output.extend(tokens)

    def propose(self, request: str, most: int) -> Proposal | None:
        state = self._requests.get(request)
        if state is None:
            return None
        context = state.index.tail(self._limits.depth)
        shared = self._shared.get(state.tenant)
        return best(
            state.index.propose(context, most, self.name, own=True),
            None if shared is None else shared.index.propose(context, most, self.name, own=False),
        )

    def finish(self, request: str) -> None:
        state = self._requests.pop(request, None)
        if state is not None:
            self._shared.add(state.tenant, list(state.output))

    def stats(self) -> dict[str, float]:
        tokens = sum(len(state.index) for state in self._requests.values())
        return {"requests": len(self._requests), "request_tokens": tokens, **self._shared.stats()}

    def clear(self) -> None:
        self._shared.clear()


class OutputRing:
    """One tenant's outputs, one after the other in one index."""

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._lengths: deque[int] = deque()  # tokens of each output and its separator, oldest first

    @property
    def bytes(self) -> float:
        return len(self.index) * BYTES_PER_TOKEN

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, tokens: list[int]) -> None:
        self.index.append(tokens)
        self.index.append([SEPARATOR])
        self._lengths.append(len(tokens) + 1)

    def evict(self) -> None:
        self.index.drop(self._lengths.popleft())
