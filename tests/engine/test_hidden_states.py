"""Hidden states from a real vLLM target to conditioned drafts: they are the model's, and output stays what it is without."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from vllm import SamplingParams

from deployments.chain.protocol import Commit, Draft, Drafts, Step
from deployments.channel.inprocess import InProcessChannel
from deployments.draft.build import build_engine
from deployments.draft.engine import DraftEngine
from deployments.draft.hidden_intake import HiddenIntake
from deployments.kv import HIDDEN
from hw.onnx.conditioned import ConditionedModel
from tests.conditioned import Random, Sizes
from tests.engine.conftest import Engine
from tests.engine.prompts import PROMPTS
from tests.engine.test_equality import reference, same
from tests.fakes import FakeDrafter, half_right
from tests.models import model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("patient")]

LONG = "The lighthouse keeper counted the ships, wrote their names into a book, and lit the lamp. " * 12
SOME = [LONG, PROMPTS[2], PROMPTS[8]]
FREE = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CHUNK = 96  # tokens a step: the long prompt is read in several
ROUNDING = 2.0**-11  # of float16, relative
KERNELS = 2e-3  # two float32 implementations of 30 layers, and small values in float16

Rows = npt.NDArray[np.float32]
Forward = Callable[[list[int]], Rows]


@pytest.fixture(scope="module")
def forward() -> Forward:
    """The last hidden state of every position, by transformers in float32."""
    import torch
    from transformers import AutoModel

    loaded = AutoModel.from_pretrained(str(model("target")), dtype=torch.float32).eval()

    def run(tokens: list[int]) -> Rows:
        with torch.inference_mode():
            rows: Rows = loaded(torch.tensor([tokens])).last_hidden_state[0].numpy()
        return rows

    return run


@pytest.fixture(autouse=True)
def _nobody_asks_afterwards(engine: Engine) -> Iterator[None]:
    engine.rounds().send_kv(None)
    yield
    engine.takes_hidden()


def agrees(rows: Rows, expected: Rows) -> None:
    error = np.abs(rows - expected)
    assert (error <= ROUNDING * np.abs(expected) + KERNELS).all(), error.max()


class Recorder(FakeDrafter):
    """Remembers the tokens and hidden states of every session."""

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        super().__init__(guess)
        self.tokens: dict[str, list[int]] = {}
        self.rows: dict[str, dict[int, Rows]] = {}
        self.openings: list[Commit] = []
        self.asked: dict[
            str, int
        ] = {}  # committed when a draft was last wanted: what comes then needs no hidden states

    def step(self, step: Step) -> Drafts:
        for commit in step.commits:
            if commit.want:
                self.asked[commit.session] = commit.length
            if commit.opens:
                self.openings.append(commit)
                self.rows[commit.session] = {}
            start = commit.length - len(commit.tokens)
            self.tokens[commit.session] = self.tokens.get(commit.session, [])[:start] + commit.tokens
            rows = commit.hidden_rows(576)
            assert rows is not None
            self.rows[commit.session] |= {commit.hidden_start + n: row.astype(np.float32) for n, row in enumerate(rows)}
        return super().step(step)

    def check(self, forward: Forward, sessions: int, absent: int = 0) -> None:
        """Every session had the hidden states of all positions but its last and the first ``absent`` whenever it was asked."""
        assert len(self.rows) == sessions
        for session, rows in self.rows.items():
            tokens = self.tokens[session][: self.asked[session]]
            first = min(rows)
            assert first <= absent
            assert sorted(rows) == list(range(first, len(tokens) - 1))
            agrees(np.stack([rows[p] for p in sorted(rows)]), forward(tokens)[first:-1])


def known_of(outputs: list[Any]) -> list[list[int]]:
    return [list(out.prompt_token_ids) + list(out.outputs[0].token_ids) for out in outputs]


def recording(engine: Engine, known: list[list[int]]) -> Recorder:
    recorder = Recorder(half_right(known, engine.vocab()))
    engine.drafts(a=InProcessChannel(recorder))
    engine.takes_hidden("a")
    return recorder


def scheduler(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def test_they_are_those_of_transformers(engine: Engine, forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts read in chunks, some drafts rejected and some not; then again, with a prefix that was cached."""
    monkeypatch.setattr(scheduler(engine), "max_num_scheduled_tokens", CHUNK)
    engine.drafts()
    plain = engine.generate(SOME, FREE)
    known = known_of(plain)
    assert max(map(len, known)) > 2 * CHUNK
    engine.llm.reset_prefix_cache()
    recorder = recording(engine, known)
    same(plain, engine.generate(SOME, FREE))
    recorder.check(forward, len(SOME))
    stats = engine.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    again = recording(engine, known)
    same(plain, engine.generate(SOME, FREE))
    again.check(forward, len(SOME), absent=len(known[0]))
    assert max(commit.hidden_start for commit in again.openings) >= 128


