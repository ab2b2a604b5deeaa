"""Rounds from the target's side: what is asked, what is dropped, what is counted. No vLLM, no sockets."""

import gc
from collections import Counter

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.controller import Controller, Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import DEADLINE, PROTOCOL_VERSION, Draft, Drafts, Sampling, Step
from deployments.channel.inprocess import InProcessChannel
from deployments.target.rounds import DraftRounds
from deployments.target.sequence import Running
from deployments.target.sources import Limits, make_sources
from tests.fakes import FakeDrafter, replay

FAULTS = FaultPolicy(draft_deadline_s=0.02, answer_slack_s=0.001, circuit_failures=3, circuit_pause_s=30.0)
VOCAB = 1000
TRUTH = list(range(100, 400))


class Target:
    """Plays the engine: commits the agreeing prefix of each draft and one token of its own."""

    def __init__(self, rounds: DraftRounds, requests: dict[str, int], truth: list[int] = TRUTH) -> None:
        self.rounds, self.truth = rounds, truth
        self.tokens = {name: truth[:prompt] for name, prompt in requests.items()}
        self.drafts: dict[str, list[int]] = {}
        for name in requests:
            rounds.begin(name, name, self.tokens[name], True)

    def step(self, want: int = 3) -> dict[str, list[int]]:
        running = []
        for name, tokens in self.tokens.items():
            new = []
            for token in [*self.drafts.get(name, []), -1]:
                new.append(self.truth[len(tokens) + len(new)])
                if token != new[-1]:
                    break
            tokens.extend(new)
            running.append(Running(name, new, len(tokens), lambda a, b, t=tokens: t[a:b], want, Sampling(0.0, 1)))
        self.drafts = self.rounds.round(running)
        return self.drafts


def make(drafter: FakeDrafter | None = None, **channel: object) -> tuple[DraftRounds, InProcessChannel]:
    rounds = DraftRounds("t", VOCAB, FAULTS, Unconditional())
    link = InProcessChannel(drafter or FakeDrafter(replay([TRUTH])), **channel)  # type: ignore[arg-type]
    rounds.set_channels({"a": link})
    return rounds, link


def test_accepts_what_a_right_drafter_says() -> None:
    rounds, _ = make()
    target = Target(rounds, {"r": 5})
    for _ in range(4):
        target.step()
    assert target.tokens["r"] == TRUTH[: 5 + 1 + 3 * 4]
    trace = rounds.take_trace("r")
    assert trace is not None
    assert (trace["drafted"], trace["accepted"], trace["rounds_n"]) == (9, 9, 4)
    assert rounds.stats()["committed_tokens"] == 13


def test_draft_of_an_old_epoch_or_base_is_dropped() -> None:
    class Stale(FakeDrafter):
        def step(self, step: Step) -> Drafts:
            answer = super().step(step)
            shifted = [Draft(d.session, d.epoch, d.base - 1, d.tokens) for d in answer.drafts]
            return Drafts(PROTOCOL_VERSION, "stale", step.number, shifted)

    rounds, _ = make(Stale(replay([TRUTH])))
    assert Target(rounds, {"r": 5}).step() == {}
    assert rounds.reasons == Counter(stale_draft=1)


@pytest.mark.parametrize("bad", [[VOCAB], [-1], [5, 6, 7, 8]])
def test_ids_outside_the_vocabulary_or_too_many_are_refused(bad: list[int]) -> None:
    class Rude(FakeDrafter):
        def step(self, step: Step) -> Drafts:
            return Drafts(1, "rude", step.number, [Draft(c.session, c.epoch, c.length, bad) for c in step.commits])

    rounds, _ = make(Rude(replay([])))
    assert Target(rounds, {"r": 5}).step(want=3) == {}
    assert rounds.reasons == Counter(bad_draft=1)


def test_a_draft_that_forgot_the_session_gets_it_whole() -> None:
    drafter = FakeDrafter(replay([TRUTH]))
    rounds, _ = make(drafter)
    target = Target(rounds, {"r": 5})
    target.step()
    drafter.disconnect("t")
    assert target.step() == {}
    assert rounds.reasons == Counter(unknown_session=1)
    assert target.step()["r"]
    assert drafter.sessions["r"] == target.tokens["r"]


def test_silent_draft_costs_three_deadlines_then_nothing() -> None:
    rounds, _ = make(fault=lambda number: "mute")
    target = Target(rounds, {"r": 5})
    for _ in range(10):
        target.step()
    assert rounds.reasons["deadline_missed"] == FAULTS.circuit_failures
    assert rounds.reasons["circuit_open"] == 10 - FAULTS.circuit_failures


def test_lost_messages_resynchronise() -> None:
    drafter = FakeDrafter(replay([TRUTH]))
    rounds, _ = make(drafter, fault=lambda number: "lose" if number == 2 else "ok")
    target = Target(rounds, {"r": 5})
    for _ in range(6):
        target.step()
    assert rounds.reasons["deadline_missed"] == 1
    assert drafter.sessions["r"] == target.tokens["r"]


def test_finished_requests_close_their_sessions() -> None:
    drafter = FakeDrafter(replay([TRUTH]))
    rounds, _ = make(drafter)
    target = Target(rounds, {"a": 5, "b": 6})
    target.step()
    rounds.finish(["a"])
    del target.tokens["a"]
    target.step()
    assert set(drafter.sessions) == {"b"}
    rounds.finish(["b", "never seen"])
    rounds.flush()
    assert not drafter.sessions
    assert rounds.stats()["sessions"] == 0


