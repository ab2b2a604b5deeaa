"""Sampling parameters on their way to the engine: moved where vLLM refuses them with drafts, refused where nobody can.

vLLM 0.29 refuses ``min_p`` and ``logit_bias`` with speculative decoding; the worker applies them itself, so they travel in
the chain's options. What vLLM accepts and then ignores is answered 400 with its name: silence would be a wrong answer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.api.chain_field import ChainField, engine_options
from deployments.api.errors import RequestError
from deployments.api.policies import resolve_policy
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.chain.acceptance.policy import Policy
from deployments.chain.given import MAX_CHARACTERS, MAX_DRAFTS

ChainRequest = ChainChatRequest | ChainCompletionRequest

MIN_P_EPSILON = 1e-5  # below it vLLM treats min_p as off

# Parameters of other servers or of older versions, which vLLM's lenient bodies would drop without a word.
IGNORED: dict[str, str] = {
    "best_of": "send n and choose among the answers",
    "dry_multiplier": "use frequency_penalty or repetition_penalty",
    "epsilon_cutoff": "use min_p",
    "eta_cutoff": "use min_p",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json": "use response_format or structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "logits_processors": "per-request logits processors are not offered",
    "mirostat": "use temperature and top_p",
    "prediction": "it belongs to chat completions; use chain.drafts",
    "tfs": "use top_p",
    "top_a": "use min_p",
    "typical_p": "use top_p",
    "xtc_probability": "not offered",
}


def prepare(
    request: ChainRequest,
    *,
    enabled: bool,
    trace: bool,
    default_min_p: float,
    vocab_size: int,
    priorities: bool = False,
    tenant: str = "",
    sources: Sequence[str] = (),
    evidence: Sequence[str] = (),
    presets: Mapping[str, Policy] | None = None,
    allow_lossy: bool = True,
    semantic: bool = False,
) -> None:
    """Check the request and move what the chain handles into ``vllm_xargs["chain"]``, in place.

    ``sources``: who may draft in this application; ``evidence``: who does so outside the engine, which is not told of them. ``tenant``: whose request it is. ``presets``: the policies that have names.

    Raises:
        RequestError: 400 naming the parameter.
    """
    refuse_unsupported(request)
    if request.priority and not priorities:
        raise RequestError("priority is ignored unless the target runs scheduling_policy: priority.", "priority")
    check_sources(request.chain, [*sources, *evidence])
    asked = request.chain.policy if request.chain is not None else None
    policy = resolve_policy(asked, presets or {}, allow_lossy=allow_lossy, semantic=semantic)
    min_p = check_min_p(default_min_p if request.min_p is None else request.min_p)
    bias = check_logit_bias(request.logit_bias, vocab_size)
    if request.seed == -1:
        request.seed = None  # vLLM's own meaning of -1
    options = engine_options(
        _for_engine(request.chain, evidence),
        enabled=enabled,
        trace=trace,
        seed=request.seed,
        min_p=min_p,
        logit_bias=bias,
        tenant=tenant,
        policy=policy,
        texts=given_texts(request),
    )
    request.vllm_xargs = {**(request.vllm_xargs or {}), "chain": options}
    request.min_p = 0.0  # explicitly off, or a default of the checkpoint's generation_config would come back
    request.logit_bias = None
    request.chain = None
    if isinstance(request, ChainChatRequest):
        request.prediction = None


def _for_engine(field: ChainField | None, evidence: Sequence[str]) -> ChainField | None:
    """In answer mode ``sources`` says who drafts answers, and the token chain has all of its own."""
    if field is None or field.sources is None:
        return field
    kept = None if field.mode == "answer" else [name for name in field.sources if name not in evidence]
    return field.model_copy(update={"sources": kept})


def refuse_unsupported(request: ChainRequest) -> None:
    """Refuse by name what would be ignored or cannot be honoured together with drafts."""
    if request.vllm_xargs and "chain" in request.vllm_xargs:
        raise RequestError("vllm_xargs.chain is internal; use the `chain` field.", "vllm_xargs.chain")
    if request.use_beam_search:
        raise RequestError(
            "use_beam_search is not offered: a beam has no single next token to draft.", "use_beam_search"
        )
    if request.thinking_token_budget is not None and request.thinking_token_budget != -1:
        raise RequestError(
            "thinking_token_budget is not offered: it forces tokens from outside the sampler.", "thinking_token_budget"
        )
    if request.length_penalty != 1.0:
        raise RequestError("length_penalty only acts on beam search, which is not offered.", "length_penalty")
    for name, instead in IGNORED.items():
        if _given(request.model_extra, name):
            raise RequestError(f"{name} is not supported; {instead}.", name)
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(request, name, None):
            raise RequestError(f"{name} is not offered.", name)
    if request.chain is not None and request.chain.trace and _sequences(request) != 1:
        raise RequestError("chain.trace follows one sequence: send one prompt with n = 1.", "chain.trace")
    if isinstance(request, ChainCompletionRequest) and request.prompt_embeds is not None:
        raise RequestError("prompt_embeds is not offered: a draft needs the prompt's tokens.", "prompt_embeds")


def given_texts(request: ChainRequest) -> list[str]:
    """Drafts that came with the request: OpenAI's ``prediction`` first, then ``chain.drafts``; none that is empty."""
    prediction = request.prediction if isinstance(request, ChainChatRequest) else None
    drafts = (request.chain.drafts or []) if request.chain is not None else []
    named = [("prediction", prediction.text)] if prediction is not None else []
    named = [(name, text) for name, text in (*named, *(("chain.drafts", text) for text in drafts)) if text]
    if not named:
        return []
    param = named[0][0]
    if len(named) > MAX_DRAFTS:
        raise RequestError(
            f"at most {MAX_DRAFTS} drafts with one request, prediction and chain.drafts together.", param
        )
    if sum(len(text) for _, text in named) > MAX_CHARACTERS:
        raise RequestError(f"{param}: drafts have at most {MAX_CHARACTERS} characters together.", param)
    if _sequences(request) != 1:
        raise RequestError(f"{param} is a draft of one answer: send one prompt with n = 1.", param)
    return [text for _, text in named]


