"""Training: what it learns from and what never, going on where it stopped, and what is refused."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.distil_lib import feed as feeding
from scripts.distil_lib.cut import CutDraft, save_cut
from scripts.distil_lib.draft import ConditionedDraft, Draft
from scripts.distil_lib.feed import Feed, held_sequences, sample
from scripts.distil_lib.held_out import held_out, prompt_hash
from scripts.distil_lib.loss import Weights
from scripts.distil_lib.measure import guesses, measure, replay
from scripts.distil_lib.shards import Written, measuring, read_shard, shard_names, write_shard
from scripts.distil_lib.target import Target
from scripts.distil_lib.train import CheckpointMismatch, Recipe, Trainer, read_checkpoint
from tests.unit.distil_fakes import HEAD, VOCABULARY, answers, greedy, shards, tiny_target

RECIPE = Recipe(rate=3e-3, unroll=2, batch_tokens=160, longest=40, warm_up=2, weights=Weights(share=0.7))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = [greedy(target, 8, 0), greedy(target, 8, 1)]
    return shards(tmp_path_factory.mktemp("data"), target, written)


def begun(target: Target, data: Path) -> ConditionedDraft:
    return ConditionedDraft.begin(target, 1, torch.arange(HEAD), sample(data, target, tokens=400, longest=40))


def trainer(target: Target, data: Path, draft: Draft, steps: int, recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(draft, target, data, recipe, budget=1e9, steps=steps, clock=lambda: 0.0)


def test_going_on_from_a_checkpoint_gives_what_going_through_gives(target: Target, data: Path, tmp_path: Path) -> None:
    through = trainer(target, data, begun(target, data), 9)
    through(lambda _: None)
    first = trainer(target, data, begun(target, data), 9)

    class Interrupt(Exception):
        pass

    def stop(_: dict[str, float]) -> None:
        if first.state.step == 4:
            first.save(tmp_path / "c")
            raise Interrupt

    with pytest.raises(Interrupt):
        first(stop)
    content = read_checkpoint(tmp_path / "c", target.weights, RECIPE)
    second = trainer(target, data, begun(target, data), 9)
    second.load(content)
    assert second.state.step == 4
    second(lambda _: None)
    assert second.state == through.state
    for name, value in through.draft.state_dict().items():
        assert torch.equal(value, second.draft.state_dict()[name]), name


def test_a_checkpoint_of_another_target_recipe_or_form_is_refused(target: Target, data: Path, tmp_path: Path) -> None:
    trainer(target, data, begun(target, data), 1).save(tmp_path / "c")
    with pytest.raises(CheckpointMismatch, match="trained for the target"):
        read_checkpoint(tmp_path / "c", "f" * 64, RECIPE)
    with pytest.raises(CheckpointMismatch, match="unroll"):
        read_checkpoint(
            tmp_path / "c", target.weights, Recipe(rate=3e-3, unroll=5, batch_tokens=160, longest=40, warm_up=2)
        )
    (tmp_path / "d").write_bytes((tmp_path / "c").read_bytes()[:500])
    with pytest.raises(CheckpointMismatch, match="no checkpoint"):
        read_checkpoint(tmp_path / "d", target.weights, RECIPE)


def test_it_learns(target: Target, data: Path) -> None:
    draft = begun(target, data)
    found = [
        (each, row)
        for name in shard_names(data)
        for each, row in zip(
            read_shard(data, name, target.weights),
            feeding.shard_features(data / "features", name, read_shard(data, name, target.weights), target),
            strict=True,
        )
    ]
    before = measure(draft, found, target, 40)
    losses: list[float] = []
    trainer(target, data, draft, 60)(lambda parts: losses.append(parts["loss"]))
    after = measure(draft, found, target, 40)
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:8])
    assert after.first > before.first
    assert 1 <= before.committed <= after.committed <= 5


def test_what_is_held_out_or_measured_with_is_never_in_a_batch(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sequence is told apart by its first token."""
    measured = prompt_hash("one of the project's own prompts")
    monkeypatch.setattr(feeding, "measured_prompts", lambda: frozenset({measured}))
    written = [
        Written(np.array([index, *each.ids[1:]]), each.prompt, 0.0, measured if index == 7 else each.hashed)
        for index, each in enumerate([*answers(28, 3, held=False), *answers(4, 3, held=True)])
    ]
    kept_out = {int(each.ids[0]) for each in written if held_out(each.hashed)} | {7}
    assert kept_out == {7, 28, 29, 30, 31}
    write_shard(tmp_path, "00000", written, weights=target.weights, vocabulary=VOCABULARY)
    feed = Feed(tmp_path, target, tokens=160, longest=40, seed=0)
    seen: set[int] = set()
    for batch in islice(feed, 60):
        seen |= set(batch.ids[:, 0].tolist())
    assert feed.place.pool >= 1  # more than once through all of them
    assert seen == {int(each.ids[0]) for each in written} - kept_out
    held = held_sequences(tmp_path, target, most=99, longest=40)
    assert {int(each.ids[0]) for each, _ in held} | {7} == kept_out
    assert [each.hashed for each, _ in held] == [each.hashed for each in measuring(written)]


