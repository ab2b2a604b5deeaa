"""The target's distribution over the next token, worked out from its logits apart from the sampler, and tests against it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from vllm import SamplingParams

from tests.engine.conftest import Engine

Path = tuple[int, ...]
EXPECTED = 5.0  # least expected count of a bucket, for chi-square to hold
WORTH = 16.0  # expected count from which on what follows a sequence is told apart


def distribution(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """Probabilities ``[V]`` in float64 by the definitions of penalties, temperature, top-k and top-p, in vLLM's order."""
    values = logits.astype(np.float64)
    seen = np.asarray(sorted({*prompt, *output}))
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        values[seen] = np.where(values[seen] > 0, values[seen] / factor, values[seen] * factor)
    for token, count in Counter(output).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    values = values / params.temperature
    if params.top_k > 0:
        values[values < np.partition(values, -params.top_k)[-params.top_k]] = -np.inf
    chances = np.exp(values - values.max())
    chances /= chances.sum()
    if params.top_p < 1.0:
        order = np.argsort(-chances, kind="stable")
        likelier = np.cumsum(chances[order]) - chances[order]
        chances[order[likelier >= params.top_p]] = 0.0
        chances /= chances.sum()
    return chances


def runner(engine: Engine) -> Any:
    """vLLM's model runner of an engine in this process."""
    worker = engine.llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


class Target:
    """Distributions after any context, from logits that are read in the engine before its sampler touches them."""

    def __init__(self, engine: Engine, prompt: str) -> None:
        self.engine = engine
        self.prompt: list[int] = engine.llm.get_tokenizer().encode(prompt)
        self._logits: dict[Path, np.ndarray] = {}

    def read(self, outputs: list[Path]) -> None:
        """Have the logits after each of these outputs."""
        missing = [path for path in outputs if path not in self._logits]
        if not missing:
            return
        sampler, batch = runner(self.engine).sampler, runner(self.engine).input_batch
        inner = sampler.draw

        def draw(logits: Any, *rest: Any) -> Any:
            for row, length in enumerate(batch.num_tokens_no_spec[: len(batch.req_ids)]):
                context = batch.token_ids_cpu[row, :length].tolist()
                self._logits[tuple(context[len(self.prompt) :])] = logits[row].float().numpy().copy()
            return inner(logits, *rest)

        sampler.draw = draw
        try:
            contexts = [{"prompt_token_ids": self.prompt + list(path)} for path in missing]
            self.engine.llm.generate(contexts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        finally:
            del sampler.draw
        assert all(path in self._logits for path in missing)

    def knows(self, output: Path) -> bool:
        return output in self._logits

    def after(self, output: Path, params: SamplingParams) -> np.ndarray:
        return distribution(self._logits[output], self.prompt, output, params)


class Outcomes:
    """Sequences of up to ``length`` tokens with their exact probabilities, as far as ``count`` samples can tell them apart."""

    def __init__(self, target: Target, params: SamplingParams, length: int, count: int) -> None:
        # by length the sequences that are told apart; no one begins another
        self.chances: dict[int, dict[Path, float]] = {}
        level: list[tuple[Path, float]] = [((), 1.0)]
        ended: dict[Path, float] = {}  # too rare for what follows them to be told apart
        for depth in range(1, length + 1):
            target.read([path for path, _ in level])
            children: dict[Path, float] = {}
            for path, chance in level:
                after = target.after(path, params) * chance
                children |= {
                    (*path, token): float(after[token]) for token in np.flatnonzero(after * count >= EXPECTED).tolist()
                }
            self.chances[depth] = ended | children
            level = [(path, chance) for path, chance in children.items() if chance * count >= WORTH]
            ended |= {path: chance for path, chance in children.items() if chance * count < WORTH}

    def p_value(self, samples: Sequence[Path], length: int) -> float:
        """Of a one-sample chi-square of the first ``length`` tokens. What is too rare is one bucket, or joins the least."""
        kept = {path: p * len(samples) for path, p in self.chances[length].items() if p * len(samples) >= EXPECTED}
        found = Counter(next((s[:n] for n in range(1, length + 1) if s[:n] in kept), None) for s in samples)
        expected = np.asarray(list(kept.values()))
        observed = np.asarray([found[path] for path in kept], np.float64)
        rest, seen = len(samples) - expected.sum(), len(samples) - observed.sum()
        if rest >= EXPECTED:
            expected, observed = np.append(expected, rest), np.append(observed, seen)
        else:
            least = expected.argmin()
            expected[least] += rest
            observed[least] += seen
        if len(expected) < 2:
            return 1.0
        return float(stats.chisquare(observed, expected / expected.sum() * len(samples)).pvalue)


@dataclass(frozen=True)
class Guess:
    """A token that is drafted after a context, and how likely the target finds it there."""

    token: int
    chance: float


def guessed(samples: Sequence[Path], guess: Callable[[Path], Guess | None]) -> tuple[np.ndarray, np.ndarray]:
    """Chances ``[n]`` of what ``guess`` says after each context of the samples from the first token on, and whether it came.

    Given what came before it, each ``came - chance`` has mean 0, so the sum over its standard deviation is standard normal.
    """
    found = []
    for sample in samples:
        for n in range(1, len(sample)):
            said = guess(sample[:n])
            if said is None:
                break
            found.append((said.chance, sample[n] == said.token))
    chances, came = np.asarray(found, np.float64).reshape(-1, 2).T
    return chances, came


def score(chances: np.ndarray, came: np.ndarray) -> np.ndarray:
    """Standard scores ``[...]`` of ``came [..., n]``."""
    result: np.ndarray = (came - chances).sum(axis=-1) / np.sqrt((chances * (1.0 - chances)).sum())
    return result
