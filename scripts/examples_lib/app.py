"""The application that examples talk to, over HTTP like any client's."""

from typing import Any

import httpx

from deployments.demo.client import Answer, DemoError, chat

LIST_TIMEOUT_S = 30.0


class App:
    """An OpenAI endpoint of this system. Raises DemoError where nothing answers there."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            listed = httpx.get(f"{self.url}/v1/models", timeout=LIST_TIMEOUT_S)
            listed.raise_for_status()
            self.model = str(listed.json()["data"][0]["id"])
        except (httpx.HTTPError, LookupError, ValueError, TypeError) as error:
            raise DemoError(f"{self.url} does not answer as an OpenAI endpoint: {error}") from None

    def ask(self, question: str, chain: dict[str, Any], *, system: str = "", max_tokens: int, **more: Any) -> Answer:
        """One greedy chat. Raises DemoError where it fails."""
        messages = [{"role": "user", "content": question}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "chain": chain}
        return chat(self.url, {**body, **more})
