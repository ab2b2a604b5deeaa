"""A system behind an OpenAI-compatible base URL: the same cells, measured as a client sees them."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from scripts.bench_lib.backend import Work, chain_field
from scripts.bench_lib.cells import System
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.statistics import RequestFigures, Sample

REQUEST_TIMEOUT_S = 600.0


class HttpBackend:
    """Sends the requests of one batch at once and waits for all of them. A server cannot be frozen: it idles."""

    def __init__(self, name: str, base_url: str) -> None:
        self.name = name
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = ""

    def start(self, warmup: list[Prompt], batches: list[int], temperatures: list[float]) -> float:
        started = time.perf_counter()
        try:
            listed = httpx.get(f"{self._url}/models", timeout=30.0)
            listed.raise_for_status()
            self._model = listed.json()["data"][0]["id"]
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise RuntimeError(f"{self._url} does not answer as an OpenAI endpoint: {error}") from error
        for batch in batches:
            group = [warmup[index % len(warmup)] for index in range(batch)]
            asyncio.run(self._groups([group], self._body(temperatures[0], 16, True, None)))
        return time.perf_counter() - started

    def measure(self, work: Sequence[Work], system: System, repetition: int, settle: Prompt) -> list[Sample]:
        chain = chain_field(system)
        asyncio.run(self._groups([[settle]], self._body(0.0, 8, True, chain)))
        samples = []
        for cell, prompts in work:
            groups = [prompts[start : start + cell.batch] for start in range(0, len(prompts), cell.batch)]
            body = self._body(cell.temperature, cell.max_tokens, cell.until == "length", chain)
            seconds, answers = asyncio.run(self._groups(groups, body))
            requests = tuple(figures(answer) for answer in answers)
            samples.append(Sample(cell, system, repetition, seconds, requests))
        return samples

    def stop(self) -> None:
        """The server is not ours."""

    def _body(self, temperature: float, max_tokens: int, ignore_eos: bool, chain: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
        }
        if chain is not None:
            body["chain"] = json.loads(chain)
        return body

    async def _groups(self, groups: list[list[Prompt]], body: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
        limits = httpx.Limits(max_connections=64)
        answers: list[dict[str, Any]] = []
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
            started = time.perf_counter()
            for group in groups:
                answers += await asyncio.gather(*(self._one(client, prompt, body) for prompt in group))
            return time.perf_counter() - started, answers

    async def _one(self, client: httpx.AsyncClient, prompt: Prompt, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await client.post(
                f"{self._url}/chat/completions", json={**body, "messages": list(prompt.messages)}
            )
        except httpx.HTTPError as error:
            raise RuntimeError(f"{self._url}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise RuntimeError(f"{self._url} answered {response.status_code}: {response.text[:200]}")
        answer: dict[str, Any] = response.json()
        return answer


def figures(answer: dict[str, Any]) -> RequestFigures:
    """Completion tokens and, where the server reports them in vLLM's shape, its speculative counts."""
    counts = _find(answer, "num_draft_tokens") or {}
    return RequestFigures(
        tokens=int(answer["usage"]["completion_tokens"]),
        drafted=int(counts.get("num_draft_tokens", 0)),
        accepted=int(counts.get("num_accepted_draft_tokens", 0)),
        verifies=int(counts.get("num_spec_steps", 0)),
    )


def _find(value: Any, key: str) -> dict[str, Any] | None:
    """The first object anywhere in ``value`` that has ``key``: where it sits differs between versions."""
    if isinstance(value, dict):
        if key in value:
            return value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = _find(item, key)
            if found is not None:
                return found
    return None
