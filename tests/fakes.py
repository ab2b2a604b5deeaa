"""Drafters for tests: always right, always wrong, silent, slow, dying. Each speaks the real protocol."""

import time
from collections.abc import Callable

from deployments.chain.protocol import PROTOCOL_VERSION, UNKNOWN_SESSION, Commit, Draft, Drafts, Step


class FakeDrafter:
    """Keeps every session's tokens and drafts by ``guess(tokens, want)``."""

    def __init__(self, guess: Callable[[list[int], int], list[int]], name: str = "fake") -> None:
        self.guess = guess
        self.name = name
        self.sessions: dict[str, list[int]] = {}
        self.epochs: dict[str, int] = {}
        self.steps = 0

    def step(self, step: Step) -> Drafts:
        self.steps += 1
        for session in step.closed:
            self.sessions.pop(session, None)
        return Drafts(PROTOCOL_VERSION, self.name, step.number, [self._draft(c) for c in step.commits])

    def _draft(self, commit: Commit) -> Draft:
        held = self.sessions.get(commit.session, [])
        start = commit.length - len(commit.tokens)
        if commit.opens:
            held = []
        elif len(held) < start or self.epochs.get(commit.session) != commit.epoch:
            return Draft(commit.session, commit.epoch, commit.length, [], UNKNOWN_SESSION)
        self.sessions[commit.session] = held = held[:start] + commit.tokens
        self.epochs[commit.session] = commit.epoch
        return Draft(commit.session, commit.epoch, commit.length, self.guess(held, commit.want)[: commit.want])

    def disconnect(self, target: str) -> None:
        self.sessions.clear()


def always(token: int) -> Callable[[list[int], int], list[int]]:
    return lambda tokens, want: [token] * want


def replay(known: list[list[int]]) -> Callable[[list[int], int], list[int]]:
    """Right whenever the sequence is a prefix of a known one."""

    def guess(tokens: list[int], want: int) -> list[int]:
        for whole in known:
            if whole[: len(tokens)] == tokens:
                return whole[len(tokens) : len(tokens) + want]
        return []

    return guess


def wrong(known: list[list[int]], vocab: int) -> Callable[[list[int], int], list[int]]:
    """Wrong at every position of every known sequence."""
    right = replay(known)

    def guess(tokens: list[int], want: int) -> list[int]:
        good = right(tokens, want)
        return [(t + 1) % vocab for t in good] + [7] * (want - len(good))

    return guess


def half_right(known: list[list[int]], vocab: int) -> Callable[[list[int], int], list[int]]:
    """Right for a while, then wrong: runs of every length get accepted."""
    right = replay(known)

    def guess(tokens: list[int], want: int) -> list[int]:
        good = right(tokens, want)
        keep = (len(tokens) * 7 + sum(tokens[-3:])) % (want + 1)
        return good[:keep] + [(t + 1) % vocab for t in good[keep:]]

    return guess


class DyingDrafter(FakeDrafter):
    """Answers ``lives`` steps, then raises for ever."""

    def __init__(self, guess: Callable[[list[int], int], list[int]], lives: int) -> None:
        super().__init__(guess, "dying")
        self.lives = lives

    def step(self, step: Step) -> Drafts:
        if self.steps >= self.lives:
            raise ConnectionResetError("the draft is gone")
        return super().step(step)


class SlowDrafter(FakeDrafter):
    """Right, but later than anybody waits."""

    def __init__(self, guess: Callable[[list[int], int], list[int]], delay_s: float) -> None:
        super().__init__(guess, "slow")
        self.delay_s = delay_s

    def step(self, step: Step) -> Drafts:
        time.sleep(min(self.delay_s, step.deadline_s * 1.5))
        return super().step(step)
