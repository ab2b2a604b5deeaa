"""Hidden states on their way from a batch to a draft: the right rows of the right positions, bounded, and none where nobody asked."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.chain.controller import Unconditional
from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import Commit, Drafts, Sampling, Step
from deployments.channel.inprocess import InProcessChannel
from deployments.kv import HIDDEN
from deployments.target.hidden_states import HiddenStates, Kept, Piece
from deployments.target.rounds import DraftRounds
from deployments.target.sequence import Running
from tests.fakes import FakeDrafter, half_right

SIZE = 4
VOCAB = 1000
FAULTS = FaultPolicy(draft_deadline_s=0.005, answer_slack_s=0.001, circuit_failures=1000)


def state(request: str, position: int) -> np.ndarray:
    """What the model computes at a position of a request; float16 holds it."""
    return np.array([int(request[1:]), position, position % 7, 1], np.float32)


class Asking(FakeDrafter):
    """Checks every row it is sent, and remembers of which positions it has one."""

    def __init__(self, known: list[list[int]]) -> None:
        super().__init__(half_right(known, VOCAB))
        self.has: dict[str, set[int]] = {}
        self.commits: list[Commit] = []

    def step(self, step: Step) -> Drafts:
        for commit in step.commits:
            self.commits.append(commit)
            rows = commit.hidden_rows(SIZE)
            assert rows is not None
            has = self.has.setdefault(commit.session, set())
            if commit.opens:
                has.clear()
            for offset, row in enumerate(rows):
                np.testing.assert_array_equal(row, state(commit.session, commit.hidden_start + offset))
                has.add(commit.hidden_start + offset)
        return super().step(step)


@dataclass
class Playing:
    """One request of the played engine."""

    truth: list[int]
    prompt: int
    known: int = 0  # committed
    computed: int = 0  # positions with KV
    draft: list[int] = field(default_factory=list)


class Engine:
    """Plays vLLM's runner: chunks of prompts, drafts that are rejected, preemption."""

    def __init__(
        self, requests: dict[str, Playing], drafter: Asking, faults: FaultPolicy = FAULTS, **channel: Any
    ) -> None:
        self.requests = requests
        self.rounds = DraftRounds("t", VOCAB, faults, Unconditional())
        self.hidden = HiddenStates(SIZE, self.rounds.takes_hidden, faults)
        self.rounds.send_hidden(self.hidden)
        self.rounds.set_channels({"a": InProcessChannel(drafter, **channel)})
        self.hidden.connect([{"name": "a", "kv": HIDDEN}])
        for name, playing in requests.items():
            playing.known = playing.prompt
            self.rounds.begin(name, name, playing.truth[: playing.prompt], False)

    def step(self, chunk: int = 64, want: int = 3) -> None:
        names, rows, starts, sampled, running = [], [], [0], [], []
        computed = []
        for name, playing in self.requests.items():
            tokens = playing.truth[: playing.known] + playing.draft
            stop = min(len(tokens), playing.computed + chunk)
            names.append(name)
            computed.append(playing.computed)
            for position in range(playing.computed, stop):
                right = tokens[: position + 1] == playing.truth[: position + 1]
                rows.append(state(name, position) if right else np.full(SIZE, -1.0, np.float32))
            starts.append(len(rows))
            if stop < len(tokens):
                sampled.append([])
                playing.computed = stop
                continue
            new = []
            for token in [*playing.draft, -1]:
                new.append(playing.truth[playing.known + len(new)])
                if token != new[-1]:
                    break
            sampled.append(new)
            playing.known += len(new)
            playing.computed = playing.known - 1
            truth = playing.truth
            running.append(Running(name, new, playing.known, lambda a, b, t=truth: t[a:b], want, Sampling(0.0, 1)))
        runner = SimpleNamespace(
            input_batch=SimpleNamespace(
                req_ids=names,
                num_computed_tokens_cpu=np.array(computed),
                num_tokens_no_spec=np.array([self.requests[name].known for name in names]),
            ),
            query_start_loc=SimpleNamespace(np=np.array(starts)),
            propose_draft_token_ids=lambda *given: None,
        )
        self.hidden.install(runner)  # type: ignore[arg-type]
        padding = [np.full(SIZE, np.nan, np.float32)] * 3  # batches of compiled steps are longer than what is in them
        runner.propose_draft_token_ids(None, sampled, None, torch.from_numpy(np.array(rows + padding)))
        drafts = self.rounds.round(running)
        for item in running:
            self.requests[item.request].draft = drafts.get(item.request, [])

    def preempt(self, name: str, cached: int = 0) -> None:
        """Its KV goes; when it is resumed ``cached`` positions are found in the prefix cache."""
        playing = self.requests[name]
        playing.computed, playing.draft = min(cached, playing.known - 1), []


def truth(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, 300).tolist()


