"""A load of clients over HTTP whose number can be changed, and a record of every answer."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

PROMPTS = (
    "Name three fruits.",
    "Describe the number seven in one sentence.",
    "Write one sentence about the sea.",
    "What is a lighthouse?",
    "Name a colour and say where it is found.",
    "Why do birds sing?",
    "Say hello in two languages.",
    "What does a baker do?",
)
REQUEST_S = 180.0  # longer than anything that is waited for on the server's side
RETRY_PAUSE_S = 0.2  # of a client that was refused
DATA, DONE = "data: ", "data: [DONE]"


@dataclass(slots=True)
class Answer:
    """One request. Times are of ``time.monotonic``."""

    prompt: int
    streamed: bool
    started: float
    ended: float = 0.0
    status: int = 0  # of HTTP; 0: the connection broke
    text: str = ""
    tokens: int = 0
    finished: bool = False  # it came to its end: a reason to finish, and of a stream also [DONE]
    error: str = ""  # what the body or the stream's last event says

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.finished and not self.error

    @property
    def refused(self) -> bool:
        """503 before anything was said; the client may come again."""
        return self.status == 503 and not self.text


@dataclass
class Load:
    """Clients that each ask one question after the other, in a thread of their own."""

    url: str
    model: str
    tokens: int = 12
    chain: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[str] = PROMPTS
    stream_every: int = 4  # each so many-th client streams: a stream costs this machine far more than a whole answer
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._wanted = 0
        self._stop = threading.Event()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load", daemon=True)
        self._open: dict[int, Answer] = {}

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        """Let requests in progress end, unless something has gone wrong."""
        if kind is not None:
            self._abandoned.set()
        self._wanted = 0
        self._stop.set()
        self._thread.join(REQUEST_S)

    @property
    def open(self) -> list[Answer]:
        """Requests in progress."""
        return list(self._open.values())

    def clients(self, count: int) -> None:
        """From now on so many; those beyond it end with their present answer."""
        self._wanted = count

    def abandon(self) -> None:
        """Leave requests in progress, and do not wait for them at the end."""
        self._abandoned.set()

    def since(self, moment: float) -> list[Answer]:
        """Answers that ended after a moment of ``time.monotonic``."""
        return [answer for answer in list(self.answers) if answer.ended >= moment]

    async def _run(self) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits, trust_env=False) as http:
            while not self._stop.is_set() or (running and not self._abandoned.is_set()):
                for number in range(self._wanted):
                    if number not in running:
                        running[number] = asyncio.create_task(self._client(http, number))
                await asyncio.sleep(0.05)
                running = {number: task for number, task in running.items() if not task.done()}
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        turn = number
        while number < self._wanted:
            answer = Answer(turn % len(self.prompts), number % self.stream_every == 0, time.monotonic())
            self._open[number] = answer
            try:
                await (self._streamed if answer.streamed else self._asked)(http, answer)
            except (httpx.HTTPError, ValueError) as error:
                answer.error = answer.error or repr(error)
            answer.ended = time.monotonic()
            self.answers.append(answer)
            del self._open[number]
            turn += 1
            if not answer.whole:
                await asyncio.sleep(RETRY_PAUSE_S)

    def _body(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "user", "content": self.prompts[answer.prompt]}
        body = {"model": self.model, "messages": [message], "max_tokens": self.tokens, "temperature": 0}
        if answer.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | ({"chain": dict(self.chain)} if self.chain else {})

    async def _asked(self, http: httpx.AsyncClient, answer: Answer) -> None:
        response = await http.post(f"{self.url}/v1/chat/completions", json=self._body(answer))
        answer.status = response.status_code
        if response.status_code != 200:
            answer.error = response.text[:500]
            return
        content = response.json()
        choice = content["choices"][0]
        answer.text, answer.tokens = choice["message"]["content"] or "", content["usage"]["completion_tokens"]
        answer.finished = choice["finish_reason"] is not None

    async def _streamed(self, http: httpx.AsyncClient, answer: Answer) -> None:
        ended = done = False
        url = f"{self.url}/v1/chat/completions"
        async with http.stream("POST", url, json=self._body(answer)) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")[:500]
                return
            async for line in response.aiter_lines():
                if line == DONE:
                    done = True
                elif line.startswith(DATA):
                    ended |= _take(answer, json.loads(line.removeprefix(DATA)))
        answer.finished = ended and done


def _take(answer: Answer, chunk: dict[str, Any]) -> bool:
    """Add one chunk of a stream; is it the last with words?"""
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])
        return False
    ended = False
    for choice in chunk["choices"]:
        answer.text += choice["delta"].get("content") or ""
        ended |= choice["finish_reason"] is not None
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]
    return ended


def plain_answers(url: str, model: str, tokens: int, prompts: Sequence[str] = PROMPTS) -> list[str]:
    """What the target says to each prompt without drafts, one after the other."""
    with httpx.Client(timeout=REQUEST_S, trust_env=False) as http:
        found = []
        for prompt in prompts:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
            body |= {"temperature": 0, "chain": {"enabled": False}}
            response = http.post(f"{url}/v1/chat/completions", json=body)
            response.raise_for_status()
            found.append(str(response.json()["choices"][0]["message"]["content"]))
        return found


def throughput(answers: Iterable[Answer], since: float, until: float) -> float:
    """Tokens a second in a window: those of whole answers, each spread evenly over the time it took."""
    total = 0.0
    for answer in answers:
        if answer.whole and (took := answer.ended - answer.started) > 0:
            inside = min(answer.ended, until) - max(answer.started, since)
            total += answer.tokens * max(0.0, inside) / took
    return total / max(until - since, 1e-9)


@contextlib.contextmanager
def steady(load: Load, count: int) -> Any:
    """``count`` clients for as long as the block lasts, then none."""
    load.clients(count)
    try:
        yield load
    finally:
        load.clients(0)
