"""Messages as bytes: what cannot be understood is counted and comes to nothing."""

from collections import Counter
from typing import TypeVar

import msgspec

from deployments.chain.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Drafts, Step

Data = bytes | bytearray | memoryview
Message = TypeVar("Message", Step, Drafts)


class Messages:
    """Encodes and decodes for one end, from one thread; ``dropped`` counts by reason."""

    def __init__(self, dropped: Counter[str]) -> None:
        self.dropped = dropped
        self._encoder = msgspec.msgpack.Encoder()
        self._steps = msgspec.msgpack.Decoder(Step)
        self._answers = msgspec.msgpack.Decoder(Drafts)

    def encode(self, message: Step | Drafts) -> bytes | None:
        """None when it is larger than a message may be."""
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            self.dropped["too_large"] += 1
            return None
        return data

    def step(self, data: Data) -> Step | None:
        """What a target sent, as it says itself; None when that cannot be understood."""
        return self._decode(self._steps, data)

    def answer(self, data: Data) -> Drafts | None:
        """What a draft answered; None when that cannot be understood."""
        return self._decode(self._answers, data)

    def _decode(self, decoder: "msgspec.msgpack.Decoder[Message]", data: Data) -> Message | None:
        try:
            message = decoder.decode(data)
        except msgspec.DecodeError:
            self.dropped["malformed"] += 1
            return None
        if message.version != PROTOCOL_VERSION:
            self.dropped["version"] += 1
            return None
        return message
