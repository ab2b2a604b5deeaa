"""Suffix decoding over Arctic Inference's suffix trees: the request itself, and its tenant's recent outputs."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.target.sources.source import MIN_PATH, Limits, Proposal, best, trust
from deployments.target.sources.tenants import Tenants

try:
    from arctic_inference.suffix_decoding._C import SuffixTree  # type: ignore[import-untyped]
except ImportError:  # no wheel for this platform
    SuffixTree = None

SEQUENCE_IDS = 2**31  # of the library: int32, not negative
MEASURE_UP_TO = 16_384  # tokens; the library measures a tree by walking all of it, here in about a millisecond
# Tokens proposed for a match of m: m * FACTOR + OFFSET. Generous, for whoever asks cuts by what verifying costs.
FACTOR = 4.0
OFFSET = 1.0


def available() -> bool:
    """Whether the library is installed."""
    return SuffixTree is not None


@dataclass(slots=True)
class _Request:
    tenant: str
    tree: "SuffixTree"
    tail: deque[int]  # the last depth + 1 committed tokens; the library never matches the whole of a context
    output: int | None = None  # its output in the tenant's tree
    tokens: int = 0  # committed, prompt included as far as it is searched
    newest: int | None = None  # the last committed token, not in the tree yet

    def append(self, tokens: list[int]) -> None:
        """Commit tokens. The tree lags by one.

        With the last token in the tree, the end of the sequence would count as an occurrence of the context that is
        followed by nothing, and a context seen once before would get probability 0.5 instead of 1.
        """
        if not tokens:
            return
        self.tree.extend(0, tokens[:-1] if self.newest is None else [self.newest, *tokens[:-1]])
        self.newest = tokens[-1]
        self.tokens += len(tokens)
        self.tail.extend(tokens)


class SuffixSource:
    """The better of two guesses, by expected accepted tokens: from the request itself and from past outputs."""

    name = "suffix"

    def __init__(self, limits: Limits | None = None) -> None:
        """Raises ImportError where the library is missing."""
        if not available():
            raise ImportError("arctic-inference is not installed")
        self._limits = Limits() if limits is None else limits
        self._requests: dict[str, _Request] = {}
        self._shared = Tenants(lambda: OutputTree(self._limits.depth), self._limits)

    def begin(self, request: str, tenant: str, prompt: Sequence[int]) -> None:
        limits = self._limits
        self._take_back(request)
        state = _Request(tenant, SuffixTree(limits.depth), deque(maxlen=limits.depth + 1))
        state.append([int(token) for token in prompt[-limits.request_tokens :]])
        self._requests[request] = state
        self._shared.touch(tenant)

    def extend(self, request: str, tokens: list[int]) -> None:
        state = self._requests.get(request)
        if state is not None:
            state.append(tokens)
            self._share(state, tokens)

    def propose(self, request: str, most: int) -> Proposal | None:
        state = self._requests.get(request)
        if state is None or most < 1:
            return None
        context = list(state.tail)
        shared = self._shared.get(state.tenant)
        return best(
            _speculate(state.tree, context, most),
            None if shared is None else _speculate(shared.tree, context, most),
        )

    def finish(self, request: str) -> None:
        self._requests.pop(request, None)

    def _take_back(self, request: str) -> None:
        """A request that begins again has not said what it said before."""
        state = self._requests.get(request)
        outputs = self._shared.get(state.tenant) if state is not None else None
        if state is None or outputs is None or state.output is None or not outputs.length(state.output):
            return
        before = outputs.bytes
        outputs.drop(state.output)
        self._shared.dropped(state.tenant, before - outputs.bytes)

    def _share(self, state: _Request, tokens: list[int]) -> None:
        """Make committed tokens known to the tenant's other requests at once: those that run together are often alike."""
        if not state.tenant or not tokens:
            return
        outputs = self._shared.get(state.tenant)
        if outputs is None or state.output is None or outputs.length(state.output) in (0, self._limits.output_tokens):
            self._shared.add(state.tenant, tokens[: self._limits.output_tokens])
            outputs = self._shared.get(state.tenant)
            state.output = outputs.newest if outputs is not None else None
            return
        room = self._limits.output_tokens - outputs.length(state.output)
        self._shared.grew(outputs.extend(state.output, tokens[:room]))

    def stats(self) -> dict[str, float]:
        tokens = sum(state.tokens for state in self._requests.values())
        return {"requests": len(self._requests), "request_tokens": tokens, **self._shared.stats()}

    def clear(self) -> None:
        self._shared.clear()


class OutputTree:
    """One tenant's outputs in one tree."""

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self._sequences: OrderedDict[int, int] = OrderedDict()  # id in the tree: tokens; oldest first
        self._next = 0
        self._tokens = 0
        self._measured_at = 0  # tokens in the tree when its memory was last measured
        self._bytes_per_token = 0.0

    @property
    def bytes(self) -> float:
        return self._tokens * self._bytes_per_token

    @property
    def newest(self) -> int:
        """Id of the output added last."""
        return next(reversed(self._sequences))

    def __len__(self) -> int:
        return len(self._sequences)

    def length(self, sequence: int) -> int:
        """Tokens of one output; 0 for one that is gone."""
        return self._sequences.get(sequence, 0)

    def add(self, tokens: list[int]) -> None:
        sequence = self._next
        self._next = (self._next + 1) % SEQUENCE_IDS
        self._sequences[sequence] = 0
        self.extend(sequence, tokens)

    def extend(self, sequence: int, tokens: list[int]) -> float:
        """Make one output longer; returns by how many bytes it is estimated to have grown."""
        before = self.bytes
        self.tree.extend(sequence, tokens)
        self._sequences[sequence] += len(tokens)
        self._tokens += len(tokens)
        # Measured at every doubling while that is cheap; bytes per token hardly change in large trees.
        if self._tokens >= 2 * self._measured_at and self._measured_at < MEASURE_UP_TO:
            self._measured_at = self._tokens
            self._bytes_per_token = self.tree.estimate_memory() / self._tokens
        return self.bytes - before

    def evict(self) -> None:
        self.drop(next(iter(self._sequences)))

    def drop(self, sequence: int) -> None:
        """Forget one output."""
        self._tokens -= self._sequences.pop(sequence)
        self.tree.remove(sequence)


def _speculate(tree: "SuffixTree", context: list[int], most: int) -> Proposal | None:
    draft = tree.speculate(context, most, FACTOR, OFFSET, MIN_PATH, False)
    confidence: list[float] = []
    before = path = 1.0
    for index, reached in enumerate(draft.probs):  # the library's probability of all tokens up to and with this one
        chance = min(reached / before, 1.0) * trust(draft.match_len + index)
        path *= chance
        if path < MIN_PATH:
            break
        confidence.append(chance)
        before = reached
    if not confidence:
        return None
    return Proposal(draft.token_ids[: len(confidence)], confidence, draft.match_len, SuffixSource.name)
