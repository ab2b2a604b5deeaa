"""The draft engine over the real INT4 draft, against a plain loop over the same model."""

import numpy as np
import pytest

from deployments.chain.faults import FaultPolicy
from deployments.chain.noise import log_exponential
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Draft, Sampling, Step
from deployments.draft.choose import choose
from deployments.draft.engine import DraftEngine
from hw.onnx.costs import StepCosts
from hw.onnx.session import OnnxModel
from tests.engine.test_onnx_session import greedy, prompts  # noqa: F401  (a fixture)
from tests.models import model as folder

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model() -> OnnxModel:
    return OnnxModel(folder("draft-int4"), slots=4, context=512)


@pytest.fixture
def drafter(model: OnnxModel) -> DraftEngine:
    # Reading in one call and token by token round INT4 differently: make the engine read prompts in one, as the reference.
    model.costs = StepCosts(0.05, 0.01, 0.001, 0.0001)
    return DraftEngine(model, top_k=4, paced=False, prefill_wait_s=60.0, faults=FaultPolicy(prefill_budget_s=60.0))


def step(drafter: DraftEngine, *commits: Commit, deadline_s: float = 60.0) -> list[Draft]:
    answer = drafter.step(Step(PROTOCOL_VERSION, "t", 1, deadline_s, list(commits), []))
    drafter.check_integrity()
    return answer.drafts


def opening(name: str, tokens: list[int], want: int, sampling: Sampling | None = None) -> Commit:
    return Commit(name, 0, len(tokens), tokens, want, sampling)


def test_batched_drafts_are_the_models_own_greedy_tokens(
    drafter: DraftEngine,
    model: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    expected = [greedy(model, 0, prompt, 8) for prompt in prompts]
    drafts = step(drafter, *[opening(str(index), prompt, 8) for index, prompt in enumerate(prompts)])
    assert [draft.tokens for draft in drafts] == expected
    for draft in drafts:
        ids, probs = draft.top()
        assert ids[:, 0].tolist() == draft.tokens
        assert (probs[:, 0] > 0).all()


def test_rejections_and_idle_time_do_not_change_drafts(
    drafter: DraftEngine,
    model: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    """Commits that accept 0…4 tokens and then go elsewhere; a resting neighbour; idle steps in between."""
    tokens = {str(index): list(prompt) for index, prompt in enumerate(prompts[:3])}
    drafts = step(drafter, *[opening(name, known, 4) for name, known in tokens.items()])
    agreed = total = 0
    for turn in range(6):
        commits = []
        for name, draft in zip(tokens, drafts, strict=True):
            new = [*draft.tokens[: (turn + int(name)) % 5], 260 + turn]
            tokens[name] += new
            commits.append(Commit(name, 0, len(tokens[name]), new, 4))
        drafts = step(drafter, *commits)
        for _ in range(turn):
            drafter.idle(1e-9)
        drafter.check_integrity()
        for name, draft in zip(tokens, drafts, strict=True):
            expected = greedy(model, 3, tokens[name], 4)
            # reading in one go and token by token differ in the last bits of INT4, so that near ties may fall otherwise
            agreed += draft.tokens[0] == expected[0]
            total += 1
    assert agreed >= 0.8 * total


def test_an_accepted_draft_is_continued_at_once(drafter: DraftEngine, prompts: list[list[int]]) -> None:  # noqa: F811
    first = step(drafter, opening("a", prompts[0], 4))[0].tokens
    assert not drafter.idle(60.0)
    session = drafter._store.sessions["t", "a"]
    bonus = session.guess[4].token
    decodes = drafter.stats()["decodes"]
    draft = step(drafter, Commit("a", 0, len(prompts[0]) + 5, [*first, bonus], 4), deadline_s=1e-3)[0]
    assert len(draft.tokens) == 4
    assert drafter.stats()["decodes"] == decodes


@pytest.mark.parametrize("sampling", [None, Sampling(0.9, 11, 20, 0.95)])
def test_branches_are_what_drafting_from_scratch_gives(
    drafter: DraftEngine,
    model: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
    sampling: Sampling | None,
) -> None:
    """Round after round leaves the main line on a branch; the KV of every branch is that of computing its tokens anew."""
    prompt = prompts[0]
    known = list(prompt)
    drafts = step(drafter, opening("a", prompt, 4, sampling))
    taken = 0
    for _ in range(4):
        drafter.idle(60.0)
        drafter.check_integrity()
        session = drafter._store.sessions["t", "a"]
        if not session.branches:
            break
        branch = max(session.branches, key=lambda branch: branch.start)
        history, computed = branch.history(), branch.computed
        kv = model.kv.array[:, branch.slot, :, :computed].copy()
        new = history[len(known) : branch.start + 1]
        decodes = drafter.stats()["decodes"]
        known += new
        drafts = step(drafter, Commit("a", 0, len(known), new, 4))
        assert drafts[0].tokens == history[len(known) : len(known) + 4]
        assert drafts[0].ready == 4
        assert drafter.stats()["decodes"] == decodes
        taken += 1
    assert taken >= 2
    drafter.disconnect("t")
    # the same tokens again: the prompt in one call, the rest one by one
    slot = 3
    logits = model.prefill(slot, prompt, 0)
    for position in range(len(prompt), computed):
        logits = model.decode([slot], [history[position]], [position])[0]
        if position >= len(known) - 1 and position + 1 < len(history):
            assert choose(logits, sampling or Sampling(0.0, 0), position + 1, 0).token == history[position + 1]
    np.testing.assert_allclose(model.kv.array[:, slot, :, :computed], kv, atol=2e-2)


def test_hints_are_read_and_continued(
    drafter: DraftEngine,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    step(drafter, opening("a", prompts[0], 4))
    hints = prompts[1][:6]
    assert step(drafter, Commit("a", 0, len(prompts[0]) + 1, [prompts[1][7]], 0, None, "", hints))[0].tokens == []
    drafter.idle(60.0)
    session = drafter._store.sessions["t", "a"]
    expected = [choice.token for choice in session.guess[6:]]
    decodes = drafter.stats()["decodes"]
    draft = step(drafter, Commit("a", 0, len(prompts[0]) + 8, [*hints, expected[0]], 4))[0]
    assert draft.tokens == expected[1:5]
    assert draft.ready == 4
    assert drafter.stats()["decodes"] == decodes


def test_sampled_drafts_win_the_targets_race(
    drafter: DraftEngine,
    model: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    sampling = Sampling(0.9, 2**40 + 1)
    draft = step(drafter, opening("a", prompts[0], 8, sampling))[0]
    known = list(prompts[0])
    logits = model.prefill(1, known, 0)
    for token in draft.tokens:
        scores = logits / np.float32(0.9) - log_exponential(sampling.seed, len(known), np.arange(model.vocab_size))
        likely = np.argsort(-logits)[:32]
        assert token == likely[np.argmax(scores[likely])]
        known.append(token)
        logits = model.decode([1], [token], [len(known) - 1])[0]
