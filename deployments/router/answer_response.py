"""From the target's response to the client's, in answer mode: the trace as it happens, scaffolds, abstentions.

While drafts are collected a stream with a trace says what happens in SSE *comments*, ``: chain {"event": "draft", …}``. By the
SSE standard every client skips them. An ``event: chain`` would break OpenAI clients: the official one (3.57) takes the data of every event,
whatever its name, for a completion chunk, and its users index ``choices`` that are not there. Who can read named events asks for them
with ``"trace": "events"``.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from deployments.api.scaffold import Scaffold
from deployments.api.trace import DONE, segments
from deployments.router.answer_chain import AnswerChain, Decision

DATA = "data: "


def event(name: str, details: dict[str, Any], *, as_event: bool) -> str:
    """What happened, for a stream."""
    text = json.dumps({"event": name, **details})  # ASCII, without line breaks
    return f"event: chain\ndata: {text}\n\n" if as_event else f": chain {text}\n\n"


class AnswerText:
    """Follows one answer on its way out."""

    def __init__(self, chain: AnswerChain, decision: Decision, *, trace: bool, scaffold: bool) -> None:
        self._chain, self._decision, self._trace = chain, decision, trace
        self._scaffold: Scaffold | None = None
        if scaffold and decision.chosen is not None:
            draft = decision.found.candidates[decision.chosen]
            self._scaffold = Scaffold(draft.source, draft.text, draft.ends)
        self._parts: list[str] = []
        self._finished = False

    @property
    def answer(self) -> str:
        """What the target said, without marks; empty unless it came to its end."""
        return "".join(self._parts) if self._finished else ""

    async def whole(self, content: dict[str, Any]) -> dict[str, Any]:
        """The body of a response, changed in place."""
        for choice in content.get("choices", ()):
            message = choice.get("message") or {}
            self._parts.append(message.get("content") or "")
            self._finished = choice.get("finish_reason") == "stop"
            if self._scaffold is not None:
                message["content"] = self._scaffold.add(self._parts[-1]) + self._scaffold.close()
        if self._trace:
            await self._add_trace(content)
        return content

    async def stream(self, packets: AsyncIterator[str]) -> AsyncIterator[str]:
        """Packets of SSE, each with one or more whole events."""
        async for packet in packets:
            for part in packet.split("\n\n"):
                if part:
                    yield await self._chunk(part) + "\n\n"

    async def _chunk(self, part: str) -> str:
        if not part.startswith(DATA + "{"):
            return part
        content = json.loads(part.removeprefix(DATA))
        changed = False
        for choice in content.get("choices", ()):
            delta = choice.get("delta") or {}
            said, ends = delta.get("content") or "", choice.get("finish_reason")
            self._parts.append(said)
            self._finished = ends == "stop"
            if self._scaffold is not None and (said or ends):
                delta["content"] = self._scaffold.add(said) + (self._scaffold.close() if ends else "")
                choice["delta"], changed = delta, True
        if self._trace and "chain" in content:
            await self._add_trace(content)
            changed = True
        return DATA + json.dumps(content, ensure_ascii=False) if changed else part

    async def _add_trace(self, content: dict[str, Any]) -> None:
        told = self._decision.told()
        told["distances_to_answer"] = await self._chain.distances(self._decision, "".join(self._parts))
        found = content.setdefault("chain", {}) or {}
        told["segments"] = segments(found.get("rounds", []))
        content["chain"] = {**found, "answer": told}


def abstention(model: str, text: str, decision: Decision) -> dict[str, Any]:
    """The body of a response of which the target knows nothing."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        "chain": {"answer": decision.told()},
    }


def abstention_stream(body: dict[str, Any], *, usage: bool) -> list[str]:
    """The same as SSE."""
    head = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    text = body["choices"][0]["message"]["content"]
    deltas = [({"role": "assistant", "content": text}, None), ({}, "stop")]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} for delta, reason in deltas]
    if usage:
        chunks.append({**head, "choices": [], "usage": body["usage"]})
    chunks[-1]["chain"] = body["chain"]
    return [*(f"{DATA}{json.dumps(chunk)}\n\n" for chunk in chunks), f"{DONE}\n\n"]
