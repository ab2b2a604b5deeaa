"""A draft engine over a conditioned model: what it drafts is what the same weights give step by step, whatever the target sends."""

from pathlib import Path

import numpy as np
import pytest

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Draft, Sampling, Step
from deployments.draft.answers import NO_HIDDEN, Answer, WriteRequest
from deployments.draft.build import build_engine
from deployments.draft.choose import choose
from deployments.draft.engine import DraftEngine
from deployments.draft.hidden_intake import HiddenIntake
from deployments.draft.model import HiddenModel
from deployments.kv import HIDDEN
from hw.onnx.conditioned import ConditionedModel
from tests.conditioned import TARGET, Random, Sizes

SIZES = Sizes(context=128)
GREEDY = Sampling(0.0, 7)
WARM = Sampling(0.9, 11, top_k=20)
SEEDS = (3, 4, 5)


@pytest.fixture(scope="module")
def draft() -> Random:
    return Random(SIZES, seed=3)


@pytest.fixture(scope="module")
def folder(draft: Random, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft.write(tmp_path_factory.mktemp("draft"))


@pytest.fixture
def drafter(folder: Path) -> DraftEngine:
    return build_engine(folder, slots=4, context=128, target_vocab_size=SIZES.vocab)


class Reference:
    """One sequence: its tokens, and the feature each of them went with."""

    def __init__(self, draft: Random, seed: int, sampling: Sampling) -> None:
        self.draft, self.sampling = draft, sampling
        self.rng = np.random.default_rng(seed)
        self.tokens: list[int] = []
        self.hidden = self.rng.normal(size=(SIZES.context, SIZES.hidden)).astype(
            np.float16
        )  # the target's, by position
        self.given: dict[int, np.ndarray] = {-1: np.zeros(SIZES.hidden, np.float32)}  # of positions, for good

    def append(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def give(self, start: int, stop: int) -> bytes:
        """The target sends what it has of these positions; what goes into the commit."""
        for position in range(start, stop):
            self.given[position] = self.hidden[position].astype(np.float32)
        return self.hidden[start:stop].astype("<f2").tobytes()

    def none(self, stop: int) -> None:
        """There is nothing of positions below ``stop`` that nothing was given of."""
        for position in range(stop):
            self.given.setdefault(position, np.zeros(SIZES.hidden, np.float32))

    def guess(self, want: int) -> list[int]:
        """What follows, one token after the other."""
        tokens, found = list(self.tokens), []
        features = np.zeros((0, SIZES.hidden), np.float32)
        own: list[np.ndarray] = []
        while len(found) < want:
            for position in range(len(features), len(tokens)):
                before = self.given.get(position - 1)
                features = np.concatenate([features, (own[position - 1] if before is None else before)[None]])
                logits, outputs = self.draft.forward(tokens[: position + 1], features)
                own.append(outputs[-1])
            picked = choose(logits, self.sampling, len(tokens), 0, token_ids=self.draft.head_ids)
            tokens.append(picked.token)
            found.append(picked.token)
        return found


def ask(
    drafter: DraftEngine, *commits: Commit, closed: tuple[str, ...] = (), number: int = 1, deadline_s: float = 60.0
) -> list[Draft]:
    answer = drafter.step(Step(PROTOCOL_VERSION, "t", number, deadline_s, list(commits), list(closed)))
    drafter.check_integrity()
    return answer.drafts


def opening(name: str, reference: Reference, want: int = 4, start: int = 0, epoch: int = 0) -> Commit:
    length = len(reference.tokens)
    reference.given = {-1: reference.given[-1]}
    rows = reference.give(start, length - 1)
    reference.none(start)
    return Commit(
        name, epoch, length, list(reference.tokens), want, reference.sampling, hidden=rows, hidden_start=start
    )


def following(name: str, reference: Reference, new: list[int], want: int = 4, hints: list[int] | None = None) -> Commit:
    """The commit of ``new`` tokens, with the hidden states the target has by then."""
    known = len(reference.tokens)
    reference.append(new)
    length = len(reference.tokens)
    rows = reference.give(known - 1, length - 1)
    return Commit(name, 0, length, new, want, verifying=hints or [], hidden=rows, hidden_start=known - 1)


def test_the_graph_is_read_as_what_it_is(drafter: DraftEngine) -> None:
    assert drafter.vocab_size == SIZES.vocab
    assert drafter.meet({}) == ""
    assert drafter.meet({"manifest": b"x"}) == ""
    assert drafter.meet({"hidden": {"size": SIZES.hidden, "weights": TARGET}}) == HIDDEN
    assert drafter.meet({"hidden": {"size": SIZES.hidden + 1, "weights": TARGET}}) == ""


def test_another_target_is_not_taken(drafter: DraftEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert drafter.meet({"hidden": {"size": SIZES.hidden, "weights": "b" * 64}}) == ""
    assert drafter.meet({"hidden": {"size": SIZES.hidden, "weights": "b" * 64}}) == ""
    assert len(caplog.records) == 1
    assert TARGET in caplog.text
    assert "b" * 64 in caplog.text


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("absent", [0, 6])
@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_are_those_of_the_weights(
    drafter: DraftEngine, draft: Random, sampling: Sampling, absent: int, seed: int
) -> None:
    """Several sequences at once, each with a target that accepts some of every draft."""
    rng = np.random.default_rng(seed)
    references = {f"s{n}": Reference(draft, 10 * seed + n, sampling) for n in range(3)}
    commits = []
    for name, reference in references.items():
        reference.append(rng.integers(0, SIZES.vocab, int(rng.integers(8, 20))).tolist())
        commits.append(opening(name, reference, start=absent))
    accepted = 0
    for number in range(8):
        drafts = ask(drafter, *commits, number=number)
        commits = []
        for made, (name, reference) in zip(drafts, references.items(), strict=True):
            assert made.reason == ""
            assert made.tokens == reference.guess(4)
            keep = int(rng.integers(0, 5))
            accepted += keep
            known = len(reference.tokens)
            reference.append([*made.tokens[:keep], int(rng.integers(0, SIZES.vocab))])
            length = len(reference.tokens)
            rows = reference.give(known - 1, length - 1)
            commits.append(Commit(name, 0, length, reference.tokens[known:], 4, hidden=rows, hidden_start=known - 1))
    assert accepted
    stats = drafter.stats()
    assert stats["hidden_taken"] == 24
    assert not any(name.startswith("hidden_refused") for name in stats)


def test_between_messages_only_prompts_are_read(drafter: DraftEngine, draft: Random) -> None:
    """What could be guessed ahead of the next hidden states would have to be computed again with them."""
    reference = Reference(draft, 1, GREEDY)
    reference.append(list(range(30)))
    (made,) = ask(drafter, opening("s", reference))
    assert made.tokens == reference.guess(4)
    before = drafter.stats()
    assert not drafter.idle(0.2)
    after = drafter.stats()
    for name in ("decodes", "prefills"):
        assert after.get(name, 0) == before.get(name, 0)


def test_without_rows_it_goes_on_with_its_own(drafter: DraftEngine, draft: Random) -> None:
    """A message had no room: the draft's own features serve, until the target's come for all of it."""
    reference = Reference(draft, 2, GREEDY)
    reference.append(list(range(12)))
    (made,) = ask(drafter, opening("s", reference))
    reference.append([*made.tokens[:2], 5])
    (made,) = ask(drafter, Commit("s", 0, 15, reference.tokens[12:], 4))
    assert made.tokens == reference.guess(4)
    reference.append([*made.tokens, 6])  # all of it was right, so its last token was not computed yet
    (made,) = ask(drafter, Commit("s", 0, 20, reference.tokens[15:], 4))
    assert made.tokens == reference.guess(4)
    reference.append([9])
    rows = reference.give(11, 20)
    (made,) = ask(drafter, Commit("s", 0, 21, [9], 4, hidden=rows, hidden_start=11))
    assert made.tokens == reference.guess(4)
    assert drafter.stats()["hidden_none"] == 2


def test_positions_that_were_left_out_have_none(drafter: DraftEngine, draft: Random) -> None:
    """Nobody wanted drafts for a while, and the target no longer has all of what it computed meanwhile."""
    reference = Reference(draft, 3, GREEDY)
    reference.append(list(range(10)))
    (made,) = ask(drafter, opening("s", reference))
    reference.append([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
    ask(drafter, Commit("s", 0, 21, reference.tokens[10:], 0))
    computed = drafter._store.sessions["t", "s"].computed
    reference.append([8])
    rows = reference.give(17, 21)
    for position in range(computed, 17):
        reference.given[position] = np.zeros(SIZES.hidden, np.float32)
    (made,) = ask(drafter, Commit("s", 0, 22, [8], 4, hidden=rows, hidden_start=17))
    assert made.tokens == reference.guess(4)


def test_rows_wait_for_the_positions_they_are_of(drafter: DraftEngine, draft: Random) -> None:
    """The target sends rows of positions this draft has not come to: they are there when it does, also in another slot."""
    first, reference = Reference(draft, 12, GREEDY), Reference(draft, 13, GREEDY)
    for each in (first, reference):
        each.append(list(range(10)))
    ask(drafter, opening("f", first), opening("s", reference))
    (made,) = ask(drafter, following("s", reference, [3, 1, 4]), closed=("f",), deadline_s=0.0)
    assert not made.tokens
    assert drafter._runner.pack(1000)
    assert drafter._store.sessions["t", "s"].slot == 0
    (made,) = ask(drafter, following("s", reference, [5, 9]))
    assert made.tokens == reference.guess(4)
    late = Reference(draft, 14, GREEDY)
    late.append(list(range(20, 40)))
    ask(drafter, opening("l", late, want=0), closed=("s",))
    (made,) = ask(drafter, following("l", late, [8]))
    assert made.tokens == late.guess(4)


def test_a_new_epoch_begins_anew(drafter: DraftEngine, draft: Random) -> None:
    """Other tokens, and hidden states of fewer positions: nothing of before is left, also of another sequence in that slot."""
    reference = Reference(draft, 4, GREEDY)
    reference.append(list(range(20)))
    ask(drafter, opening("s", reference))
    reference.tokens[9:] = [50, 51, 52]
    (made,) = ask(drafter, opening("s", reference, start=4, epoch=1))
    assert made.tokens == reference.guess(4)
    other = Reference(draft, 5, GREEDY)
    other.append([1, 2, 3, 4, 5, 6, 7])
    (made,) = ask(drafter, opening("o", other, start=2), closed=("s",))
    assert made.tokens == other.guess(4)
    nothing = Reference(draft, 6, GREEDY)
    nothing.append([9, 8, 7, 6])
    nothing.none(3)
    (made,) = ask(drafter, Commit("n", 0, 4, [9, 8, 7, 6], 4, GREEDY), closed=("o",))
    assert made.tokens == nothing.guess(4)


BAD = {
    "half a row": {"hidden": b"\0" * (2 * SIZES.hidden - 2)},
    "beyond what is committed": {"hidden": b"\0" * 2 * SIZES.hidden, "hidden_start": 9},
    "before the first": {"hidden": b"\0" * 2 * SIZES.hidden, "hidden_start": -1},
    "far beyond": {"hidden": b"\0" * 2 * SIZES.hidden, "hidden_start": 1 << 40},
    "not numbers": {"hidden": np.full(SIZES.hidden, np.nan, "<f2").tobytes(), "hidden_start": 3},
    "endless": {"hidden": np.full(SIZES.hidden, np.inf, "<f2").tobytes(), "hidden_start": 3},
}


@pytest.mark.parametrize("bad", BAD)
def test_rows_that_cannot_be_are_refused(drafter: DraftEngine, draft: Random, bad: str) -> None:
    reference = Reference(draft, 8, GREEDY)
    reference.append(list(range(10)))
    reference.none(9)
    (made,) = ask(drafter, Commit("s", 0, 10, reference.tokens, 4, GREEDY, **BAD[bad]))  # type: ignore[arg-type]
    assert made.tokens == reference.guess(4)
    counts = {name: n for name, n in drafter.stats().items() if name.startswith("hidden_")}
    assert counts == {"hidden_refused:" + ("values" if bad in ("not numbers", "endless") else "shape"): 1}


def test_whole_answers_are_refused(drafter: DraftEngine) -> None:
    answers: list[Answer] = []
    job = drafter.write(WriteRequest(prompt=[1, 2, 3], k=2), answers.append)
    assert job.ended
    assert [answer.reason for answer in answers] == [NO_HIDDEN] * 2
    assert not drafter.idle(0.1)
    assert drafter.stats()[f"answer:{NO_HIDDEN}"] == 2


def test_tokens_beyond_the_targets_are_never_proposed(folder: Path, draft: Random) -> None:
    drafter = build_engine(folder, slots=2, context=64, target_vocab_size=30, top_k=64)
    reference = Reference(draft, 9, GREEDY)
    reference.append(list(range(12)))
    (made,) = ask(drafter, opening("s", reference, want=8))
    assert len(made.tokens) == 8
    assert all(token < 30 for token in made.tokens)
    ids, probs = made.top()
    assert set(ids.ravel().tolist()) <= set(draft.head_ids[draft.head_ids < 30].tolist())
    assert (probs.sum(axis=1) <= 1.0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_drafting_ahead_changes_nothing_where_rows_come(folder: Path, draft: Random, seed: int) -> None:
    """Branches, spares and moves carry features; what was guessed ahead of the target's is dropped when they come."""
    model: HiddenModel = ConditionedModel(folder, slots=6, context=128)
    drafter = DraftEngine(model, ahead=None, paced=False, hidden=HiddenIntake(model, TARGET))
    rng = np.random.default_rng(seed)
    references = {f"s{n}": Reference(draft, 20 * seed + n, GREEDY) for n in range(2)}
    commits = []
    for name, reference in references.items():
        reference.append(rng.integers(0, SIZES.vocab, 10).tolist())
        commits.append(opening(name, reference))
    for number in range(10):
        drafts = ask(drafter, *commits, number=number)
        drafter.idle(rng.uniform(0.0, 0.02))
        drafter.check_integrity()
        commits = []
        for made, (name, reference) in zip(drafts, references.items(), strict=True):
            assert made.tokens == reference.guess(4)
            keep = int(rng.integers(0, 5))
            at = len(reference.tokens) + keep
            branches = [b.token for b in drafter._store.sessions["t", name].branches if b.start == at]
            own = branches[0] if branches else int(rng.integers(0, SIZES.vocab))
            commits.append(following(name, reference, [*made.tokens[:keep], own]))
        if number % 3 == 2:  # the target verifies what another source proposed, and some of it is right
            hints = rng.integers(0, SIZES.vocab, 2).tolist()
            told = [Commit(c.session, 0, c.length, c.tokens, 0, verifying=hints, hidden=c.hidden, hidden_start=c.hidden_start) for c in commits]  # fmt: skip
            ask(drafter, *told)
            drafter.idle(rng.uniform(0.0, 0.01))
            drafter.check_integrity()
            commits = [following(name, reference, [*hints[:1], 7]) for name, reference in references.items()]
    assert drafter.stats()["branches_started"] > 0
