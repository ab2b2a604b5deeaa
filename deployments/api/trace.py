"""The ``chain`` object of a response: rounds and summary, put where OpenAI clients expect extras and never elsewhere."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from deployments.chain.trace import clip

Decode = Callable[[list[int]], str]
TakeTrace = Callable[[], Awaitable[dict[str, Any] | None]]

DONE = "data: [DONE]"
CONTEXT_TOKENS = 6  # enough for a tokenizer to spell what follows as it does inside the text


def pieces(groups: list[list[int]], decode: Decode) -> list[str]:
    """The text each group of tokens adds; a character split over groups appears with its last part."""
    done: list[int] = []
    held: list[int] = []
    texts = []
    for group in groups:
        held = held + group
        context = done[-CONTEXT_TOKENS:]
        text = decode(context + held)[len(decode(context)) :] if held else ""
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            texts.append("")
            continue
        texts.append(text)
        done, held = done + held, []
    return texts


def chain_object(trace: dict[str, Any] | None, completion_tokens: int | None, decode: Decode | None) -> dict[str, Any]:
    """Rounds with their text, and totals, of what the client received."""
    if trace is None:
        return {"rounds": [], "summary": {"missing": "the target kept no trace of this request"}}
    if completion_tokens is not None:
        trace = clip(trace, completion_tokens)
    rounds = [dict(item) for item in trace["rounds"]]
    if decode is not None:
        groups = [part for item in rounds for part in (item["drafted"][: item["accepted"]], item["own"])]
        texts = pieces(groups, decode)
        for index, item in enumerate(rounds):
            item["accepted_text"], item["own_text"] = texts[2 * index], texts[2 * index + 1]
            item["rejected_text"] = decode(item["drafted"][item["accepted"] :])
    drafted = sum(len(item["drafted"]) for item in rounds)
    accepted = sum(item["accepted"] for item in rounds)
    tokens = accepted + sum(len(item["own"]) for item in rounds)
    waits = sorted(item["wait_ms"] for item in rounds if item["source"])
    summary = {
        "tokens": tokens,
        "rounds": len(rounds),
        "drafted": drafted,
        "accepted": accepted,
        "relaxed": sum(len(item["relaxed"]) for item in rounds),
        "acceptance": round(accepted / drafted, 4) if drafted else 0.0,
        "tokens_per_round": round(tokens / len(rounds), 3) if rounds else 0.0,
        "wait_ms_p50": waits[len(waits) // 2] if waits else 0.0,
        "sources": sorted({item["source"] for item in rounds if item["source"]}),
        "reasons": trace["reasons"],
    }
    return {"rounds": rounds, "summary": summary}


def segments(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who each part of an answer is from: sources by their accepted tokens, ``target`` for its own."""
    found: list[dict[str, Any]] = []
    for item in rounds:
        parts = ((item["source"], item["accepted"], "accepted_text"), ("target", len(item["own"]), "own_text"))
        for source, tokens, key in parts:
            if not tokens:
                continue
            if not found or found[-1]["from"] != source:
                found.append({"from": source, "tokens": 0, "text": ""})
            found[-1]["tokens"] += tokens
            found[-1]["text"] += item.get(key, "")
    return found


async def with_trace(
    stream: AsyncGenerator[Any, None], take: TakeTrace, decode: Decode | None, keep_usage: bool
) -> AsyncGenerator[Any, None]:
    """Pass a response through and add the ``chain`` object to its end.

    A stream must have been asked for a usage chunk, which tells how many tokens the client got; it is dropped again unless
    ``keep_usage``. Only the closing chunks of a stream are held back, so that no token comes later than without a trace.
    """
    held: list[str] = []
    async for item in stream:
        if isinstance(item, str):
            if item.startswith(DONE):
                for chunk in await _closed(held, take, decode, keep_usage):
                    yield chunk
                held = []
                yield item
            elif held or '"choices":[]' in item or '"finish_reason":"' in item:
                held.append(item)
            else:
                yield item
        else:
            if hasattr(item, "choices"):
                usage = getattr(item, "usage", None)
                tokens = usage.completion_tokens if usage is not None else None
                item.chain = chain_object(await take(), tokens, decode)
            yield item
    for chunk in held:  # an error ended the stream before [DONE]
        yield chunk


async def _closed(held: list[str], take: TakeTrace, decode: Decode | None, keep_usage: bool) -> list[str]:
    bodies = [json.loads(chunk.removeprefix("data: ")) for chunk in held]
    usages = [body for body in bodies if not body.get("choices") and "usage" in body]
    tokens = usages[-1]["usage"].get("completion_tokens") if usages else None
    if not keep_usage and len(bodies) > len(usages):
        bodies = [body for body in bodies if body not in usages]
    if bodies:
        bodies[-1]["chain"] = chain_object(await take(), tokens, decode)
    return [f"data: {json.dumps(body, ensure_ascii=False)}\n\n" for body in bodies]
