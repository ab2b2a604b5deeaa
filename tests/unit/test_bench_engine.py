"""One engine and its draft: child processes, what is asked of them, and the drafts that are wrong on purpose."""

import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Step
from scripts.bench_lib import engine_worker, settings
from scripts.bench_lib.cells import ENGINE_SYSTEMS, Cell
from scripts.bench_lib.child import Child, ChildError
from scripts.bench_lib.engine import ASK_MODEL, EngineBackend, draft_command
from scripts.bench_lib.prompts import Prompt
from scripts.bench_lib.wrong_draft import WrongDrafter, token_of

CORES = settings.Cores.split({0, 1})

# --- child processes --------------------------------------------------------------------------------------------------

ECHO = """
import sys, time
print("noise", flush=True)
for line in sys.stdin:
    print(line.strip() if "die" not in line else exit(3), flush=True)
"""


@pytest.fixture
def child(tmp_path):
    made = Child(
        "echo", [sys.executable, "-c", ECHO], {}, [min(settings.os.sched_getaffinity(0))], tmp_path / "l", tmp_path
    )
    yield made
    made.stop()


def test_a_child_answers_between_noise(child):
    assert child.ask(20, value=1) == {"value": 1}
    with pytest.raises(ChildError, match="echo: broken"):
        child.ask(20, error="broken")
    assert child.ask(20, error=3.0) == {"error": 3.0}  # a counter of errors is no error


def test_a_frozen_child_is_stopped_and_answers_after_thawing(child):
    child.ask(20, value=1)
    child.freeze()
    child.tell(value=2)
    with pytest.raises(ChildError, match="in time"):
        child.answer(0.2)
    child.thaw()
    assert child.answer(20) == {"value": 2}


def test_a_dead_child_is_an_error_with_its_status(child):
    with pytest.raises(ChildError, match="status 3"):
        child.ask(20, die=True)


def test_stopping_a_frozen_child_leaves_no_process(child):
    child.ask(20, value=1)
    child.freeze()
    started = time.monotonic()
    child.stop()
    assert time.monotonic() - started < 10
    assert child._process.returncode in (0, -signal.SIGKILL)


# --- wrong drafts -----------------------------------------------------------------------------------------------------


def test_the_wrong_draft_keeps_the_protocol_and_does_not_repeat_itself():
    drafter = WrongDrafter("wrong", 1000)
    commits = [Commit("a", 1, 3, [1, 2, 3], 4), Commit("b", 1, 3, [1, 2, 3], 2), Commit("c", 1, 1, [1], 0)]
    answer = drafter.step(Step(PROTOCOL_VERSION, "t", 7, 0.1, commits, []))
    assert answer.number == 7
    assert [(d.session, d.base, len(d.tokens)) for d in answer.drafts] == [("a", 3, 4), ("b", 3, 2), ("c", 1, 0)]
    assert all(0 <= token < 1000 for draft in answer.drafts for token in draft.tokens)
    assert answer.drafts[0].tokens[:2] != answer.drafts[1].tokens


def test_a_wrong_draft_can_say_one_word_for_ever():
    drafter = WrongDrafter("wrong", 1000, token=17)
    (draft,) = drafter.step(Step(PROTOCOL_VERSION, "t", 1, 0.1, [Commit("a", 1, 2, [1, 2], 3)], [])).drafts
    assert draft.tokens == [17, 17, 17]
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        WrongDrafter("wrong", 10, token=10)