def test_new_shards_come_before_old_ones_again(target: Target, tmp_path: Path) -> None:
    shards(tmp_path, target, [answers(6, 0, held=False)])
    feed = Feed(tmp_path, target, tokens=10_000, longest=40, seed=0)
    batches = iter(feed)
    next(batches)
    write_shard(tmp_path, "00009", answers(6, 9, held=False), weights=target.weights, vocabulary=VOCABULARY)
    next(batches)
    assert feed.place.names == ["00009"]


def test_first_features_are_dropped_in_some_sequences(target: Target, data: Path) -> None:
    dropped = kept = 0
    for batch in islice(Feed(data, target, tokens=160, longest=40, seed=0), 60):
        for row, count in enumerate(batch.dropped.tolist()):
            assert not batch.given[row, :count].any()
            assert torch.equal(batch.given[row, count:], batch.features[row, count:])
            assert count < batch.lengths[row]
            dropped, kept = dropped + (count > 0), kept + (count == 0)
    assert 0.08 < dropped / (dropped + kept) < 0.35


def test_a_replay_commits_what_was_right_and_one_more() -> None:
    ids = np.array([9, 9, 1, 2, 3, 4, 5, 6])
    guessed = np.full((2, 8), -1)
    guessed[0, 2], guessed[1, 3] = 2, 3  # after 1: both right; the target adds 4
    guessed[0, 5], guessed[1, 6] = 8, 6  # after 4: the first is wrong, so the second does not count
    guessed[0, 6] = 6
    assert replay(ids, 2, guessed) == [2, 0, 1]


def test_figures_are_those_of_drafting_round_by_round(target: Target, data: Path) -> None:
    """The replay reads one unrolled pass; this drafts, token by token, from what the target had told by then."""
    draft = begun(target, data)
    trainer(target, data, draft, 25)(lambda _: None)
    draft.eval()
    name = shard_names(data)[0]
    each = read_shard(data, name, target.weights)
    sequence, row = each[0], feeding.shard_features(data / "features", name, each, target)[0]
    tokens, known = torch.from_numpy(sequence.ids)[None], torch.from_numpy(row.astype(np.float32))[None]
    runs, at = [], sequence.prompt
    while at < len(sequence.ids) - 1:
        text, state, run = tokens[:, : at + 1], known[:, : at + 1].clone(), 0
        for _ in range(4):
            with torch.no_grad():
                out = draft.unroll(text, state, 1)[0]
            guess = int(draft.head_ids[draft.logits(out[0, -1]).argmax()])
            if at + run >= len(sequence.ids) - 1 or guess != sequence.ids[at + run + 1]:
                break
            run += 1
            state[:, -1] = out[:, -1]
            text = torch.cat([text, torch.tensor([[guess]])], 1)
            state = torch.cat([state, torch.zeros_like(state[:, :1])], 1)
        runs.append(run)
        at += run + 1
    (guessed,) = guesses(draft, [(sequence, row)], target, 40)
    assert sum(runs) > 2  # some guesses are right
    assert replay(sequence.ids, sequence.prompt, guessed) == runs


def test_a_cut_model_is_a_checkpoint_that_computes_the_same(target: Target, data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = Recipe(rate=3e-3, layers=2, unroll=1, batch_tokens=160, longest=40, warm_up=2)
    draft = CutDraft(target, 2, torch.arange(HEAD))
    losses: list[float] = []
    trainer(target, data, draft, 40, recipe)(lambda parts: losses.append(parts["kl"]))
    assert np.mean(losses[-6:]) < np.mean(losses[:6])
    save_cut(draft, target, tmp_path / "cut")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype=torch.float32)
    ids = torch.randint(0, VOCABULARY, (2, 11))
    with torch.no_grad():
        ours = draft.unroll(ids, target.features(ids), 3)
        torch.testing.assert_close(model.model(ids).last_hidden_state, ours[2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids).logits[..., :HEAD], draft.logits(ours[0]), rtol=1e-4, atol=1e-3)
    assert model.config.num_hidden_layers == 2


def test_a_cut_model_is_shorter_than_its_target(target: Target) -> None:
    with pytest.raises(ValueError, match="2 to 2 layers"):
        CutDraft(target, 3, torch.arange(HEAD))


def test_training_ends_with_its_time(target: Target, data: Path) -> None:
    ticks: Callable[[], float] = iter(np.arange(0.0, 100.0, 1.0)).__next__
    timed = Trainer(begun(target, data), target, data, RECIPE, budget=5.0, clock=ticks)
    timed(lambda _: None)
    assert timed.state.step == 5
    assert timed.progress == 1
