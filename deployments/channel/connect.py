"""A target's channel to a draft: the Unix socket where draft and target share a machine, ZeroMQ otherwise and after it."""

import logging

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import DraftChannel, Drafts, Step
from deployments.channel.endpoint import Endpoint, KeyPair
from deployments.channel.unix import UnixChannel
from deployments.channel.zeromq import ZmqChannel

logger = logging.getLogger(__name__)


def connect(endpoint: Endpoint, keys: KeyPair, faults: FaultPolicy) -> "ZmqChannel | NearChannel":
    """Open the best channel there is; it keeps ``endpoint``. Never fails and waits at most a draft's deadline.

    ``keys`` must have been authorised at the draft, or nothing comes of it.
    """
    return NearChannel(endpoint, keys, faults) if endpoint.near else ZmqChannel(endpoint, keys, faults)


class NearChannel:
    """Uses the Unix socket as long as that works, then ZeroMQ, which finds a draft again by itself; counted as ``fell_back``."""

    def __init__(self, endpoint: Endpoint, keys: KeyPair, faults: FaultPolicy) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self._keys = keys
        self._faults = faults
        self._unix: UnixChannel | None = None
        self._channel: DraftChannel
        try:
            self._channel = self._unix = UnixChannel(endpoint, keys, faults)
            self.dropped = self._channel.dropped
        except OSError as error:
            logger.info("draft %s is not reached over its Unix socket, using ZeroMQ: %s", self.name, error)
            self._fall_back()

    @property
    def over_unix(self) -> bool:
        return self._unix is not None

    def post(self, step: Step) -> bool:
        sent = self._channel.post(step)
        self._look()
        return sent

    def collect(self, number: int, timeout_s: float) -> Drafts | None:
        answer = self._channel.collect(number, timeout_s)
        self._look()
        return answer

    def close(self) -> None:
        self._unix = None
        self._channel.close()

    def _look(self) -> None:
        if self._unix is not None and self._unix.lost:
            self._fall_back()

    def _fall_back(self) -> None:
        channel = ZmqChannel(self.endpoint, self._keys, self._faults)
        if self._unix is not None:
            channel.dropped.update(self._unix.dropped)
            self._unix = None
        channel.dropped["fell_back"] += 1
        self._channel, self.dropped = channel, channel.dropped
