"""Acceptance from trails: replayed rounds are those of an engine that drafts and verifies token by token."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.protocol import Sampling
from scripts.select_lib.acceptance import DEPTH, Trail, replay, runner_shares, runs_of
from scripts.select_lib.followers import ConditionedFollower, LookupFollower, ModelFollower

GREEDY = Sampling(0.0, 0)
VOCAB = 7


class TableModel:
    """A draft whose next token is a hash of the last two tokens it has read: it must be fed at the right positions."""

    vocab_size = VOCAB

    def __init__(self, context: int = 256) -> None:
        self.tokens = [0] * context
        self.kv_written = 0

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> Any:
        self.tokens[start : start + len(tokens)] = tokens
        return self._logits(start + len(tokens))

    def decode(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        self.tokens[lengths[0]] = tokens[0]
        return [self._logits(lengths[0] + 1)]

    def write_kv(self, slot: int, start: int, kv: Any) -> None:
        self.kv_written = kv.shape[2]

    def _logits(self, length: int) -> Any:
        logits = np.zeros(VOCAB, np.float32)
        logits[guess(self.tokens[:length])] = 2.0
        logits[(guess(self.tokens[:length]) + 1) % VOCAB] = 1.0  # its first runner-up
        return logits


def guess(tokens: Sequence[int]) -> int:
    return (3 * tokens[-1] + tokens[-2]) % VOCAB


def engine(prompt: list[int], answer: list[int], limit: int, most: int, draft: Callable[[list[int]], int]) -> list[Any]:
    """(drafted, accepted) of each step of a target whose answer is known, the draft guessing one token after another."""
    done, steps = 1, []
    while done < len(answer):
        want = max(0, min(most, limit - done - 1))
        text, drafted = [*prompt, *answer[:done]], []
        for _ in range(want):
            drafted.append(draft([*text, *drafted]))
        accepted = 0
        while accepted < min(want, len(answer) - done) and drafted[accepted] == answer[done + accepted]:
            accepted += 1
        steps.append((want, accepted))
        done += min(accepted + 1, len(answer) - done)
    return steps


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """A prompt, an answer that often is what :func:`guess` says, and its longest length."""
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=5))
    odd = random.Random(draw(st.integers(0, 10**6)))
    answer: list[int] = []
    for _ in range(draw(st.integers(1, 40))):
        right = guess([*prompt, *answer])
        answer.append(right if odd.random() < 0.75 else odd.randrange(VOCAB))
    return prompt, answer, len(answer) + draw(st.integers(0, 3))


@given(answers(), st.integers(1, DEPTH))
def test_replayed_rounds_are_those_of_an_engine(case: tuple[list[int], list[int], int], most: int) -> None:
    prompt, answer, limit = case
    trail = ModelFollower(TableModel(), VOCAB).follow(prompt, answer, limit, GREEDY, None, None)
    rounds = replay([trail], most)
    steps = engine(prompt, answer, limit, most, guess)
    assert rounds.steps == len(steps)
    assert rounds.drafted == sum(drafted for drafted, _ in steps)
    assert sum(rounds.right) == sum(accepted for _, accepted in steps)
    assert rounds.committed == len(answer) - 1
    for position in range(most):
        assert rounds.right[position] == sum(accepted > position for _, accepted in steps)
    reached = 1.0
    total = 1.0
    for chance in rounds.chances():
        reached *= chance
        total += reached
    # an end that was drafted is followed by no token of the target's own
    assert rounds.steps == 0 or total == pytest.approx(1 + sum(rounds.right) / rounds.steps)


@given(answers())
def test_misses_and_runner_ups_are_counted(case: tuple[list[int], list[int], int]) -> None:
    prompt, answer, limit = case
    trail = ModelFollower(TableModel(), VOCAB).follow(prompt, answer, limit, GREEDY, None, None)
    wrong = [at for at in range(1, len(answer)) if guess([*prompt, *answer[:at]]) != answer[at]]
    second = [at for at in wrong if (guess([*prompt, *answer[:at]]) + 1) % VOCAB == answer[at]]
    assert trail.misses == len(wrong)
    assert trail.runners[0] == len(second)
    if wrong:
        assert runner_shares([trail])[0] == len(second) / len(wrong)


def test_the_targets_kv_takes_the_place_of_reading_the_prompt() -> None:
    model = TableModel()
    model.prefill(0, [1, 2, 3], 0)  # what the KV stands for
    ModelFollower(model, VOCAB).follow([1, 2, 3], [4, 5], 2, GREEDY, np.zeros((2, 1, 3, 1)), None)
    assert model.kv_written == 3


class CarryingModel(TableModel):
    """A conditioned draft: what it guesses depends on the feature of the position before, its own features are worse."""

    token_ids = np.arange(VOCAB, dtype=np.int32)

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, float] = {}

    def open_hidden(self, slot: int, stop: int) -> None:
        self.features = {}

    def write_hidden(self, slot: int, start: int, rows: Any) -> None:
        for offset, row in enumerate(rows):
            self.features[start + offset] = float(row[0])

    def decode(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        position = lengths[0]
        self.tokens[position] = tokens[0]
        exact = position - 1 in self.features and self.features[position - 1] == position - 1
        logits = np.zeros(VOCAB, np.float32)
        right = guess(self.tokens[: position + 1])
        logits[right if exact else (right + 1) % VOCAB] = 1.0
        return [logits]


def test_a_conditioned_draft_has_the_targets_states_only_at_the_first_position() -> None:
    prompt, answer = [1, 2], [3]
    for _ in range(9):
        answer.append(guess([*prompt, *answer]))
    hidden = np.arange(20, dtype=np.float32)[:, None]
    trail = ConditionedFollower(CarryingModel(), VOCAB).follow(prompt, answer, 12, GREEDY, None, hidden)
    assert trail.right == "1" * 9  # exact with the target's feature, wrong with its own
    assert trail.misses == 0


def test_text_that_repeats_is_looked_up_and_nothing_else() -> None:
    phrase = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    trail = LookupFollower().follow([*phrase, 1, 2, 3], [4, 11, 12, 13, 14, 15, 16, 17, 18], 9, GREEDY, None, None)
    assert trail.offered[0] == "0"  # 4 was never seen before
    assert max(map(int, trail.right)) >= 3
    assert all(int(right) <= int(offered) for right, offered in zip(trail.right, trail.offered, strict=True))
    assert replay([trail], 4).verifying[0] > 0


def test_runs_end_where_a_guess_is_wrong() -> None:
    assert runs_of([True, True, False, True]) == "2101"
    assert runs_of([True] * (DEPTH + 2)) == "8" * 3 + "7654321"


def test_without_drafts_there_is_no_acceptance() -> None:
    rounds = replay([Trail(limit=5, offered="000", right="000")], 3)
    assert (rounds.acceptance, rounds.per_step, rounds.by_position()) == (None, 1.0, [None] * 3)
    assert rounds.shares() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="1 to 8"):
        replay([], DEPTH + 1)
