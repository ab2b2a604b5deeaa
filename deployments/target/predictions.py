"""Drafts that came as text: into the target's tokens on the way in, and onto the bill in OpenAI's fields on the way out.

OpenAI's Predicted Outputs report ``accepted_prediction_tokens`` (of the prediction, those the completion has) and
``rejected_prediction_tokens`` (the others) in ``usage.completion_tokens_details``. Rejected tokens are not counted as completion
tokens here: nobody is charged for a guess that did not hold.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

from deployments.api.trace import TakeTrace
from deployments.chain.given import MAX_DRAFTS, MAX_TOKENS
from deployments.target.options import ChainOptions


def tokenised(options: ChainOptions, tokenizer: Any) -> ChainOptions:
    """With ``texts`` behind the other given drafts, as tokens.

    An answer continues the prompt, so there is nothing in front of its first token: no token for the beginning of a text. Of a
    longer draft its first ``MAX_TOKENS`` tokens are used.
    """
    drafts = [tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS] for text in options.texts]
    return msgspec.structs.replace(options, given=[*options.given, *drafts][:MAX_DRAFTS], texts=[])


async def with_prediction_usage(stream: AsyncGenerator[Any, None], take: TakeTrace) -> AsyncGenerator[Any, None]:
    """Pass a response through and complete the usage it ends with; one without usage stays as it is."""
    async for item in stream:
        if isinstance(item, str):
            yield await _in_chunk(item, take) if '"choices":[]' in item else item
        else:
            usage = getattr(item, "usage", None)
            if usage is not None and (found := counts(await take(), usage.completion_tokens)):
                told = usage.completion_tokens_details
                usage.completion_tokens_details = CompletionTokenUsageInfo(
                    **(told.model_dump() if told else {}), **found
                )
            yield item


def counts(trace: dict[str, Any] | None, completion_tokens: int | None) -> dict[str, int]:
    """Of the draft that the output followed most; nothing without a trace. The last step can follow it past the answer's end."""
    if trace is None:
        return {}
    accepted = min(trace["followed"], completion_tokens or 0)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": trace["given"] - accepted}


async def _in_chunk(chunk: str, take: TakeTrace) -> str:
    body = json.loads(chunk.removeprefix("data: "))
    usage = body.get("usage")
    found = counts(await take(), usage.get("completion_tokens")) if usage else {}
    if not found:
        return chunk
    usage["completion_tokens_details"] = {**(usage.get("completion_tokens_details") or {}), **found}
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
