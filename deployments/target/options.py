"""What one request asks of the chain, as it reaches the worker in ``SamplingParams.extra_args["chain"]`` (a JSON string)."""

import hashlib
import logging
from typing import TYPE_CHECKING

import msgspec

from deployments.chain.acceptance.policy import Policy

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SEED_MASK = (1 << 63) - 1


class GivenTop(msgspec.Struct, frozen=True):
    """What whoever wrote a draft of ``L`` tokens thought of each position: its ``k`` likeliest tokens, as the request samples."""

    ids: bytes  # <i4 [L, k]
    probs: bytes  # <f2 [L, k]; what is missing to 1 is the tail's mass


class ChainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Decoded options; the router has validated them, an in-process caller gets msgspec's error."""

    id: str = ""  # names the request towards take_trace; empty: nobody will ask
    enabled: bool = True
    trace: bool = False
    tokens: int | None = None  # cap on draft tokens a round
    sources: list[str] | None = None  # who may draft: "model" and names of sources without weights; None: all
    tenant: str = ""  # whose request it is; what crosses requests stays within a tenant, and "" shares nothing
    seed: int | None = None  # used where SamplingParams has none
    min_p: float = 0.0
    logit_bias: dict[str, float] = {}
    policy: Policy | None = None  # None: lossless
    given: list[list[int]] = []  # drafts that came with the request, see deployments.chain.given
    given_top: list[GivenTop | None] = []  # of ``given``, in its order; None or missing: unknown
    predicted: bool = False  # the usage is to say what became of them, as it does where ``texts`` are there
    texts: list[str] = []  # those that came as text; the server turns them into ``given``

    def bias(self) -> dict[int, float]:
        return {int(token): value for token, value in self.logit_bias.items()}


_decoder = msgspec.json.Decoder(ChainOptions)
DEFAULT = ChainOptions()


def options_of(params: "SamplingParams | None") -> ChainOptions:
    """Read a request's options. A malformed string turns the chain off for that request: it never fails the engine."""
    extra = params.extra_args if params is not None else None
    raw = extra.get("chain") if extra else None
    if raw is None:
        return DEFAULT
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, TypeError) as error:
        logger.warning("chain options ignored, request decodes plainly: %s", error)
        return ChainOptions(enabled=False)


def seed_of(request_id: str, params: "SamplingParams | None", options: ChainOptions) -> int:
    """The key of a request's sampling noise, the same on every rank.

    vLLM gives each of ``n`` samples its own ``SamplingParams.seed``. Without a seed the engine's request id decides, which
    ends in random digits: two runs differ, all ranks agree.
    """
    if params is not None and params.seed is not None:
        return int(params.seed) & SEED_MASK
    word = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    salt = options.seed or 0
    return (int.from_bytes(word, "little") ^ salt) & SEED_MASK