def engine(prompts: dict[str, int], faults: FaultPolicy = FAULTS, **channel: Any) -> tuple[Engine, Asking]:
    requests = {name: Playing(truth(int(name[1:])), prompt) for name, prompt in prompts.items()}
    drafter = Asking([playing.truth for playing in requests.values()])
    return Engine(requests, drafter, faults, **channel), drafter


def test_every_commit_has_what_the_draft_lacks() -> None:
    played, drafter = engine({"r1": 20, "r2": 33})
    for _ in range(12):
        played.step()
    for name, playing in played.requests.items():
        assert drafter.has[name] == set(range(playing.known - 1))
    stats = played.rounds.stats()
    assert stats["accepted_tokens"] > 0
    assert stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["hidden_sent"] == sum(len(has) for has in drafter.has.values())
    assert stats["hidden_positions"] == stats["hidden_sent"]  # those of rejected tokens are not even copied


def test_a_prompt_in_chunks() -> None:
    played, drafter = engine({"r1": 50, "r2": 5})
    for _ in range(8):
        played.step(chunk=8)
    assert drafter.has["r1"] == set(range(played.requests["r1"].known - 1))
    assert drafter.has["r2"] == set(range(played.requests["r2"].known - 1))


def test_what_the_prefix_cache_had_is_not_there() -> None:
    played, drafter = engine({"r1": 50})
    played.requests["r1"].computed = 32
    for _ in range(3):
        played.step()
    assert drafter.has["r1"] == set(range(32, played.requests["r1"].known - 1))
    assert drafter.commits[0].hidden_start == 32


@pytest.mark.parametrize("cached", [0, 16])
def test_a_preempted_request_goes_on(cached: int) -> None:
    played, drafter = engine({"r1": 20, "r2": 9})
    for turn in range(12):
        if turn in (3, 7):
            played.preempt("r1", cached)
        played.step(chunk=8)
    assert drafter.has["r1"] == set(range(played.requests["r1"].known - 1))
    assert sum(commit.opens for commit in drafter.commits if commit.session == "r1") == 1


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_happens_no_row_is_wrong(data: st.DataObject) -> None:
    faults = replace(FAULTS, hidden_positions=data.draw(st.sampled_from([6, 16, 64])))
    fates = data.draw(st.lists(st.sampled_from(["ok", "ok", "ok", "lose", "mute", "late"]), min_size=30, max_size=30))
    played = engine({"r1": 20, "r2": 12}, faults, fault=lambda number: fates[number % 30])[0]
    for _ in range(data.draw(st.integers(3, 14))):
        what = data.draw(st.sampled_from(["step", "step", "step", "preempt", "leave", "deaf"]))
        name = data.draw(st.sampled_from(["r1", "r2"]))
        if what == "preempt":
            played.preempt(name, data.draw(st.integers(0, 40)))
        elif what == "leave":  # the draft is gone, and another one there
            fresh = Asking([playing.truth for playing in played.requests.values()])
            played.rounds.set_channels({"b": InProcessChannel(fresh)})
            played.hidden.connect([{"name": "b", "kv": HIDDEN}])
        elif what == "deaf":
            played.hidden.connect([])
            assert played.rounds.stats()["hidden_held_bytes"] == 0
        played.step(chunk=data.draw(st.sampled_from([4, 64])), want=data.draw(st.integers(0, 3)))
        played.hidden.connect([{"name": name, "kv": HIDDEN} for name in played.rounds.channels])
        assert played.rounds.stats()["hidden_held_bytes"] <= 2 * max(faults.hidden_positions, 64) * 2 * SIZE


def test_nothing_is_looked_at_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    played, drafter = engine({"r1": 20})
    played.hidden.connect([{"name": "a", "kv": "inline"}])
    monkeypatch.setattr(HiddenStates, "pieces", lambda *given: pytest.fail("the batch was looked at"))
    for _ in range(3):
        played.step()
    assert all(commit.hidden == b"" for commit in drafter.commits)
    assert played.rounds.stats()["hidden_positions"] == 0


def test_what_cannot_be_looked_at_fails_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    played, drafter = engine({"r1": 20})
    played.step()
    monkeypatch.setattr(HiddenStates, "saw", lambda *given: 1 / 0)
    for _ in range(3):
        played.step()
    assert drafter.steps == 4
    assert played.rounds.stats()["hidden_not_sent:failed"] == 1  # then it is left alone
    assert played.rounds.stats()["hidden_held_bytes"] == 0


