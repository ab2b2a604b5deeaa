"""Sources along a target's answer: at every point of it, what they would propose and how much of that the answer has."""

from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deployments.chain.protocol import Sampling
from deployments.draft.calibration import RANKS
from deployments.draft.choose import Choice, choose
from deployments.draft.model import StepModel
from hw.onnx.checkpoint import CONDITIONED
from scripts.select_lib.acceptance import DEPTH, Trail, runs_of
from scripts.select_lib.candidates import LOOKUP

_TENANT = "select"  # answers of one run may be drafted from one another, as those of one tenant


class Follower(Protocol):
    """One source."""

    def follow(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        limit: int,
        sampling: Sampling,
        kv: npt.NDArray[Any] | None,
        hidden: npt.NDArray[Any] | None,
    ) -> Trail:
        """Look at each point of an answer of at most ``limit`` tokens. ``kv``: the target's KV of the prompt, as
        :meth:`StepModel.write_kv` takes it; ``hidden``: its last hidden states ``[positions, size]`` of prompt and answer.
        """


class ModelFollower:
    """A draft model that needs no more than the text. One pass: its guess at a point is the same wherever the draft began.

    With ``kv`` it starts from the target's KV of the prompt, as drafts do in a running system, and goes on with its own.
    """

    def __init__(self, model: StepModel, vocab_size: int) -> None:
        self._model = model
        self._chooser = Chooser(min(model.vocab_size, vocab_size))

    def follow(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        limit: int,
        sampling: Sampling,
        kv: npt.NDArray[Any] | None,
        hidden: npt.NDArray[Any] | None,
    ) -> Trail:
        length = len(prompt)
        if kv is None:
            self._model.prefill(0, list(prompt), 0)
        else:
            self._model.write_kv(0, 0, kv)
        matches, score = list[bool](), Score()
        for at in range(1, len(answer)):
            logits = self._model.decode([0], [answer[at - 1]], [length + at - 1])[0]
            matches.append(score(self._chooser(logits, sampling, length + at), answer[at]))
        return score.trail(limit, runs_of(matches))


class ConditionedFollower:
    """A draft that takes the target's last hidden states: beyond the first token it goes on with features of its own.

    So it is drafted from every point of the answer, as after a commit there.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._ids = model.token_ids
        self._chooser = Chooser(len(self._ids))

    def follow(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        limit: int,
        sampling: Sampling,
        kv: npt.NDArray[Any] | None,
        hidden: npt.NDArray[Any] | None,
    ) -> Trail:
        assert hidden is not None, "a conditioned draft needs the target's hidden states"
        tokens, length = [*prompt, *answer], len(prompt)
        self._model.open_hidden(0, 0)
        self._model.write_hidden(0, 0, hidden[: length - 1])
        self._model.prefill(0, tokens[:length], 0)
        runs, score = "", Score()
        for at in range(1, len(answer)):
            # committed: `at` tokens of the answer; the target's states reach up to the one before the last
            last = length + at - 1
            self._model.write_hidden(0, last - 1, hidden[last - 1 : last])
            run = 0
            while run < min(DEPTH, len(answer) - at):
                logits = self._model.decode([0], [tokens[last + run]], [last + run])[0]
                choice = self._chooser(logits, sampling, last + run + 1, self._ids)
                right = choice.token == answer[at + run]
                if run == 0:
                    score(choice, answer[at])
                if not right:
                    break
                run += 1
            runs += str(run)
        return score.trail(limit, runs)


class LookupFollower:
    """The source that the target itself asks: text that repeats earlier text, of the request and of those before it."""

    def __init__(self) -> None:
        from deployments.target.sources import make_sources

        self._source = make_sources([LOOKUP])[0]
        self._numbers = count()
        self._sampling: Sampling | None = None

    def follow(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        limit: int,
        sampling: Sampling,
        kv: npt.NDArray[Any] | None,
        hidden: npt.NDArray[Any] | None,
    ) -> Trail:
        request = str(next(self._numbers))
        tenant = f"{_TENANT}-{sampling.temperature:g}"  # greedy answers and sampled ones to the same prompts stay apart
        self._source.begin(request, tenant, prompt)
        offered, right = "", ""
        for at in range(1, len(answer)):
            self._source.extend(request, [answer[at - 1]])
            proposal = self._source.propose(request, min(DEPTH, max(limit - at - 1, 1)))
            tokens = proposal.tokens[:DEPTH] if proposal is not None else []
            run = 0
            while run < len(tokens) and at + run < len(answer) and tokens[run] == answer[at + run]:
                run += 1
            offered, right = offered + str(len(tokens)), right + str(run)
        if answer:
            self._source.extend(request, [answer[-1]])
        self._source.finish(request)
        return Trail(limit=limit, offered=offered, right=right)


class Chooser:
    """Chooses as a draft does, from the first ``size`` logits; ``ids`` says which tokens they are of, if not the first ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scratch = np.empty(size, np.float32)

    def __call__(
        self,
        logits: npt.NDArray[np.float32],
        sampling: Sampling,
        position: int,
        ids: npt.NDArray[np.int32] | None = None,
    ) -> Choice:
        if ids is not None:
            return choose(logits[: self._size], sampling, position, 0, self._scratch, ids)
        return choose(logits[: self._size], sampling, position, 0, self._scratch)


class Score:
    """Where the target's token was when a guess was wrong."""

    def __init__(self) -> None:
        self._misses = 0
        self._runners = [0] * RANKS

    def __call__(self, choice: Choice, token: int) -> bool:
        """Whether the guess was right."""
        if choice.token == token:
            return True
        self._misses += 1
        if token in choice.runners:
            self._runners[choice.runners.index(token)] += 1
        return False

    def trail(self, limit: int, runs: str) -> Trail:
        """Of a source that always proposes as many as it is asked for."""
        return Trail(
            limit=limit, offered=str(DEPTH) * len(runs), right=runs, misses=self._misses, runners=tuple(self._runners)
        )


def follower(kind: str, model: Any, vocab_size: int) -> Follower:
    """What follows answers with a candidate of this kind; ``model`` None for the one without weights."""
    if kind == LOOKUP:
        return LookupFollower()
    return ConditionedFollower(model, vocab_size) if kind == CONDITIONED else ModelFollower(model, vocab_size)
