"""Requests with policies, and sources that say how likely they find what they push."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm import SamplingParams

from deployments.chain.protocol import Commit, Draft
from deployments.channel.inprocess import InProcessChannel
from tests.engine.conftest import Engine
from tests.fakes import FakeDrafter

LAX = {"name": "nkl", "delta": 0.6, "delta_max": 1.0, "mask": 1.0}
ANY = {"name": "nkl", "delta": 1.0, "delta_max": 1.0, "mask": 1.0}

Top = Callable[[int], dict[int, float]]  # what a fake claims of the position for which it drafts this token


class Claiming(FakeDrafter):
    """A fake that also says how likely it found each of its tokens, and others beside them."""

    def __init__(self, guess: Callable[[list[int], int], list[int]], claims: Top) -> None:
        super().__init__(guess, "claiming")
        self.claims = claims

    def _draft(self, commit: Commit) -> Draft:
        draft = super()._draft(commit)
        tops = [self.claims(token) for token in draft.tokens]
        ids = np.asarray([list(top) for top in tops], "<i4")
        probs = np.asarray([list(top.values()) for top in tops], "<f2")
        return Draft(
            draft.session,
            draft.epoch,
            draft.base,
            draft.tokens,
            draft.reason,
            top_k=ids.shape[1] if tops else 0,
            top_ids=ids.tobytes(),
            top_probs=probs.tobytes(),
        )


def everything(token: int) -> dict[int, float]:
    """Claims that make almost any target look near enough for ``ANY``."""
    return {token: 0.4, (token + 1) % 1000: 0.3}


def pushing(words: list[int]) -> InProcessChannel:
    """A source that proposes the same few tokens over and over."""
    return InProcessChannel(
        Claiming(lambda held, want: [words[(len(held) + i) % len(words)] for i in range(want)], everything)
    )


def request(policy: dict[str, Any] | None, max_tokens: int = 20, **more: Any) -> SamplingParams:
    """One request's parameters. ``chain``: more of its options."""
    chain = {"id": "", **({"policy": policy} if policy else {}), **more.pop("chain", {})}
    return SamplingParams(extra_args={"chain": json.dumps(chain)}, max_tokens=max_tokens, **more)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def ids(engine: Engine, text: str) -> list[int]:
    return list(engine.llm.get_tokenizer().encode(text, add_special_tokens=False))


def take_trace(engine: Engine, chain_id: str) -> dict[str, Any]:
    return engine.llm.collective_rpc("take_trace", args=(chain_id,))[0]