def test_they_survive_preemption_and_end_with_an_abort(engine: Engine, forward: Forward) -> None:
    engine.drafts()
    plain = engine.generate(SOME, FREE)
    recorder = recording(engine, known_of(plain))
    inner = engine.llm.llm_engine
    for number, prompt in enumerate([*SOME, PROMPTS[0]]):
        inner.add_request(f"p{number}", prompt, FREE)
    finished: dict[str, Any] = {}
    for step in range(200):
        if not inner.has_unfinished_requests():
            break
        if step == 4:
            inner.reset_prefix_cache(reset_running_requests=True)
            inner.abort_request(["p3"])
        for output in inner.step():
            if output.finished:
                finished[output.request_id] = output
    same(plain, [finished[f"p{number}"] for number in range(len(SOME))])
    assert "p3" not in finished
    inner.step()  # tells the worker of those that ended last
    stats = engine.stats()
    assert stats["hidden_held_bytes"] == 0
    assert stats["sessions"] == 0
    recorder.check(forward, len(SOME) + 1, absent=512)


# --- a conditioned draft ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over the target's sizes. It mostly says what is said most, so that some of what it says is right."""
    said = np.concatenate(reference(engine, "greedy").known)
    sizes = Sizes(hidden=576, heads=9, kv_heads=3, head_dim=64, inner=512, vocab=engine.vocab(), context=1024)
    draft = Random(sizes, seed=1, head_ids=np.unique(said).tolist())
    draft.w["head"][:, np.isin(draft.head_ids, np.argsort(-np.bincount(said))[:5])] *= 5.0
    weights = engine.kv().offer()["hidden"]["weights"]
    return draft.write(tmp_path_factory.mktemp("conditioned"), target_weights=weights)


def connected(engine: Engine, drafter: Any) -> None:
    engine.drafts(a=InProcessChannel(drafter))
    assert drafter.meet(engine.kv().offer()) == HIDDEN
    engine.takes_hidden("a")


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalties"])
def test_equal_to_plain(engine: Engine, folder: Path, kind: str) -> None:
    expected = reference(engine, kind)
    drafter = build_engine(folder, context=512, slots=32, target_vocab_size=engine.vocab())
    connected(engine, drafter)
    same(expected.outputs[::2], engine.generate(PROMPTS[::2], expected.params[::2]))
    stats, own = engine.stats(), drafter.stats()
    assert stats["drafted_tokens"] > 0
    if kind == "greedy":
        assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert own["hidden_taken"] > 0
    assert own.get("hidden_none", 0) == 0
    assert not any(name.startswith("hidden_refused") for name in own)
    engine.drafts()
    drafter.check_integrity()


class Dying:
    """An engine whose process ends after some steps, in the middle of a round."""

    def __init__(self, drafter: DraftEngine, lives: int) -> None:
        self.meet, self.disconnect = drafter.meet, drafter.disconnect
        self._drafter, self._lives = drafter, lives

    def step(self, step: Step) -> Drafts:
        self._lives -= 1
        if self._lives < 0:
            raise ConnectionResetError("the draft is gone")
        return self._drafter.step(step)


class Watching:
    """Notes the openings an engine is sent."""

    def __init__(self, drafter: DraftEngine) -> None:
        self.meet, self.disconnect = drafter.meet, drafter.disconnect
        self._drafter = drafter
        self.openings: list[Commit] = []

    def step(self, step: Step) -> Drafts:
        self.openings += [commit for commit in step.commits if commit.opens]
        return self._drafter.step(step)


