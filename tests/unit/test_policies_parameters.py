"""Every field of vLLM's request bodies under every policy: honoured as without one, or refused by name."""

from typing import Any

import msgspec
import pytest

from deployments.api.errors import RequestError
from deployments.api.parameters import prepare
from deployments.api.requests import ChainChatRequest, ChainCompletionRequest
from deployments.chain.acceptance.policy import NAMES
from deployments.target.options import ChainOptions, options_of
from tests.unit.test_api import CHAT, DEFAULTS

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
MODELS = {"chat": (ChainChatRequest, CHAT), "completion": (ChainCompletionRequest, COMPLETION)}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}

# What decides which tokens come and when they end: has to reach the engine, in its parameters or in the chain's options.
ACTS: dict[str, Any] = {
    "allowed_token_ids": [3, 4],
    "bad_words": ["no"],
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logit_bias": {"7": -100.0},
    "logprob_token_ids": [5],
    "max_tokens": 5,
    "min_p": 0.1,
    "min_tokens": 3,
    "n": 2,
    "presence_penalty": -0.5,
    "prompt_logprobs": 1,
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "repetition_penalty": 1.3,
    "response_format": FORMAT,
    "seed": 11,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["end"],
    "stop_token_ids": [9],
    "structured_outputs": {"choice": ["a", "b"]},
    "temperature": 0.3,
    "thinking_token_budget": -1,
    "top_k": 20,
    "top_p": 0.4,
    "vllm_xargs": {"mine": 1},
}
OF_CHAT: dict[str, Any] = {
    "logprobs": True,
    "max_completion_tokens": 5,
    "prediction": {"type": "content", "content": "a draft"},
}
OF_COMPLETION: dict[str, Any] = {"logprobs": 2}

REFUSED: dict[str, Any] = {  # whatever the policy
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "length_penalty": 2.0,
    "priority": 1,
    "prompt_embeds": "AAAA",
    "use_beam_search": True,
}

# What concerns the prompt, the connection or the response's form: no policy sees it.
ASIDE = {
    "add_generation_prompt", "add_special_tokens", "cache_salt", "chat_template", "chat_template_kwargs",
    "continue_final_message", "documents", "echo", "include_reasoning", "media_io_kwargs", "messages", "mm_processor_kwargs",
    "model", "parallel_tool_calls", "prompt", "reasoning_effort", "request_id", "return_assistant_tokens_mask",
    "return_prompt_text", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids",
    "routed_experts_prompt_start", "session_id", "stream", "stream_interval", "stream_options", "suffix", "tool_choice", "tools",
    "top_logprobs", "truncate_prompt_tokens", "truncation_side", "user",
}  # fmt: skip

CASES = [
    *((kind, name, value) for kind in MODELS for name, value in ACTS.items()),
    *(("chat", name, value) for name, value in OF_CHAT.items()),
    *(("completion", name, value) for name, value in OF_COMPLETION.items()),
    ("chat", "top_logprobs", 3),
    ("chat", "tool_choice", "required"),
    ("chat", "stream", True),
]
BESIDE = {  # what these need beside them
    ("chat", "top_logprobs"): {"logprobs": True},
    ("chat", "logprob_token_ids"): {"logprobs": True},
    ("completion", "logprob_token_ids"): {"logprobs": 1},
    ("chat", "tool_choice"): {"tools": [TOOL]},
}


def sent(kind: str, body: dict[str, Any], policy: str) -> tuple[dict[str, Any], ChainOptions]:
    """Fields of the engine's parameters, and the chain's options, of a request under a policy."""
    model, least = MODELS[kind]
    request = model.model_validate({**least, **body, "chain": {"policy": policy}})
    prepare(request, **{**DEFAULTS, "semantic": True})
    most = getattr(request, "max_completion_tokens", None) or request.max_tokens or 16  # vLLM's server does this
    params = request.to_sampling_params(most, {})
    options = options_of(params)
    extra = {key: value for key, value in (params.extra_args or {}).items() if key != "chain"}
    fields = {
        name: getattr(params, name)
        for name in params.__struct_fields__
        if name not in ("extra_args", "_all_stop_token_ids")
    }
    return {**fields, "extra_args": extra}, options


def apart(options: ChainOptions) -> ChainOptions:
    """Without what is drawn anew for each request, and without the policy."""
    return msgspec.structs.replace(options, id="", seed=None, policy=None)


@pytest.mark.parametrize("kind", MODELS)
def test_no_field_is_forgotten(kind: str) -> None:
    """A field that a new vLLM brings has to be put into one of the tables above, after a look at what it does."""
    known = {*ACTS, *REFUSED, *ASIDE, *(OF_CHAT if kind == "chat" else OF_COMPLETION), "chain"}
    assert set(MODELS[kind][0].model_fields) <= known


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_it_reaches_the_engine_as_it_does_without_a_policy(kind: str, name: str, value: Any, policy: str) -> None:
    body = {name: value, **BESIDE.get((kind, name), {})}
    got, options = sent(kind, body, policy)
    plain, plain_options = sent(kind, body, "lossless")
    assert {**got, "structured_outputs": None} == {**plain, "structured_outputs": None}
    assert repr(got["structured_outputs"]) == repr(plain["structured_outputs"])
    assert apart(options) == apart(plain_options)
    assert (options.policy is None) == (policy == "lossless")
    assert options.policy is None or options.policy.name == policy


INERT = {
    "thinking_token_budget",
    "tool_choice",
}  # given at the value that means off; what a tool parser turns into a grammar


@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_it_changes_what_the_engine_gets(kind: str, name: str, value: Any) -> None:
    got, options = sent(kind, {name: value, **BESIDE.get((kind, name), {})}, "nkl")
    bare, bare_options = sent(kind, {}, "nkl")
    same = repr(got) == repr(bare) and apart(options) == apart(bare_options)
    assert same == (name in INERT)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_can_honour_is_refused_by_name(kind: str, name: str, policy: str) -> None:
    if name not in MODELS[kind][0].model_fields:
        pytest.skip("not a field of this body")
    with pytest.raises(RequestError) as error:
        sent(kind, {name: REFUSED[name]}, policy)
    assert (error.value.status, error.value.param) == (400, name)
