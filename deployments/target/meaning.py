"""Semantic acceptance in an engine's step: which mismatches mean the same, within one time budget for all requests.

Only a prefix of a draft is ever accepted, so a request's next mismatch is looked at once those before it have passed. All
requests' next ones are compared together; a request that comes first in one step comes last in another.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from vllm.distributed.parallel_state import get_tp_group

from deployments.chain.acceptance.candidates import Lossy
from deployments.chain.acceptance.continuations import BEFORE, Decode, Phrase, continuations
from deployments.chain.acceptance.guard import CODE
from deployments.chain.acceptance.lossless import NO_DRAFT
from deployments.chain.acceptance.semantic import Similarity, different
from deployments.target.settings import ChainSettings
from hw.onnx.sentences import SentenceModel

logger = logging.getLogger(__name__)

Bools = npt.NDArray[np.bool_]
Places = list[tuple[int, int]]  # request and offset into its draft
MayPass = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Bools]  # of requests [N] and offsets [N]: [N]
FENCE = "```"


@dataclass(frozen=True, slots=True)
class TargetText:
    """What the target's token ids say."""

    decode: Decode
    fences: dict[int, int]  # of tokens with fences of code in them: how many

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TargetText":
        """Special tokens are no text."""
        found = {token: piece.count(FENCE) for piece, token in tokenizer.get_vocab().items() if FENCE in piece}
        return cls(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True), found)

    def in_code(self, written: Sequence[int] | npt.NDArray[np.integer]) -> bool:
        """Whether a block of code is open behind these tokens of an answer."""
        if not self.fences:
            return False
        tokens = np.asarray(written, np.int64)
        found = tokens[np.isin(tokens, list(self.fences))]
        return sum(self.fences[token] for token in found.tolist()) % 2 == 1