def test_traces_of_finished_requests_are_bounded_and_taken_once() -> None:
    rounds = DraftRounds("t", VOCAB, FaultPolicy(trace_requests=3), Unconditional())
    for index in range(5):
        rounds.begin(str(index), f"chain-{index}", [1], False)
        rounds.finish([str(index)])
    assert rounds.take_trace("chain-0") is None
    assert rounds.take_trace("chain-4") is not None
    assert rounds.take_trace("chain-4") is None


def test_sessions_move_when_their_draft_leaves() -> None:
    first, second = FakeDrafter(replay([TRUTH])), FakeDrafter(replay([TRUTH]))
    rounds, _ = make(first)
    target = Target(rounds, {"r": 5})
    target.step()
    rounds.set_channels({"b": InProcessChannel(second)})
    assert target.step()["r"]
    assert second.sessions["r"] == target.tokens["r"]
    assert not first.sessions  # a full draft would refuse the next ones until their lease ends


def test_announced_prompts_are_read_before_the_first_round() -> None:
    drafter = FakeDrafter(replay([TRUTH]))
    rounds, _ = make(drafter)
    target = Target(rounds, {"r": 5})
    rounds.announce([("r", TRUTH[:5], Sampling(0.0, 1), 100)])
    assert drafter.sessions["r"] == TRUTH[:5]
    assert target.step()["r"] == TRUTH[6:9]
    assert rounds.stats().get("dropped:late", 0) == 0


def test_a_draft_that_still_reads_is_left_alone_until_it_expects_to_be_ready() -> None:
    class Reading(FakeDrafter):
        def step(self, step: Step) -> Drafts:
            super().step(step)
            none = [Draft(c.session, c.epoch, c.length, [], DEADLINE, eta_s=0.95) for c in step.commits]
            return Drafts(PROTOCOL_VERSION, "reading", step.number, none)

    now = 0.0
    drafter = Reading(replay([TRUTH]))
    rounds = DraftRounds("t", VOCAB, FAULTS, Unconditional(), clock=lambda: now)
    rounds.set_channels({"a": InProcessChannel(drafter)})
    target = Target(rounds, {"r": 5})
    asked = []
    for index in range(30):
        before = drafter.steps
        target.step()
        if drafter.steps > before:
            asked.append(index)
        now += 0.1
    assert asked == [0, 10, 20]
    assert rounds.reasons["draft_reading"] == 27


def test_without_any_draft_every_step_is_plain() -> None:
    rounds = DraftRounds("t", VOCAB, FAULTS, Unconditional())
    assert Target(rounds, {"r": 5}).step() == {}
    assert rounds.reasons == Counter(no_draft_replica=1)


@given(
    faults=st.lists(st.sampled_from(["ok", "ok", "lose", "mute", "late"]), min_size=1, max_size=12),
    wants=st.lists(st.integers(0, 4), min_size=12, max_size=12),
)
@settings(max_examples=40, deadline=None)
def test_any_loss_delay_or_reordering_keeps_drafts_right(faults: list[str], wants: list[int]) -> None:
    """A right drafter behind a bad channel gives right drafts or none: state never drifts."""
    quick = FaultPolicy(draft_deadline_s=0.001, answer_slack_s=0.0, circuit_failures=100)
    rounds = DraftRounds("t", VOCAB, quick, Unconditional())
    fault = lambda number: faults[number % len(faults)]  # noqa: E731
    rounds.set_channels({"a": InProcessChannel(FakeDrafter(replay([TRUTH])), fault=fault)})
    target = Target(rounds, {"r": 5, "s": 9})
    for want in wants:
        drafts = target.step(want)
        for name, tokens in drafts.items():
            at = len(target.tokens[name])
            assert tokens == TRUTH[at : at + len(tokens)]
            assert len(tokens) <= want


def test_what_a_draft_dropped_stays_counted_when_it_leaves() -> None:
    rounds, link = make()
    link.dropped["late"] += 3
    assert rounds.stats()["dropped:late"] == 3
    rounds.set_channels({"b": InProcessChannel(FakeDrafter(replay([TRUTH])))})
    assert rounds.stats()["dropped:late"] == 3


def test_ten_thousand_short_requests_leave_nothing_behind() -> None:
    drafter = FakeDrafter(replay([TRUTH]))
    faults = FaultPolicy(trace_requests=64, draft_deadline_s=0.02)
    rounds = DraftRounds("t", VOCAB, faults, Controller(), make_sources(["suffix", "lookup"], Limits(outputs=16)))
    rounds.set_channels({"a": InProcessChannel(drafter)})

    def serve(first: int, count: int) -> None:
        for index in range(first, first + count):
            name = f"request-{index}"
            rounds.begin(name, f"chain-{index}", TRUTH[:5], True, f"tenant-{index % 7}")
            rounds.announce([(name, TRUTH[:5], Sampling(0.0, 1), 100)])
            for length in (6, 8):
                new = TRUTH[length - 1 : length]
                tokens = TRUTH[:length]
                rounds.round([Running(name, new, length, lambda a, b, t=tokens: t[a:b], 3, Sampling(0.0, 1))])
            rounds.finish([name])
            rounds.flush()

    def sizes() -> dict[str, float]:
        held = {key: value for key, value in rounds.stats().items() if key.startswith("source:") and "evict" not in key}
        return {
            **held,
            "sequences": len(rounds._sequences),
            "traces": len(rounds._done),
            "drafts": len(drafter.sessions),
        }

    serve(0, 500)
    gc.collect()
    before, bytes_before = sizes(), psutil.Process().memory_info().rss
    serve(500, 9500)
    gc.collect()
    grown = psutil.Process().memory_info().rss - bytes_before
    assert sizes() == before
    assert grown < 8 << 20  # the allocator's slack; a kilobyte kept of each request would be more
    assert drafter.sessions == {}
