"""The controller against simulated engines: what it must achieve, in ratios to plain decoding. Virtual time, fixed seeds."""

import pytest

from tests.unit.simulation import Costs, Engine, ModelDraft, TextSource


def run(engine: Engine, batches: int = 6, size: int = 1, tokens: int = 128) -> float:
    """Mean ratio to plain of several batches, after as many to warm up."""
    for _ in range(2):
        engine.batch(size, tokens)
    return sum(engine.batch(size, tokens) for _ in range(batches)) / batches / engine.plain(size)


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("confidence", [0.5, 0.99])
def test_a_draft_that_is_always_wrong_costs_next_to_nothing(lends: bool, confidence: float) -> None:
    engine = Engine(lends=lends)
    engine.start()
    engine.rounds.set_channels({"model#1": ModelDraft(engine, 0.0, confidence, 2)})
    assert run(engine) >= 0.97


def test_even_the_first_answers_lose_little_to_a_wrong_draft() -> None:
    engine = Engine()
    engine.start()
    engine.rounds.set_channels({"model#1": ModelDraft(engine, 0.0, 0.99, 2)})
    assert engine.batch(1, 256) / engine.plain(1) >= 0.9


def test_a_wrong_source_without_weights_costs_next_to_nothing() -> None:
    engine = Engine()
    engine.start(lambda engine: [TextSource(engine, 0.0, 1.0, 8)])
    assert run(engine) >= 0.97


@pytest.mark.parametrize("agreement", [0.05, 0.12, 0.2])
@pytest.mark.parametrize("speed", [0.0, 0.3])
def test_poor_drafts_in_a_batch_cost_next_to_nothing(agreement: float, speed: float) -> None:
    """Verifying is dear in a batch, and the machine's speed drifts: what verifying costs must still be seen."""
    engine = Engine(Costs(alone_s=0.040, verified_s=0.0012), drift=speed)
    engine.start(lambda engine: [TextSource(engine, agreement, 0.4, 8, confidence=0.4)])
    assert run(engine, size=8, tokens=96) >= 0.96


def test_a_good_draft_is_used() -> None:
    engine = Engine()
    engine.start()
    engine.rounds.set_channels({"model#1": ModelDraft(engine, 0.9, 0.9, 2)})
    # ideal: 1 + 0.9 + 0.81 tokens a step of 0.052 s instead of 0.040 s
    assert run(engine) >= 0.93 * 2.71 * 0.040 / 0.052


def test_a_draft_that_is_too_slow_is_not_used() -> None:
    engine = Engine(Costs(draft_s=0.08))
    engine.start()
    engine.rounds.set_channels({"model#1": ModelDraft(engine, 0.6, 0.6, 0)})
    assert run(engine) >= 0.97


def test_long_right_runs_are_verified_whole() -> None:
    engine = Engine()
    engine.start(lambda engine: [TextSource(engine, 0.97, 0.9, 12)])
    assert run(engine) >= 4.0


def test_source_and_model_together_beat_either_alone() -> None:
    def measure(model: bool, source: bool) -> float:
        engine = Engine(Costs(shared_s=0.045))
        engine.start((lambda e: [TextSource(e, 0.9, 0.25, 8)]) if source else lambda e: [])
        if model:
            engine.rounds.set_channels({"model#1": ModelDraft(engine, 0.85, 0.85, 2)})
        return run(engine)

    assert measure(True, True) > max(measure(True, False), measure(False, True))


def test_where_only_copying_pays_the_core_is_not_lent() -> None:
    engine = Engine(Costs(shared_s=0.080))
    engine.start(lambda e: [TextSource(e, 0.9, 0.5, 8)])
    draft = ModelDraft(engine, 0.7, 0.7, 1)
    engine.rounds.set_channels({"model#1": draft})
    run(engine)
    alone = Engine(Costs(shared_s=0.080))
    alone.start(lambda e: [TextSource(e, 0.9, 0.5, 8)])
    assert run(engine) >= 0.95 * run(alone)


def test_drafting_stops_in_large_batches_and_is_what_it_was_afterwards() -> None:
    engine = Engine(Costs(verified_s=0.004))
    engine.start()
    draft = ModelDraft(engine, 0.9, 0.9, 2)
    engine.rounds.set_channels({"model#1": draft})
    run(engine, size=2)
    before = sum(engine.batch(2, 128) for _ in range(12)) / 12
    large = run(engine, size=16, tokens=64, batches=3)
    after = sum(engine.batch(2, 128) for _ in range(12)) / 12
    assert large >= 0.97
    assert after >= 0.95 * before


def test_a_draft_that_becomes_good_is_found_again() -> None:
    engine = Engine()
    engine.start()
    draft = ModelDraft(engine, 0.0, 0.9, 2)
    engine.rounds.set_channels({"model#1": draft})
    for _ in range(6):
        engine.batch(1, 128)
    draft.agreement = 0.9
    for _ in range(40):
        last = engine.batch(1, 128)
    assert last / engine.plain(1) >= 1.5


def test_one_sequence_that_cannot_be_drafted_does_not_spoil_the_others() -> None:
    engine = Engine(lends=False)
    engine.start()

    class Uneven(ModelDraft):
        def post(self, step):  # type: ignore[no-untyped-def]
            kept = self.engine.guess
            self.engine.guess = lambda s, n, a: kept(s, n, 0.0 if int(s[1:]) % 4 == 0 else a)  # type: ignore[method-assign]
            try:
                return super().post(step)
            finally:
                self.engine.guess = kept  # type: ignore[method-assign]

    engine.rounds.set_channels({"model#1": Uneven(engine, 0.9, 0.9, 2)})
    for _ in range(3):
        engine.batch(4, 128)
    engine.rounds.reset_stats()
    engine.batch(4, 128)
    stats = engine.rounds.stats()
    assert stats["accepted_tokens"] / stats["drafted_tokens"] >= 0.75  # 0.9 of the first, and so on, for three of four
    assert stats["speedup_model:4"] >= 1.8


def test_what_is_remembered_is_bounded() -> None:
    engine = Engine()
    engine.start()
    controller = engine.rounds.controller
    for index in range(10_000):
        controller.view(f"tenant-{index}", "suffix")
    assert len(controller._records) <= 4096