def test_requests_of_other_drafts_are_left_alone() -> None:
    """One draft of two takes them; and a request that wants no models has no use for them."""
    requests = {f"r{n}": Playing(truth(n), 10) for n in range(12)}
    known = [playing.truth for playing in requests.values()]
    played = Engine(requests, Asking(known))
    plain = Asking(known)
    channels = {"a": InProcessChannel(Asking(known)), "b": InProcessChannel(plain)}
    played.rounds.set_channels(channels)
    for _ in range(3):
        played.step()
    assert plain.commits
    assert all(commit.hidden == b"" for commit in plain.commits)
    served = {commit.session for commit in plain.commits}
    assert 0 < len(served) < 12
    assert not any(played.rounds.takes_hidden(name) for name in served)
    played.rounds.begin("r99", "r99", [1], False, sources=("suffix",))
    assert not played.rounds.takes_hidden("r99")
    assert not played.rounds.takes_hidden("unheard of")


def test_prompts_are_not_announced_to_who_waits_for_hidden_states() -> None:
    played, drafter = engine({"r1": 20})
    played.rounds.announce([("r1", played.requests["r1"].truth[:20], Sampling(0.0, 1), 50)])
    assert drafter.steps == 0
    played.hidden.connect([])
    played.rounds.announce([("r1", played.requests["r1"].truth[:20], Sampling(0.0, 1), 50)])
    assert drafter.steps == 1


def test_no_core_is_lent_to_who_rests_while_the_target_verifies() -> None:
    played, _ = engine({"r1": 20})
    played.step()
    assert not played.rounds.lends
    played.hidden.connect([])
    assert played.rounds.lends


def test_what_is_kept_ends_with_the_request() -> None:
    played, _ = engine({"r1": 20, "r2": 20})
    for _ in range(3):
        played.step()
    assert played.rounds.stats()["hidden_held_bytes"] > 0
    played.rounds.finish(["r1", "r2"])
    assert played.rounds.stats()["hidden_held_bytes"] == 0
    assert played.hidden.rows("r1", 0, 9) == (b"", 0)


def test_of_a_long_prompt_the_end_is_kept() -> None:
    played, drafter = engine({"r1": 120}, replace(FAULTS, hidden_positions=32))
    for _ in range(6):
        played.step(chunk=50)
    first = drafter.commits[0]
    assert (first.length, first.hidden_start) == (121, 88)
    assert drafter.has["r1"] == set(range(88, played.requests["r1"].known - 1))
    assert played.rounds.stats()["hidden_positions"] == len(drafter.has["r1"])


def test_of_what_does_not_fit_a_message_the_end_is_sent() -> None:
    played, drafter = engine({"r1": 30, "r2": 30}, replace(FAULTS, hidden_message_bytes=40 * 2 * SIZE))
    played.step()
    assert sorted(len(commit.hidden) // (2 * SIZE) for commit in drafter.commits) == [10, 30]
    played.step()
    assert all(commit.hidden for commit in drafter.commits)
    stats = played.rounds.stats()
    assert stats["hidden_not_sent:message_full"] == 1


def test_memory_of_all_requests_is_bounded() -> None:
    played = engine({f"r{n}": 60 for n in range(4)}, replace(FAULTS, hidden_bytes=3 * 64 * 2 * SIZE))[0]
    for _ in range(3):
        played.step(want=0)
        assert played.rounds.stats()["hidden_held_bytes"] <= 3 * 64 * 2 * SIZE
    assert played.rounds.stats()["hidden_not_sent:memory"] > 0


@settings(max_examples=60, deadline=None)
@given(most=st.integers(1, 12), puts=st.lists(st.tuples(st.integers(-6, 4), st.integers(1, 20)), max_size=12))
def test_kept_rows_are_those_that_were_put_last(most: int, puts: list[tuple[int, int]]) -> None:
    kept, at = Kept(2, most), 10
    for number, (back, count) in enumerate(puts):
        position = max(0, at + back)
        rows = np.array([[p, number] for p in range(position, position + count)], np.float16)
        kept.put(position, rows)
        at = position + count
        assert kept.count <= most
        start, found = kept.rows(0, 1 << 30)
        assert start == kept.start
        assert found[:, 0].tolist() == list(range(start, start + kept.count))
        assert start + kept.count >= at
        _, latest = kept.rows(max(position, kept.start), at)
        assert (latest[:, 1] == number).all()
        assert len(latest) == min(count, at - kept.start) > 0
        assert kept.rows(at + 50, at + 60)[1].shape == (0, 2)
        assert kept.rows(0, 0)[1].shape == (0, 2)


def test_values_beyond_float16_stay_numbers() -> None:
    hidden = HiddenStates(SIZE, lambda request: True, FAULTS)
    hidden.saw([Piece("r", 0, 1, 2)], torch.tensor([[0.0] * 4, [1e9, -1e9, 1.5, 0.1], [7.0] * 4], dtype=torch.bfloat16))
    data, start = hidden.rows("r", 0, 2)
    rows = np.frombuffer(data, "<f2").reshape(2, SIZE)
    assert start == 0
    assert rows[0, :3].tolist() == [65280.0, -65280.0, 1.5]
