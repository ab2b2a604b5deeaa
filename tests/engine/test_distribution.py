"""With drafts, at any temperature, tokens come exactly as often as the target's own distribution says.

Every sample has another seed, half of the drafts are likely tokens and half unlikely ones, and what comes is compared
with probabilities worked out from the target's logits (:mod:`tests.engine.exact`), not with another run. Thresholds: a false
alarm has a chance below 1e-6 a test. ``test_a_defect_would_be_seen`` builds the defect that matters into the engine.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from vllm import SamplingParams

from deployments.channel.inprocess import InProcessChannel
from deployments.target import acceptance
from tests.engine.conftest import Engine
from tests.engine.exact import Guess, Outcomes, Path, Target, guessed, score
from tests.fakes import FakeDrafter

pytestmark = pytest.mark.engine

PROMPT = "My favourite animal is the"
ROWS = 32  # of a batch
SAMPLES = 18 * ROWS  # of each kind
LENGTH = 3  # tokens whose joint distribution is tested; one more is generated, so that two are drafted at once
FALSE_ALARM = 1e-6
UNLIKELY = 0.04  # defects show most where tokens are rare
SURE = 0.9  # beyond it there are none
KINDS: dict[str, dict[str, Any]] = {
    "0.1": {"temperature": 0.1},
    "0.5 top_p": {"temperature": 0.5, "top_p": 0.9},
    "1.0": {"temperature": 1.0},
    "1.0 penalties": {"temperature": 1.0, "top_k": 6, "repetition_penalty": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    "1.5 top_k top_p": {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
}  # fmt: skip


class Guesses:
    """What is drafted after a context: now the likeliest token, now one of about 4 %, where the target is known."""

    def __init__(self, target: Target, params: SamplingParams, unlikely: bool = False) -> None:
        self._target, self._params = target, params
        self._unlikely = unlikely  # only those of about 4 %
        self._known: dict[Path, Guess | None] = {}

    def __call__(self, output: Path) -> Guess | None:
        if output not in self._known:
            self._known[output] = self._choose(output)
        return self._known[output]

    def _choose(self, output: Path) -> Guess | None:
        if not output or not self._target.knows(output):
            return None
        chances = self._target.after(output, self._params)
        likely = int(np.argmax(chances))
        if chances[likely] < SURE and (self._unlikely or sum(output) % 3):
            likely = int(np.argmin(abs(chances - UNLIKELY)))
        return Guess(likely, float(chances[likely]))

    def draft(self, held: list[int], want: int) -> list[int]:
        """For a fake draft: as many tokens as it knows."""
        path = tuple(held[len(self._target.prompt) :])
        drafted: list[int] = []
        while len(drafted) < want and (said := self((*path, *drafted))) is not None:
            drafted.append(said.token)
        return drafted


def params_of(kind: str, seed: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH + 1, ignore_eos=True, seed=seed, **KINDS[kind])


class Sampled:
    """What an engine with drafts said to one prompt under one kind of sampling, under ``SAMPLES`` seeds."""

    def __init__(self, engine: Engine, target: Target, kind: str, unlikely: bool = False) -> None:
        self.target, self.kind, self.params = target, kind, params_of(kind)
        self.outcomes = Outcomes(target, self.params, LENGTH, SAMPLES)
        self.guesses = Guesses(target, self.params, unlikely)
        self.seeds = [1000 * (1 + list(KINDS).index(kind)) + index for index in range(SAMPLES)]
        self.paths = self.draw(engine, self.seeds)
        self.stats = engine.stats()

    def draw(self, engine: Engine, seeds: list[int]) -> list[Path]:
        engine.drafts(a=InProcessChannel(FakeDrafter(self.guesses.draft)))
        outputs = engine.generate([PROMPT] * len(seeds), [params_of(self.kind, seed) for seed in seeds])
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def guessed(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every guess its chance, and whether it came: ``[n]`` each."""
        return guessed([path[:LENGTH] for path in self.paths], self.guesses)


@pytest.fixture(scope="module")
def target(engine: Engine) -> Target:
    engine.drafts()
    return Target(engine, PROMPT)


