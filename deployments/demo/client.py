"""The two requests of the demo, over HTTP like any client's."""

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

PROMPT = "Explain to a curious child why the sky is blue during the day and red in the evening."
WARM_UP = "Write one sentence about the sea."
MAX_TOKENS = 96
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer with its figures."""

    text: str
    tokens: int
    seconds: float  # of generation, first to last token, as the target measured it
    chain: dict[str, Any] | None

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding: the first token is prefill."""
        return (self.tokens - 1) / self.seconds if self.seconds > 0 and self.tokens > 1 else 0.0


class DemoError(Exception):
    """Something a person should read, as one sentence."""


def body(model: str, prompt: str, chain: dict[str, Any], max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """A chat request."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "chain": chain,
    }


def chat(url: str, request: dict[str, Any]) -> Answer:
    """Send one chat request and wait for the whole answer."""
    started = time.perf_counter()
    call = urllib.request.Request(  # noqa: S310 - our own http URL
        f"{url}/v1/chat/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(call, timeout=TIMEOUT_S) as response:  # noqa: S310
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise DemoError(
            f"the request failed with HTTP {error.code}: {error.read().decode(errors='replace')[:500]}"
        ) from None
    except OSError as error:
        raise DemoError(f"the request failed: {error}") from None
    took = time.perf_counter() - started
    generation_ms = (answer.get("metrics") or {}).get("generation_time_ms")
    return Answer(
        text=answer["choices"][0]["message"]["content"] or "",
        tokens=answer["usage"]["completion_tokens"],
        seconds=generation_ms / 1e3 if generation_ms else took,
        chain=answer.get("chain"),
    )
