"""A whole candidate answer, and the question it answers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one source would answer. Tokens are those of the target's vocabulary."""

    source: str  # "model:NAME#0" (sample 0 of draft NAME), "retrieval", "rules", "templates", "given"
    text: str
    tokens: tuple[int, ...] = ()  # () until someone tokenised the text
    top_ids: npt.NDArray[np.int32] | None = None  # [len(tokens), k] most likely tokens at each position
    top_probs: npt.NDArray[np.float32] | None = (
        None  # [len(tokens), k], temperature 1; what is missing to 1 is tail mass
    )
    ends: tuple[int, ...] = ()  # [len(tokens)] characters of the text up to the end of each token; () unknown
    finished: bool = True  # the answer ends here; False: the source was cut at its length limit
    note: str = ""  # what it rests on, for the trace: "rule refund-period", "doc faq.md#3 similarity 0.83"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the sources are asked."""

    text: str  # the last user message
    messages: tuple[tuple[str, str], ...]  # (role, text) of the whole conversation
    tenant: str  # "" shares nothing across requests
    length: int  # most tokens of a draft