@pytest.fixture(scope="module")
def sampled(engine: Engine, target: Target) -> Callable[[str], Sampled]:
    known: dict[str, Sampled] = {}

    def of(kind: str) -> Sampled:
        if kind not in known:
            known[kind] = Sampled(engine, target, kind)
        return known[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_come_as_often_as_the_target_says(sampled: Callable[[str], Sampled], kind: str) -> None:
    """First tokens, pairs and triples; and those of every fourth row of the batches apart."""
    found = sampled(kind)
    assert 0 < found.stats["accepted_tokens"] < found.stats["drafted_tokens"]
    told_apart = {length: len(chances) for length, chances in found.outcomes.chances.items()}
    for length in range(1, LENGTH + 1):
        p = found.outcomes.p_value(found.paths, length)
        assert p > FALSE_ALARM, f"{length} tokens: p={p:.2g}, {told_apart}"
    for row in range(4):
        for length in (1, 2):
            p = found.outcomes.p_value(found.paths[row::4], length)
            assert p > FALSE_ALARM, f"rows {row} mod 4, {length} tokens: p={p:.2g}"
    assert kind == "0.1" or min(told_apart.values()) > 4, told_apart


def test_drafts_come_as_often_as_the_target_says(sampled: Callable[[str], Sampled]) -> None:
    """Over all kinds: a draft's token is neither more nor less frequent for having been drafted."""
    chances, came = np.concatenate([sampled(kind).guessed() for kind in KINDS], axis=1)
    assert len(chances) > 3 * SAMPLES
    assert 2 * stats.norm.sf(abs(score(chances, came))) > FALSE_ALARM, f"{(came - chances).sum():.1f} of {len(came)}"


@pytest.mark.parametrize("kind", ["1.0", "1.0 penalties"])
def test_batches_of_every_size_draw_the_same(engine: Engine, sampled: Callable[[str], Sampled], kind: str) -> None:
    """A sample is a function of its seed: what holds for batches of 32 holds for 1 to 8, row for row."""
    found = sampled(kind)
    start = 0
    for batch in range(1, 9):
        assert found.draw(engine, found.seeds[start : start + batch]) == found.paths[start : start + batch]
        start += batch


@pytest.mark.parametrize("kind", ["1.0", "1.5 top_k top_p"])
def test_rows_with_the_same_prompt_are_independent(sampled: Callable[[str], Sampled], kind: str) -> None:
    """Neighbours in a batch have neighbouring seeds, the same prompt and the same positions."""
    found = sampled(kind)
    for length in (1, 2):
        chances = found.outcomes.chances[length]
        frequent = sorted(chances, key=lambda path: -chances[path])[:5]
        label = {path: index for index, path in enumerate(frequent)}
        labels = np.asarray([label.get(path[:length], 5) for path in found.paths])
        table = np.zeros((6, 6))
        np.add.at(table, (labels[0::2], labels[1::2]), 1)
        table = table[table.sum(1) > 0][:, table.sum(0) > 0]
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_a_defect_would_be_seen(engine: Engine, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every twentieth draft token that the target did not draw is accepted all the same."""
    chance = np.random.default_rng(7)
    inner = acceptance.verify

    def too_often(drafts: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        wrong = torch.from_numpy(chance.random(tuple(drafts.shape)) < 0.05) & (drafts >= 0)
        return inner(drafts, torch.cat([torch.where(wrong, drafts, drawn[:, :-1]), drawn[:, -1:]], dim=1))

    monkeypatch.setattr(acceptance, "verify", too_often)
    chances, came = Sampled(engine, target, "1.0", unlikely=True).guessed()
    assert score(chances, came) > 0
    assert 2 * stats.norm.sf(score(chances, came)) < FALSE_ALARM


def test_the_tests_have_power(sampled: Callable[[str], Sampled]) -> None:
    """The same defect, drawn a thousand times for the guesses of the samples without an engine, is seen in 99 % of them."""
    chances = np.concatenate([sampled(kind).guessed()[0] for kind in KINDS])
    rng = np.random.default_rng(3)
    came = rng.random((1000, len(chances))) < chances + 0.05 * (1 - chances)
    assert (2 * stats.norm.sf(abs(score(chances, came))) < FALSE_ALARM).mean() > 0.99
