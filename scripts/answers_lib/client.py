"""One question to one system over HTTP."""

import time
from typing import Any

import httpx
import msgspec

from scripts.answers_lib.records import Draft, Record
from scripts.answers_lib.systems import System
from scripts.bench_lib.http_backend import figures

REQUEST_TIMEOUT_S = 120.0


class Refused(Exception):
    """The application does not serve this system; the message says why."""


class Client:
    """An OpenAI endpoint."""

    def __init__(self, url: str, *, max_tokens: int, temperature: float) -> None:
        """Raises RuntimeError where nothing answers there."""
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._http = httpx.Client(timeout=REQUEST_TIMEOUT_S)
        self._body = {"max_tokens": max_tokens, "temperature": temperature, "seed": 1}
        try:
            listed = self._http.get(f"{self._url}/models")
            listed.raise_for_status()
            self.model = str(listed.json()["data"][0]["id"])
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise RuntimeError(f"{self._url} does not answer as an OpenAI endpoint: {error}") from error

    def ask(self, system: System, question: str, wording: int, prompt: str) -> Record:
        """Raises Refused where the request is, RuntimeError where the server fails."""
        body = {
            **self._body,
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "chain": system.chain,
        }
        # what earlier answers teach a source stays with the system that gave them
        headers = {"Authorization": f"Bearer {system.name}"}
        began = time.perf_counter()
        try:
            response = self._http.post(f"{self._url}/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise RuntimeError(f"{self._url}: {type(error).__name__} {error}") from error
        seconds = time.perf_counter() - began
        if response.status_code == 400:
            raise Refused(_message(response))
        if response.status_code != 200:
            raise RuntimeError(f"{self._url} answered {response.status_code}: {_message(response)}")
        return record(response.json(), system.name, question, wording, seconds)

    def close(self) -> None:
        self._http.close()


def record(answer: dict[str, Any], system: str, question: str, wording: int, seconds: float) -> Record:
    """What a response says; the drafts and the decision wherever the ``chain`` object has them."""
    counts = figures(answer)
    decided = _holder(answer.get("chain"), "drafts") or {}
    drafts = msgspec.convert(
        [{"source": item["source"], "text": item["text"]} for item in decided.get("drafts", [])], tuple[Draft, ...]
    )
    return Record(
        system=system,
        question=question,
        wording=wording,
        text=answer["choices"][0]["message"]["content"] or "",
        seconds=seconds,
        tokens=counts.tokens,
        accepted=counts.accepted,
        outcome=str(decided.get("outcome", "")),
        decision=str(decided.get("decision", "")),
        drafts=drafts,
    )


def _holder(value: Any, key: str) -> dict[str, Any] | None:
    """The object inside ``value`` that has ``key``."""
    if isinstance(value, dict):
        if key in value:
            return value
        for item in value.values():
            if (found := _holder(item, key)) is not None:
                return found
    return None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200]
