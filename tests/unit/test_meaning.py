"""Semantic acceptance in a step, with a made-up sentence model: order, budget, guard, ranks, and what all rules ask for."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deployments.chain.acceptance.candidates import Lossy
from deployments.chain.acceptance.lossless import NO_DRAFT
from deployments.chain.acceptance.policy import Policy
from deployments.chain.acceptance.semantic import Text
from deployments.target.meaning import Meaning, TargetText
from deployments.target.policy_rules import Relaxation

WORDS = [
    *(
        " we",
        " like",
        " big",
        " large",
        " huge",
        " house",
        " garden",
        " encrypt",
        " decrypt",
        " not",
        " Paris",
        " London",
    ),
    *("```", "\n", " and", "<end>"),
]
IDS = {word: number for number, word in enumerate(WORDS)}
END = IDS["<end>"]
SEMANTIC = Policy(name="semantic")


def text() -> TargetText:
    return TargetText(lambda ids: "".join(WORDS[token] for token in ids), {IDS["```"]: 1})


def ids(words: str) -> list[int]:
    return [IDS[word] for word in (f" {part}" if part[0].isalpha() else part for part in words.split(" "))]


class Close:
    """Finds two texts as close as it was told, and remembers what it was asked. ``fits``: pairs it has time for."""

    def __init__(self, cosine: float = 0.9, fits: int = 100) -> None:
        self.cosine, self.fits = cosine, fits
        self.asked: list[tuple[Text, Text]] = []
        self.budgets: list[float] = []

    def compare(self, pairs: Sequence[tuple[Text, Text]], budget_s: float) -> list[float]:
        self.budgets.append(budget_s)
        result = []
        for pair in pairs:
            self.asked.append(pair)
            self.fits -= 1
            result.append(self.cosine if self.fits >= 0 else math.nan)
        return result

    def words(self) -> list[tuple[str, str]]:
        return [(one[1], other[1]) for one, other in self.asked]


def lossy(policy: Policy = SEMANTIC, committed: str = "we like", generated: int = 2, **more: Any) -> Lossy:
    return Lossy(policy, 0, generated, frozenset({END}), committed=np.asarray(ids(committed), np.int32), **more)


def judge(
    meaning: Meaning,
    drafts: list[str],
    own: list[str],
    requests: list[Lossy | None] | None = None,
    allowed: bool = True,
) -> list[list[int]]:
    """Offsets that pass, of each request."""
    rows = [ids(words) for words in drafts]
    width = max(map(len, rows))
    padded = np.asarray([row + [NO_DRAFT] * (width - len(row)) for row in rows])
    drawn = [ids(words) for words in own]
    drawn_padded = np.asarray([row + row[-1:] * (width + 1 - len(row)) for row in drawn])

    def may_pass(request: npt.NDArray[np.int64], offset: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.full(len(request), allowed)

    passed = meaning.passing(requests or [lossy() for _ in rows], padded, drawn_padded, may_pass)
    return [np.flatnonzero(row).tolist() for row in passed]


def meaning_of(model: Close | None, budget_s: float = 1.0, **more: Any) -> tuple[Meaning, Counter[str]]:
    counters: Counter[str] = Counter()
    return Meaning(model, text(), budget_s, counters, **more), counters


def test_a_mismatch_that_means_the_same_passes_and_the_next_is_looked_at() -> None:
    model = Close()
    meaning, counters = meaning_of(model)
    assert judge(meaning, ["big house and big"], ["large garden and huge not"]) == [[0, 1, 3]]
    assert model.words() == [("big", "large"), ("house", "garden"), ("big", "huge")]
    assert model.asked[1][0][0] == " we like big "  # behind what passed, not behind what the target drew
    assert counters == {"semantic_compared": 3, "semantic_passed": 3}


def test_nothing_behind_one_that_does_not_pass_is_looked_at() -> None:
    model = Close(0.7)
    meaning, counters = meaning_of(model)
    assert judge(meaning, ["big house"], ["large garden not"]) == [[]]
    assert len(model.asked) == 1
    assert counters == {"semantic_compared": 1}


def test_each_request_has_its_own_threshold() -> None:
    meaning, _ = meaning_of(Close(0.8))
    requests = [lossy(), lossy(Policy(name="semantic", similarity=0.85)), None, lossy(Policy(name="nkl"))]
    assert judge(meaning, ["big and"] * 4, ["large and not"] * 4, requests) == [[0], [], [], []]


def test_the_guard_comes_first() -> None:
    model = Close(1.0)
    meaning, counters = meaning_of(model)
    drafts = ["encrypt and", "Paris and", "big house and", "big and"]
    own = ["decrypt and not", "London and not", "not house and we", "large and not"]
    assert judge(meaning, drafts, own) == [[], [], [], [0]]
    assert model.words() == [("big", "large")]
    assert counters == {"semantic_guarded": 3, "semantic_compared": 1, "semantic_passed": 1}


@pytest.mark.parametrize(("written", "passes"), [("``` \n we", []), ("``` \n we ``` \n we", [[0]]), ("\n we", [[0]])])
def test_inside_a_block_of_code_nothing_passes(written: str, passes: list[list[int]]) -> None:
    meaning, counters = meaning_of(Close())
    request = lossy(committed=f"``` {written}", generated=len(ids(written)))  # a fence of the prompt does not count
    assert judge(meaning, ["big and"], ["large and not"], [request]) == (passes or [[]])
    assert counters["semantic_guarded"] == (not passes)


def test_a_block_of_code_may_begin_in_the_draft() -> None:
    meaning, _ = meaning_of(Close())
    assert judge(meaning, ["``` \n big and"], ["``` \n large and not"]) == [[]]


def test_what_the_target_excludes_or_is_certain_of_is_not_asked() -> None:
    model = Close()
    meaning, _ = meaning_of(model)
    assert judge(meaning, ["big and"], ["large and not"], allowed=False) == [[]]
    assert not model.asked


@pytest.mark.parametrize(("draft", "own"), [("<end> and", "large and not"), ("big and", "<end> and not")])
def test_how_long_an_answer_is_stays_the_targets_decision(draft: str, own: str) -> None:
    model = Close()
    meaning, _ = meaning_of(model)
    IDS[" <end>"] = END
    assert judge(meaning, [draft], [own]) == [[]]
    assert not model.asked


class TestBudget:
    def test_none_is_none(self) -> None:
        model = Close()
        meaning, counters = meaning_of(model, 0.0)
        assert judge(meaning, ["big and"], ["large and not"]) == [[]]
        assert not model.asked
        assert not counters

    def test_what_is_late_does_not_pass_and_is_counted(self) -> None:
        meaning, counters = meaning_of(Close(fits=1))
        passed = judge(meaning, ["big and"] * 3, ["large and not"] * 3)
        assert sum(map(len, passed)) == 1
        assert counters == {"semantic_compared": 1, "semantic_passed": 1, "semantic_late": 2}

    def test_it_is_one_for_all_of_a_step(self) -> None:
        now = iter(range(100))
        model = Close()
        meaning, _ = meaning_of(model, 10.0, clock=lambda: float(next(now)))
        judge(meaning, ["big house and big"], ["large garden and huge not"])
        assert model.budgets == [9.0, 8.0, 7.0]  # a second passes with each look at the clock

    def test_requests_take_turns_in_coming_first(self) -> None:
        meaning, _ = meaning_of(None)
        first = []
        for _ in range(3):
            meaning._model = model = Close(fits=1)
            passed = judge(meaning, ["big and"] * 3, ["large and not"] * 3)
            first.append(passed.index([0]))
            assert len(model.asked) == 3
        assert sorted(first) == [0, 1, 2]


def test_a_model_that_fails_passes_nothing() -> None:
    class Broken(Close):
        def compare(self, pairs: Sequence[tuple[Text, Text]], budget_s: float) -> list[float]:
            raise RuntimeError("no memory")

    meaning, counters = meaning_of(Broken())
    assert judge(meaning, ["big and", "big and"], ["large and not"] * 2) == [[], []]
    assert counters == {"semantic_failed": 2}


def test_other_ranks_follow_the_first() -> None:
    """The first is late for all but one; the others, which have no model, pass the same."""
    sent: list[list[bool]] = []

    def send(found: list[bool] | None) -> list[bool]:
        assert found is not None
        sent.append(found)
        return found

    received = iter(sent)

    def receive(found: list[bool] | None) -> list[bool]:
        assert found is None
        return next(received)

    first, _ = meaning_of(Close(fits=3), share=send)
    other, counters = meaning_of(None, share=receive)
    drafts, own = ["big house and big"] * 3, ["large garden and huge not"] * 3
    passed = judge(first, drafts, own)
    assert passed == judge(other, drafts, own)
    assert sum(map(len, passed)) == 3
    assert not counters
    assert next(received, None) is None  # asked as often as there were verdicts


def test_the_target_without_a_model_passes_nothing() -> None:
    meaning, _ = meaning_of(None)
    assert judge(meaning, ["big and"], ["large and not"]) == [[]]


def test_in_the_sampler_certainty_and_limits_hold() -> None:
    """Through logits: a token without a finite one never passes, nor does anything where the target is certain."""
    meaning, _ = meaning_of(Close())
    drafted, drawn = np.asarray([ids("big and")] * 3), torch.tensor([ids("large and not")] * 3).flatten()
    logits = torch.zeros(9, len(WORDS))
    logits[3, IDS[" big"]] = -math.inf
    logits[6, IDS[" large"]] = 9.0
    relaxation = Relaxation([lossy()] * 3, drafted, np.arange(9).reshape(3, 3), meaning)
    got = relaxation.after(drawn, logits).reshape(3, 3)[:, 0].tolist()
    assert got == [IDS[" big"], IDS[" large"], IDS[" large"]]
    truncated = Relaxation([lossy()] * 3, drafted, np.arange(9).reshape(3, 3), meaning)
    truncated.before(logits)
    excluded = torch.full_like(logits, -math.inf)
    assert truncated.after(drawn, excluded).tolist() == drawn.tolist()


def test_fences_are_found_in_a_vocabulary() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "```": 1, "```python": 2, "``````": 3}, unk_token="a"))
    found = TargetText.of(tokenizer)
    assert found.fences == {1: 1, 2: 1, 3: 2}
    assert found.in_code([0, 2, 0])
    assert not found.in_code([0, 2, 1])
    assert not found.in_code([3])
    assert not found.in_code([])
