"""Slots of a draft that belong to no session: those whole answers are written in, and prompts kept from them. No model, no clock."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_SHARED = 8  # tokens; fewer are read as fast as they are found


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A slot that still holds the KV of a prompt's tokens."""

    slot: int
    tenant: str
    tokens: list[int]
    since: float


class Loans:
    """Which slots are lent. Sessions get kept prompts' slots back whenever they want one, the others when an answer ends."""

    def __init__(self) -> None:
        self.writing: set[int] = set()
        self.kept: list[KeptPrompt] = []  # oldest first

    def slots(self) -> list[int]:
        """All of them."""
        return [*self.writing, *(prompt.slot for prompt in self.kept)]

    def keep(self, prompt: KeptPrompt, most: int) -> list[int]:
        """Keep a prompt whose slot was written in; returns slots that became free: of older ones beyond ``most``, or its own.

        One that begins with all of an older one of its tenant takes that one's place.
        """
        self.writing.remove(prompt.slot)
        if not prompt.tenant or not most:  # without a name nothing is shared
            return [prompt.slot]
        freed = [
            kept
            for kept in self.kept
            if kept.tenant == prompt.tenant and _shared(kept, prompt.tokens) == len(kept.tokens)
        ]
        self.kept = [kept for kept in self.kept if kept not in freed]
        self.kept.append(prompt)
        freed += self.kept[:-most]
        del self.kept[:-most]
        return [kept.slot for kept in freed]

    def reuse(self, tenant: str, tokens: list[int]) -> tuple[int, int] | None:
        """Take the slot that holds most of the beginning of a tenant's prompt: (slot, tokens shared). None: too few."""
        found, most = None, _LEAST_SHARED - 1
        for kept in self.kept:
            if tenant and kept.tenant == tenant and (shared := _shared(kept, tokens)) > most:
                found, most = kept, shared
        if found is None:
            return None
        self.kept.remove(found)
        self.writing.add(found.slot)
        return found.slot, most

    def expired(self, before: float) -> list[int]:
        """Slots of prompts kept since earlier than that, which are kept no longer."""
        old = [kept.slot for kept in self.kept if kept.since < before]
        self.kept = [kept for kept in self.kept if kept.since >= before]
        return old


def _shared(kept: KeptPrompt, tokens: list[int]) -> int:
    """How many leading tokens are the same."""
    most = min(len(kept.tokens), len(tokens))
    if kept.tokens[:most] == tokens[:most]:
        return most
    return next(index for index in range(most) if kept.tokens[index] != tokens[index])
