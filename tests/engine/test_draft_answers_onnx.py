"""Whole answers of the real INT4 draft: against a plain loop over the same model, beside sessions, and out of a process."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deployments.chain.faults import FaultPolicy
from deployments.chain.protocol import PROTOCOL_VERSION, Commit, Sampling, Step
from deployments.draft.answers import Answer, read_request
from deployments.draft.choose import choose
from deployments.draft.engine import DraftEngine
from hw.onnx.costs import StepCosts
from hw.onnx.session import OnnxModel
from tests.engine.test_onnx_session import greedy, prompts  # noqa: F401  (a fixture)
from tests.models import model as folder

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model() -> OnnxModel:
    return OnnxModel(folder("draft-int4"), slots=8, context=512)


@pytest.fixture
def drafter(model: OnnxModel) -> DraftEngine:
    # Reading in one call and in slices round INT4 differently: make the engine read prompts in one, as the reference.
    model.costs = StepCosts(0.05, 0.01, 0.001, 0.0001)
    return DraftEngine(model, top_k=4, paced=False, prefill_wait_s=60.0, faults=FaultPolicy(prefill_budget_s=60.0))


def ask(drafter: DraftEngine, prompt: list[int], **more: Any) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    request = {"prompt": prompt, "deadline_s": 300.0, "top_k": 4, **more}
    drafter.write(read_request(request), lambda answer: answers.update({answer.index: answer}))
    return answers


def run(drafter: DraftEngine) -> None:
    while drafter.idle(1e-9):
        pass
    drafter.check_integrity()


def test_a_greedy_answer_is_repeated_argmax(
    drafter: DraftEngine,
    model: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    expected = [greedy(model, 0, prompt, 20) for prompt in prompts]
    answers = [ask(drafter, prompt, length=20) for prompt in prompts]
    run(drafter)  # four requests, four rows a call
    assert [answer[0].tokens for answer in answers] == expected
    for answer in answers:
        ids = np.frombuffer(answer[0].top_ids, "<i4").reshape(20, 4)
        probs = np.frombuffer(answer[0].top_probs, "<f2").reshape(20, 4).astype(np.float32)
        assert ids[:, 0].tolist() == answer[0].tokens
        assert (np.diff(probs, axis=1) <= 0).all()
        assert (probs.sum(axis=1) <= 1.0).all()
    steps = drafter.stats()["answer_steps"]
    assert drafter.stats()["answer_rows"] > 3 * steps


def test_rows_written_together_are_those_written_alone(
    drafter: DraftEngine,
    model: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    """Forked KV is the prompt's: a row of four is what a single row samples with its seed, near ties of INT4 aside."""
    prompt = prompts[0]
    answers = ask(drafter, prompt, k=4, length=24, temperature=0.7, seed=3)
    run(drafter)
    same = 0
    for index in range(4):
        tokens: list[int] = []
        logits = model.prefill(0, prompt, 0)
        while len(tokens) < 24:
            tokens.append(choose(logits, Sampling(0.7, 3 + index), len(prompt) + len(tokens), 0).token)
            logits = model.decode([0], tokens[-1:], [len(prompt) + len(tokens) - 1])[0]
        same += answers[index].tokens == tokens
    assert same >= 3
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 4


def test_a_session_beside_drafts_the_same(
    drafter: DraftEngine,
    model: OnnxModel,
    prompts: list[list[int]],  # noqa: F811
) -> None:
    def drafts(engine: DraftEngine, writing: bool) -> list[list[int]]:
        known, found = list(prompts[1]), []
        commits = [Commit("a", 0, len(known), known, 4)]
        answers = ask(engine, prompts[0], k=3, length=30, temperature=0.7) if writing else {}
        for turn in range(8):
            answer = engine.step(Step(PROTOCOL_VERSION, "t", turn, 60.0, commits, []))
            found.append(answer.drafts[0].tokens)
            for _ in range(4):
                engine.idle(1e-9)
            engine.check_integrity()
            new = [*found[-1][: turn % 5], 260 + turn]
            known += new
            commits = [Commit("a", 0, len(known), new, 4)]
        engine.disconnect("t")
        run(engine)
        assert len(answers) == (3 if writing else 0)
        assert all(not answer.reason for answer in answers.values())
        return found

    assert drafts(drafter, True) == drafts(DraftEngine(model, paced=False, prefill_wait_s=60.0), False)


# --- a process --------------------------------------------------------------------------------------------------------


class Child:
    """A draft process and what it printed."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "deployments.draft.process", "--model", str(folder("draft-int4"))]
        self.process = subprocess.Popen(
            [*command, "--slots", "8", "--context", "512"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self.read()

    def send(self, line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    assert child.close() == 0


def test_a_process_writes_answers_while_it_obeys_other_lines(child: Child, prompts: list[list[int]]) -> None:  # noqa: F811
    assert child.endpoint["vocab_size"] == 49152
    for name in ("one", 2):
        request = {"prompt": prompts[0], "k": 2, "length": 24, "top_k": 3, "deadline_s": 120.0}
        child.send({"write": {"id": name, **request}})
    child.send({"stats": True})
    child.send({"meet": {}})
    lines = [child.read() for _ in range(6)]
    wrote = [line["wrote"] for line in lines if "wrote" in line]
    assert sum("answers_running" in line for line in lines) == 1
    assert {"kv": ""} in lines
    assert sorted((str(line["id"]), line["answer"]["index"]) for line in wrote) == [
        ("2", 0),
        ("2", 1),
        ("one", 0),
        ("one", 1),
    ]
    by_name = {(line["id"], line["answer"]["index"]): line["answer"] for line in wrote}
    for index in range(2):
        answer = by_name["one", index]
        assert len(answer["tokens"]) == 24
        assert len(base64.b64decode(answer["top_ids"])) == 24 * 3 * 4
        assert len(base64.b64decode(answer["top_probs"])) == 24 * 3 * 2


def test_a_process_says_what_it_cannot_do_and_goes_on(child: Child, prompts: list[list[int]]) -> None:  # noqa: F811
    child.send({"write": {"id": "bad", "prompt": [], "k": 1}})
    assert "prompt" in child.read()["wrote"]["error"]
    child.send({"write": {"prompt": [1]}})
    assert "id" in child.read()["wrote"]["error"]
    child.send("[1, 2")
    assert "error" in child.read()
    child.send('{"write": "' + "x" * (5 << 20) + '"}')
    assert "bytes" in child.read()["error"]
    child.send({"write": {"id": "long", "prompt": prompts[0], "k": 3, "length": 400, "deadline_s": 120.0}})
    child.send({"cancel": "long"})
    child.send({"write": {"id": "short", "prompt": prompts[0], "length": 2}})
    answer = child.read()["wrote"]
    assert (answer["id"], len(answer["answer"]["tokens"])) == ("short", 2)
    child.send({"stats": True})
    assert child.read()["answer_slots"] == 0