def test_the_word_must_be_one_token(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {"t": 0, "h": 1, "e": 2, "th": 3, "the": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_of("the", tmp_path) == 4
    with pytest.raises(ValueError, match="2 tokens of this tokenizer"):
        token_of("thet", tmp_path)


@pytest.mark.parametrize(
    ("name", "module", "ends"),
    [
        ("chain", "deployments.draft.process", ["--host", "127.0.0.1"]),
        ("chain_sync", "deployments.draft.process", ["--ahead", "0"]),
        ("wrong_draft", "scripts.bench_lib.wrong_draft", ["--core", "1"]),
        ("always_the", "scripts.bench_lib.wrong_draft", ["--say", " the", "--tokenizer", "TARGET"]),
    ],
)
def test_each_engine_has_its_draft_process(tmp_path, name, module, ends):
    (tmp_path / "config.json").write_text('{"vocab_size": 500}')
    engine = settings.engine_settings(name, tmp_path, CORES, "eager", settings.ChainBounds())
    command = draft_command(engine, Path("d"), CORES.draft)
    assert command[command.index("-m") + 1] == module
    assert command[-len(ends) :] == [str(tmp_path) if word == "TARGET" else word for word in ends]
    assert ("--ahead" in command) == (name == "chain_sync")
    assert command[command.index("--core") + 1] == "1"


# --- what the parent asks ---------------------------------------------------------------------------------------------


class FakeChild:
    """Notes what it is asked; its counters grow by one with every reading."""

    def __init__(self):
        self.asked = []
        self.frozen = True
        self.readings = 0

    def ask(self, timeout_s, **command):
        assert not self.frozen
        self.asked.append(command)
        if command.get("stats"):
            self.readings += 1
            return {"cache_hits": 10.0 * self.readings, "cache_misses": 5.0 * self.readings, "error": 1.0}
        one = {"tokens": 4, "drafted": 2, "accepted": 1, "verifies": 2}
        requests = [one for group in command.get("groups", []) for _ in group]
        return {"seconds": 2.0, "cpu_seconds": 1.0, "requests": requests, "overhead_ms": [], "stats": {"rounds": 3.0}}

    def cpu_seconds(self):
        return 1.0

    def freeze(self):
        self.frozen = True

    def thaw(self):
        self.frozen = False


def prompts(count):
    return [Prompt(f"p{i}", "prose", ({"role": "user", "content": str(i)},)) for i in range(count)]


@pytest.fixture
def backend(tmp_path):
    engine = settings.engine_settings("chain", tmp_path, CORES, "eager", settings.ChainBounds())
    made = EngineBackend(engine, CORES, tmp_path, tmp_path)
    made._children = [FakeChild(), FakeChild()]
    return made


def test_cells_in_a_row_forget_once_and_freeze_at_the_end(backend):
    work = [(Cell("prose", 2, 0.0, "length", 4), prompts(4)), (Cell("prose", 4, 0.0, "eos", 9), prompts(4))]
    samples = backend.measure(work, ENGINE_SYSTEMS["chain_model"], 1, prompts(1)[0])
    worker, draft = backend._children
    settle, first, second = worker.asked
    assert (settle["command"], settle["asks_model"], settle["chain"]) == ("settle", True, ASK_MODEL)
    assert [(run["command"], run["forget"], run["ignore_eos"]) for run in (first, second)] == [
        ("run", True, True),
        ("run", False, False),
    ]
    assert [len(group) for group in first["groups"]] == [2, 2]
    assert json.loads(first["chain"]) == {"enabled": True, "sources": ["model"], "tenant": "bench"}
    assert [(s.cell, s.repetition, len(s.requests)) for s in samples] == [(cell, 1, 4) for cell, _ in work]
    assert samples[0].draft_stats == {"cache_hits": 10.0, "cache_misses": 5.0, "error": 0.0}
    assert worker.frozen
    assert draft.frozen


def test_an_engine_that_asks_no_draft_settles_without_one(backend):
    for name in ("chain_off", "chain_suffix"):
        backend.measure([(Cell("prose", 1, 0.0, "length", 4), prompts(1))], ENGINE_SYSTEMS[name], 0, prompts(1)[0])
    asked = [command for command in backend._children[0].asked if command["command"] == "settle"]
    assert [command["asks_model"] for command in asked] == [False, False]
    assert [json.loads(command["chain"]) for command in asked] == [
        {"enabled": False},
        {"enabled": True, "sources": ["suffix"]},
    ]


# --- inside the engine's process --------------------------------------------------------------------------------------


class SettlingEngine(engine_worker.Engine):
    """An engine whose counters follow a script: one reading before and one after each answer."""

    def __init__(self, readings):
        super().__init__()
        self.readings = iter(readings)
        self.answers = 0

    def _stats(self):
        return next(self.readings)

    def _params(self, *arguments):
        return None

    def _answer(self, groups, params):
        self.answers += 1


def grown(counter):
    return [{}, {counter: 1.0}]


@pytest.mark.parametrize(
    ("readings", "answers"),
    [
        (grown("drafted_tokens"), 1),
        (grown("miss:deadline_missed") + grown("miss:not_sent") + grown("drafted_tokens"), 3),
        (grown("miss:not_worth_asking") * 3, 3),  # it could ask and does not
        (grown("x") * 2 + grown("miss:circuit_open") + grown("x") * 3, 6),
        ([{}, {"drafts_usable": 0.0}] * 2 + grown("drafted_tokens"), 3),
    ],
)
def test_an_engine_settles_once_its_draft_could_answer(monkeypatch, readings, answers):
    monkeypatch.setattr(engine_worker, "SETTLE_PAUSE_S", 0.0)
    engine = SettlingEngine(readings)
    engine.settle([], 8, ASK_MODEL, asks_model=True)
    assert engine.answers == answers


def test_a_draft_that_stays_silent_is_an_error(monkeypatch):
    monkeypatch.setattr(engine_worker, "SETTLE_PAUSE_S", 0.0)
    engine = SettlingEngine(grown("miss:deadline_missed") * engine_worker.SETTLE_TRIES)
    with pytest.raises(RuntimeError, match="does not answer"):
        engine.settle([], 8, ASK_MODEL, asks_model=True)


def test_an_engine_without_a_draft_settles_with_one_answer():
    engine = SettlingEngine(grown("x"))
    engine.settle([], 8, None, asks_model=False)
    assert engine.answers == 1


def test_counters_are_differences_and_costs_are_means():
    before = {"rounds": 10.0, "verify_ms": 20.0, "dropped:late": 1.0}
    after = {"rounds": 14.0, "verify_ms": 18.0, "wait_ms": 2.0, "dropped:late": 1.0}
    assert engine_worker.since(before, after) == {
        "rounds": 4.0,
        "verify_ms": 18.0,
        "wait_ms": 2.0,
        "dropped:late": 0.0,
    }


class FakeLlm:
    """Just enough of ``vllm.LLM`` to be told to forget."""

    def __init__(self, worker):
        self.called = []
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def collective_rpc(self, name):
        self.called.append(name)
        return [None]


def test_every_suffix_memory_is_emptied():
    cache = SimpleNamespace(cached_requests={"warm": 1, "old": 2}, evicted=[])
    cache.evict_cached_response = cache.evicted.append
    vllms = SimpleNamespace(model_runner=SimpleNamespace(drafter=SimpleNamespace(suffix_cache=cache)))
    engine = engine_worker.Engine()
    engine._llm, engine._suffix_kept = FakeLlm(vllms), {"warm"}
    engine._forget_outputs()
    assert (cache.evicted, engine._llm.called) == (["old"], [])

    ours = SimpleNamespace(model_runner=SimpleNamespace(), draft_stats=dict)
    engine._llm = FakeLlm(ours)
    engine._forget_outputs()
    assert engine._llm.called == ["forget_outputs"]
