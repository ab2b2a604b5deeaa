"""Connections to Redis, the keys in use, and what goes over them. JSON, typed and bounded on both sides."""

import re
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from deployments.chain.faults import FaultPolicy
from deployments.evidence.validators.base import Tag
from deployments.evidence.validators.jobs import MAX_JOB_BYTES, Job

GROUP = "workers"
FIELD = b"m"  # of each stream entry: the message
MAX_REPLIES = 4096  # in one reply stream
BLOCK_MS = 500  # one blocking read; how soon a stop is noticed
MAX_DELIVERIES = 3  # a job that ended so many workers is not given to another
CREDENTIALS = re.compile(r"//[^@/\s]*@")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A job on its way to a worker."""

    id: str
    reply: str  # the stream its answer goes to
    job: Job


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to an order."""

    id: str
    tag: Tag


def connect(url: str, faults: FaultPolicy) -> Any:
    """A client that connects with its first command, and fails rather than waits. ``rediss://`` is TLS.

    Raises:
        ValueError: not a Redis URL (told without its credentials).
    """
    try:
        return Redis.from_url(
            url,
            socket_connect_timeout=faults.validator_limit_s,
            socket_timeout=faults.validator_limit_s + BLOCK_MS / 1000,
            protocol=2,  # one shape of answers, whatever the server speaks
            retry=Retry(NoBackoff(), 0),  # whoever waits has a budget; the next job tries again
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{shown(url)}: {shown(str(error))}") from None


def shown(text: str) -> str:
    """The same for logs: without credentials in URLs."""
    return CREDENTIALS.sub("//***@", text)


def reply_key(stream: str, asker: str) -> str:
    """Each asking process has one stream of answers; it expires when nobody uses it."""
    return f"{stream}:replies:{asker}"


def encode(message: Order | Answer) -> bytes:
    return msgspec.json.encode(message)


def decode_order(fields: dict[bytes, bytes]) -> Order:
    """Raises ValueError for what is no order of a bounded size."""
    data = fields.get(FIELD, b"")
    if len(data) > MAX_JOB_BYTES:
        raise ValueError("too large")
    return msgspec.json.decode(data, type=Order)  # its error is a ValueError


def decode_answer(fields: dict[bytes, bytes]) -> Answer:
    """Raises ValueError for what is no answer."""
    return msgspec.json.decode(fields.get(FIELD, b""), type=Answer)
