"""What the connector's two sides tell each other, in vLLM's envelopes. Plain data: it is pickled on its way to workers."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from deployments.target.kv_connector.prompts import Export, Load, Place


@dataclass(slots=True)
class ChainMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, once a step."""

    exports: list[Export] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChainHandshake(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler, once."""

    place: Place
