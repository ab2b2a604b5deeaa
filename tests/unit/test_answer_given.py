"""What of the answer chain's drafts reaches the target with the final request."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from deployments.chain.answer.candidate import Candidate
from deployments.chain.given import top_of
from deployments.router.answer_chain import Decision
from deployments.router.answering import with_decided
from deployments.router.drafting import Drafts
from deployments.target.options import ChainOptions


@pytest.mark.parametrize(
    ("policy", "temperature", "thought"),
    [
        ({"name": "nkl"}, 0.0, True),
        ({"name": "block", "base": "probabilistic"}, 1.0, True),
        ({"name": "nkl"}, 0.7, False),
        ({"name": "semantic"}, 0.0, False),
        (None, 0.0, False),
    ],
)
def test_what_writers_thought_goes_where_the_policy_compares(
    policy: dict[str, Any] | None, temperature: float, thought: bool
) -> None:
    top = (np.asarray([[5, 6], [7, 8]], np.int32), np.asarray([[0.5, 0.25], [0.75, 0.125]], np.float32))
    written = Candidate(source="model:a#0", text="x y", tokens=(5, 7), top_ids=top[0], top_probs=top[1])
    found = Drafts(candidates=[Candidate(source="given#0", text="no", tokens=(1,)), written])
    decision = Decision(outcome="leaning", given=[1, 0], found=found)
    options = json.dumps({"id": "x", **({"policy": policy} if policy else {})})
    decoded = msgspec.json.decode(with_decided(options, decision, temperature), type=ChainOptions)
    assert decoded.given == [[5, 7], [1]]
    if not thought:
        assert decoded.given_top == []
        return
    first, second = decoded.given_top
    assert second is None
    assert first is not None
    back = top_of(2, first.ids, first.probs)
    assert back is not None
    np.testing.assert_array_equal(back[0], top[0])
    np.testing.assert_array_equal(back[1], top[1])


def test_of_the_requests_own_drafts_only_those_decided_upon_are_given() -> None:
    drafts = [Candidate(source=f"given#{index}", text="x", tokens=(index + 1,)) for index in range(2)]
    decision = Decision(outcome="leaning", given=[1], found=Drafts(candidates=drafts))
    options = json.loads(with_decided('{"id": "x", "texts": ["broken", "sound"]}', decision, 0.0))
    assert options == {"id": "x", "given": [[2]], "predicted": True}
