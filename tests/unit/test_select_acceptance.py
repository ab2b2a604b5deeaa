"""Acceptance from trails: replayed rounds are those of an engine that drafts and verifies token by token."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.chain.protocol import Sampling
from hw.onnx.conditioned import ConditionedModel
from scripts.select_lib.acceptance import DEPTH, Trail, replay, runner_shares, runs_of, share_error
from scripts.select_lib.followers import ConditionedFollower, LookupFollower, ModelFollower
from tests.conditioned import Random, Sizes

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


def carried(draft: Random, text: list[int], hidden: Any, count: int) -> list[int]:
    """``count`` greedy tokens of a conditioned draft after ``text``, with the target's states of all positions but the last."""
    known = np.concatenate([np.zeros((1, hidden.shape[1]), np.float32), hidden[: len(text) - 1].astype(np.float32)])
    found: list[int] = []
    for _ in range(count):
        logits, own = draft.forward([*text, *found], known)
        found.append(int(draft.head_ids[logits.argmax()]))
        known = np.concatenate([known, own[-1:]])
    return found


def test_a_conditioned_draft_goes_on_with_features_of_its_own_from_every_point(tmp_path: Path) -> None:
    draft, odd = Random(Sizes()), random.Random(3)
    model = ConditionedModel(draft.write(tmp_path / "draft"), slots=1, context=48, warm_up=False)
    hidden = np.random.default_rng(4).normal(size=(40, Sizes.hidden)).astype(np.float16)
    prompt, answer = [5, 6, 7, 8], [9]
    while len(answer) < 24:  # mostly what the draft says, so that it gets beyond its first token
        following = carried(draft, [*prompt, *answer], hidden, 3)
        answer += following if odd.random() < 0.7 else [odd.randrange(Sizes.vocab)]
    trail = ConditionedFollower(model, Sizes.vocab).follow(prompt, answer, 40, GREEDY, None, hidden)
    for at in range(1, len(answer)):
        drafted = carried(draft, [*prompt, *answer[:at]], hidden, min(DEPTH, len(answer) - at))
        run = 0
        while run < len(drafted) and drafted[run] == answer[at + run]:
            run += 1
        assert int(trail.right[at - 1]) == run, at
    assert max(map(int, trail.right)) >= 3
    assert "0" in trail.right
    assert trail.misses == trail.right.count("0")


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


def test_the_error_of_a_share_is_that_of_answers_drawn_again() -> None:
    dice = np.random.default_rng(5)

    def drawn() -> list[tuple[float, float]]:
        tries = dice.integers(20, 60, 40)
        return [(float(dice.binomial(n, p)), float(n)) for n, p in zip(tries, dice.uniform(0.4, 0.9, 40), strict=True)]

    shares = [sum(hits for hits, _ in pairs) / sum(n for _, n in pairs) for pairs in (drawn() for _ in range(800))]
    assert np.mean([share_error(drawn()) for _ in range(50)]) == pytest.approx(np.std(shares), rel=0.1)
    assert share_error([(1, 2)]) == 1.0
    assert share_error([]) == 1.0
