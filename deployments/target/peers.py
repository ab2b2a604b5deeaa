"""The target's end of its draft replicas: which can be used, what is sent to them, and what comes back in time."""

import logging
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, DraftChannel, Drafts, Step

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    channel: DraftChannel
    circuit: Circuit
    closed: list[str] = field(default_factory=list)  # sessions to close with the next message


class Peers:
    """Every draft replica by name. A channel that raises is a channel that does not deliver: the target goes on."""

    def __init__(self, target: str, faults: FaultPolicy) -> None:
        self.target = target
        self._faults = faults
        self._peers: dict[str, _Peer] = {}
        self._dropped: Counter[str] = Counter()  # by channels that are gone
        self._number = 0

    @property
    def channels(self) -> dict[str, DraftChannel]:
        return {name: peer.channel for name, peer in self._peers.items()}

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def replace(self, channels: Mapping[str, DraftChannel]) -> set[str]:
        """Make ``channels`` the set of drafts; returns the names whose sessions are lost."""
        gone = {name for name, peer in self._peers.items() if channels.get(name) is not peer.channel}
        for name in gone:
            channel = self._peers.pop(name).channel
            self._dropped += channel.dropped
            channel.close()
        for name, channel in channels.items():
            if name not in self._peers:
                self._peers[name] = _Peer(channel, Circuit(self._faults))
        return gone

    def usable(self, now: float) -> list[str]:
        """Drafts that may be asked now; one whose circuit is open only when a probe is due."""
        return [name for name, peer in self._peers.items() if peer.circuit.allows(now)]

    def healthy(self) -> list[str]:
        """Drafts whose circuit is closed."""
        return [name for name, peer in self._peers.items() if not peer.circuit.open]

    # --- messages -------------------------------------------------------------------------------------------------

    def next_step(self) -> int:
        """Number the messages of the coming engine step."""
        self._number += 1
        return self._number

    def send(self, name: str, commits: list[Commit], deadline_s: float, token_worth_s: float, now: float) -> bool:
        """Post one message with the commits and what is to be closed; False, and a failure of its circuit, if it cannot go."""
        peer = self._peers[name]
        step = Step(PROTOCOL_VERSION, self.target, self._number, deadline_s, commits, peer.closed, token_worth_s)
        if self._post(peer, step):
            peer.closed = []
            return True
        if commits:
            peer.circuit.failure(now)
        return False

    def receive(self, name: str, timeout_s: float) -> Drafts | None:
        """The answer of this step; None at the deadline or when the channel failed."""
        channel = self._peers[name].channel
        try:
            return channel.collect(self._number, timeout_s)
        except Exception:
            logger.exception("draft channel %s failed to receive", channel.name)
            return None

    def answered(self, name: str) -> None:
        self._peers[name].circuit.success()

    def missed(self, name: str, now: float) -> None:
        self._peers[name].circuit.failure(now)

    def close_session(self, name: str, request: str) -> None:
        """Tell a draft with the next message that a session ended."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.closed.append(request)

    def send_closes(self, except_to: Container[str] = ()) -> None:
        """A message of its own where none with commits is about to carry them; nobody answers it."""
        for name, peer in self._peers.items():
            if peer.closed and name not in except_to:
                self.send(name, [], 0.0, 0.0, 0.0)
                del peer.closed[: -self._faults.trace_requests]  # a draft that is away evicts them by their lease

    def _post(self, peer: _Peer, step: Step) -> bool:
        try:
            return peer.channel.post(step)
        except Exception:
            logger.exception("draft channel %s failed to send", peer.channel.name)
            return False

    # --- beside it ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        dropped = sum((peer.channel.dropped for peer in self._peers.values()), self._dropped)
        return {
            **{f"dropped:{reason}": float(value) for reason, value in dropped.items()},
            "drafts_connected": float(len(self._peers)),
            "drafts_usable": float(len(self.healthy())),
        }

    def close(self) -> None:
        for peer in self._peers.values():
            peer.channel.close()
        self._peers.clear()


def draft_of(replica: str) -> str:
    """The draft that a replica belongs to: what stays the same when replicas come and go."""
    return replica.partition("#")[0]