def _given(extra: dict[str, Any] | None, name: str) -> bool:
    return bool(extra) and extra.get(name) not in (None, [], {}, "") if extra else False


def _sequences(request: ChainRequest) -> int:
    prompt = getattr(request, "prompt", None)
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (request.n or 1) * (len(prompt) if several and prompt is not None else 1)


def check_sources(field: ChainField | None, known: Sequence[str]) -> None:
    """Only sources that this application has; those of whole answers are checked with the plan of the answer."""
    if field is None or field.mode == "answer":
        return
    for name in field.sources or ():
        if name not in known:
            raise RequestError(
                f"chain.sources: no source {name!r} here; there are: {', '.join(known) or 'none'}.", "chain.sources"
            )


def check_min_p(value: float) -> float:
    """``min_p`` in [0, 1]; 0 when it is off."""
    if not 0.0 <= value <= 1.0:  # also false for NaN
        raise RequestError(f"min_p must be in [0, 1], got {value}.", "min_p")
    return value if value > MIN_P_EPSILON else 0.0


def check_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[str, float] | None:
    """Token ids inside the vocabulary, values in [-100, 100] as OpenAI has them."""
    if not bias:
        return None
    checked: dict[str, float] = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except ValueError:
            raise RequestError(f"logit_bias keys must be token ids, got {key!r}.", "logit_bias") from None
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias token {token} is outside the vocabulary of {vocab_size} tokens.", "logit_bias"
            )
        if not math.isfinite(value) or not -100.0 <= value <= 100.0:
            raise RequestError(f"logit_bias of token {token} must be in [-100, 100], got {value}.", "logit_bias")
        checked[str(token)] = value
    return checked
