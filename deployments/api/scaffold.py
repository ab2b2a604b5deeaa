"""Scaffold: the steps that the answer took over from its draft stay visible in it, inside a marked block.

The answer begins with ``<draft source="model:int8#0">``, the beginning of the draft that the target said itself when it verified it,
up to the end of a token, and ``</draft>``; the target's own continuation follows. Without the two tags it is the very answer that
comes without a scaffold. An answer that has not even the draft's first token has no block.
"""

from collections.abc import Sequence

CLOSE = "</draft>"


class Scaffold:
    """Marks one answer, which comes in parts."""

    def __init__(self, source: str, text: str, ends: Sequence[int]) -> None:
        """``text`` is the draft and ``ends`` where its tokens end."""
        self._open = f'<draft source="{source}">'
        self._text, self._ends = text, [end for end in dict.fromkeys(ends) if end]
        self._held = ""  # what agrees with the draft but is no whole token of it yet
        self._said = 0  # characters of the draft that are out
        self._done = not self._ends

    def add(self, part: str) -> str:
        """The next part of the answer, as it is to be sent."""
        if self._done:
            return part
        held = self._held + part
        rest = self._text[self._said :]
        same = next((i for i, (a, b) in enumerate(zip(held, rest, strict=False)) if a != b), min(len(held), len(rest)))
        end = max((end for end in self._ends if end <= self._said + same), default=self._said)
        sent, self._held = held[: end - self._said], held[end - self._said :]
        if sent and not self._said:
            sent = self._open + sent
        self._said = end
        if same < len(held) or self._said == self._ends[-1]:  # it left the draft, or the draft is over
            return sent + self.close()
        return sent

    def close(self) -> str:
        """What is left to be sent when the answer ends."""
        if self._done:
            return ""
        self._done = True
        return (CLOSE if self._said else "") + self._held