def test_a_draft_dies_in_mid_round_and_another_goes_on(engine: Engine, folder: Path) -> None:
    """The other is told the hidden states of everything the target still has, not only of what comes."""
    expected = reference(engine, "greedy")
    some = slice(8, 12)
    connected(engine, Dying(build_engine(folder, context=512, slots=8), lives=4))
    rounds, inner = engine.rounds(), engine.llm.llm_engine
    engine.llm.reset_prefix_cache()
    watching = Watching(build_engine(folder, context=512, slots=8))
    finished: dict[str, Any] = {}
    for number, prompt in enumerate(PROMPTS[some]):
        inner.add_request(f"d{number}", prompt, expected.params[some][number])
    for step in range(200):
        if not inner.has_unfinished_requests():
            break
        if step == 7:  # by now discovery has found another
            assert rounds.stats()["miss:not_sent"] > 0
            rounds.set_channels({"b": InProcessChannel(watching)})
            assert watching.meet(engine.kv().offer()) == HIDDEN
            engine.takes_hidden("b")
        for output in inner.step():
            if output.finished:
                finished[output.request_id] = output
    same(expected.outputs[some], [finished[f"d{number}"] for number in range(4)])
    assert watching.openings
    for commit in watching.openings:
        rows = commit.hidden_rows(576)
        assert rows is not None
        assert (commit.hidden_start, len(rows)) == (0, commit.length - 1)


class Knowing(ConditionedModel):
    """Computes as it should, then says what the target is going to say, most of the time."""

    known: list[int]

    def _say(self, row: npt.NDArray[np.float32], position: int) -> npt.NDArray[np.float32]:
        found = np.flatnonzero(self.token_ids == self.known[position]) if position < len(self.known) else []
        if len(found) and position % 5:
            row[found[0]] += 1000.0
        return row

    def prefill(self, slot: int, tokens: Any, start: int) -> npt.NDArray[np.float32]:
        return self._say(super().prefill(slot, tokens, start), start + len(tokens))

    def decode(self, slots: Any, tokens: Any, lengths: Any) -> list[npt.NDArray[np.float32]]:
        rows = super().decode(slots, tokens, lengths)
        return [self._say(row, length + 1) for row, length in zip(rows, lengths, strict=True)]


def test_what_a_draft_computes_with_is_the_targets(engine: Engine, folder: Path, forward: Forward) -> None:
    """Runs of accepted tokens: its slot holds the hidden states of all committed positions, and drafts are those of a fresh draft."""
    expected = reference(engine, "greedy")
    place = max(range(len(PROMPTS)), key=lambda n: len(expected.known[n]))
    knowing = Knowing(folder, slots=2, context=512, warm_up=False)
    knowing.known = expected.known[place]
    drafter = DraftEngine(knowing, ahead=0, hidden=HiddenIntake(knowing, engine.kv().offer()["hidden"]["weights"]))
    seen: list[tuple[list[int], Rows, Draft]] = []

    class Looking(Watching):
        def step(self, step: Step) -> Drafts:
            answer = super().step(step)
            for commit, draft in zip(step.commits, answer.drafts, strict=True):
                if not commit.want:  # it ends: no hidden states come any more
                    continue
                session = drafter._store.sessions[step.target, draft.session]
                rows = [knowing.feature(session.slot, p).copy() for p in range(len(session.tokens) - 1)]
                seen.append((list(session.tokens), np.stack(rows), draft))
            return answer

    engine.llm.reset_prefix_cache()
    connected(engine, Looking(drafter))
    same(expected.outputs[place : place + 1], engine.generate([PROMPTS[place]], expected.params[place]))
    assert engine.stats()["accepted_tokens"] > 0
    assert len(seen) >= 3
    fresh = Knowing(folder, slots=1, context=512, warm_up=False)
    fresh.known = knowing.known
    whole = forward(expected.known[place])
    for tokens, rows, draft in seen:
        agrees(rows, whole[: len(rows)])
        fresh.open_hidden(0, 0)
        fresh.write_hidden(0, 0, rows)
        logits, drafted = fresh.prefill(0, tokens, 0), []
        for position in range(len(tokens), len(tokens) + len(draft.tokens)):
            drafted.append(int(fresh.token_ids[logits.argmax()]))
            (logits,) = fresh.decode([0], [drafted[-1]], [position])
        assert drafted == draft.tokens