class Meaning:
    """Judges the mismatches of requests with the policy ``semantic``."""

    def __init__(
        self,
        model: Similarity | None,  # None: another rank has it
        text: TargetText,
        budget_s: float,
        counters: Counter[str],
        share: Callable[[list[bool] | None], list[bool]]
        | None = None,  # hands rank 0's verdicts to all; None: one rank
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.budget_s = budget_s
        self._model = model
        self._text = text
        self._counters = counters
        self._share = share
        self._clock = clock
        self._first = 0
        self._complained = False

    def passing(
        self,
        requests: Sequence[Lossy | None],
        drafts: npt.NDArray[np.int64],  # [B, T] padded with NO_DRAFT
        own: npt.NDArray[np.int64],  # [B, T + 1] what the target drew
        may_pass: MayPass,  # possible for the target, which is not certain of its own token either
    ) -> Bools:
        """Mismatches ``[B, T]`` that pass. The same on all ranks, if all call it with the same arguments."""
        passed = np.zeros(drafts.shape, np.bool_)
        asking = [index for index, request in enumerate(requests) if request is not None and request.by_meaning]
        if not asking or self.budget_s <= 0:
            return passed
        until = self._clock() + self.budget_s
        self._first += 1
        turn = self._first % len(asking)
        start = dict.fromkeys(asking[turn:] + asking[:turn], 0)
        while start:
            places = [
                (index, offset)
                for index, begin in start.items()
                if (offset := _next(drafts[index], own[index], begin, requests[index])) is not None
            ]
            if not places:
                break
            which = may_pass(*np.asarray(places, np.int64).T)
            places = [place for place, possible in zip(places, which.tolist(), strict=True) if possible]
            verdicts = self._verdicts(places, requests, drafts, own, until)
            start = {}
            for (index, offset), passes in zip(places, verdicts, strict=True):
                if passes:
                    passed[index, offset] = True
                    start[index] = offset + 1
        return passed

    def _verdicts(
        self,
        places: Places,
        requests: Sequence[Lossy | None],
        drafts: npt.NDArray[np.int64],
        own: npt.NDArray[np.int64],
        until: float,
    ) -> list[bool]:
        if not places:
            return []
        found: list[bool] | None = None
        if self._model is not None:
            try:
                found = self._judge(self._model, places, requests, drafts, own, until)
            except Exception:
                # a policy may not fail an answer: without a verdict the target's own tokens stand
                if not self._complained:
                    logger.exception("semantic acceptance failed; mismatches do not pass")
                self._complained = True
                self._counters["semantic_failed"] += len(places)
                found = [False] * len(places)
        if self._share is not None:
            return self._share(found)
        return [False] * len(places) if found is None else found

    def _judge(
        self,
        model: Similarity,
        places: Places,
        requests: Sequence[Lossy | None],
        drafts: npt.NDArray[np.int64],
        own: npt.NDArray[np.int64],
        until: float,
    ) -> list[bool]:
        verdicts = [False] * len(places)
        pairs: list[tuple[Phrase, Phrase]] = []
        asked: list[tuple[int, float]] = []  # index into places, least cosine
        for number, (index, offset) in enumerate(places):
            request = requests[index]
            assert request is not None
            pair = self._pair(request, drafts[index], own[index], offset)
            if pair is None:
                continue
            if self._objection(request, drafts[index], offset, pair):
                self._counters["semantic_guarded"] += 1
                continue
            pairs.append(pair)
            asked.append((number, request.policy.similarity))
        cosines = model.compare(pairs, until - self._clock()) if pairs else []
        for (number, least), cosine in zip(asked, cosines, strict=True):
            self._counters["semantic_late" if math.isnan(cosine) else "semantic_compared"] += 1
            if cosine >= least:  # false for NaN
                verdicts[number] = True
                self._counters["semantic_passed"] += 1
        return verdicts

    def _pair(
        self, request: Lossy, drafted: npt.NDArray[np.int64], own: npt.NDArray[np.int64], offset: int
    ) -> tuple[Phrase, Phrase] | None:
        draft = drafted[drafted != NO_DRAFT].tolist()
        behind = int(own[len(draft)])
        return continuations(
            self._text.decode,
            request.committed[-BEFORE - 1 :].tolist(),
            draft,
            offset,
            int(own[offset]),
            None if behind in request.stops else behind,
        )

    def _objection(
        self, request: Lossy, drafted: npt.NDArray[np.int64], offset: int, pair: tuple[Phrase, Phrase]
    ) -> str:
        found = different(*pair)
        written = request.committed[len(request.committed) - request.generated :]
        if not found and self._text.in_code(np.concatenate([written, drafted[:offset]])):
            return CODE
        return found


def _next(drafted: npt.NDArray[np.int64], own: npt.NDArray[np.int64], begin: int, request: Lossy | None) -> int | None:
    """The first mismatch from ``begin`` on; None where there is none, or where it ends the answer."""
    assert request is not None
    for offset in range(begin, len(drafted)):
        token, theirs = int(drafted[offset]), int(own[offset])
        if token == theirs:
            continue
        if token == NO_DRAFT or token in request.stops or theirs in request.stops:
            return None
        return offset
    return None


def load_meaning(settings: ChainSettings, tokenizer: str, counters: Counter[str]) -> Meaning | None:
    """As configured, for the target with its ``tokenizer.json`` in the folder ``tokenizer``; None: not configured.

    Rank 0 has the model and decides for all: what is known in time differs from rank to rank.

    Raises FileNotFoundError or :class:`hw.onnx.checkpoint.CheckpointError`.
    """
    if not settings.semantic_model:
        return None
    group = get_tp_group()
    model = SentenceModel(Path(settings.semantic_model)) if group.rank_in_group == 0 else None
    share = partial(group.broadcast_object, src=0) if group.world_size > 1 else None
    text = TargetText.of(Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json")))
    return Meaning(model, text, settings.semantic_budget_ms / 1e3, counters, share)
