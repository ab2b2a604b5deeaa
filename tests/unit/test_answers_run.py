"""Asking, keeping, going on, and reporting, over a small HTTP server whose answers are known."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.answers_lib import cli, statistics
from scripts.answers_lib.client import Client
from scripts.answers_lib.questions import load
from scripts.answers_lib.records import Draft, Record, Store
from scripts.answers_lib.systems import reading, systems

SET = load()
BY_PROMPT = {SET.prompt(q, w): (q, w) for q in SET.questions for w in range(5)}


class Server(ThreadingHTTPServer):
    """The target is right in even wordings; the chain always, and its drafts are right, wrong, right."""

    asked: Counter[str]
    refuses = ""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.headers["Authorization"].removeprefix("Bearer ")
        self.server.asked[name] += 1
        if name == self.server.refuses:
            self._send({"error": {"message": f"no {name} here"}}, 400)
            return
        question, wording = BY_PROMPT.get(body["messages"][0]["content"], (SET.questions[0], 0))
        answering = body["chain"].get("mode") == "answer"
        right = answering or wording % 2 == 0
        answer: dict[str, Any] = {
            "choices": [{"message": {"content": question.gold if right else "never"}}],
            "usage": {"completion_tokens": 10},
        }
        if answering:
            drafts = [
                {"source": f"model:d#{i}", "text": t} for i, t in ((1, "never"), (2, question.gold), (0, question.gold))
            ]
            answer["chain"] = {"answer": {"outcome": "consensus", "decision": "agreed", "drafts": drafts}}
            answer["metrics"] = {"speculative_decoding": {"num_draft_tokens": 6, "num_accepted_draft_tokens": 6}}
        self._send(answer)

    def _send(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quietly."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.asked = Counter()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def run(server: Server, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    code = cli.main(["--url", url, "--each", "1", "--wordings", "3", "--out", str(out), *more])
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_a_run_from_asking_to_the_page(server: Server, tmp_path: Path) -> None:
    code, result = run(server, tmp_path / "a.json", "--systems", "target,draft,majority,chain")
    assert code == 0
    assert result["questions"] == len(SET.instructions)
    figures = {name: row["accuracy"][0] for name, row in result["systems"].items()}
    assert figures == {"target": pytest.approx(2 / 3, abs=1e-3), "draft": 1.0, "majority": 1.0, "chain": 1.0}
    assert result["systems"]["target"]["consistency"][0] < result["systems"]["chain"]["consistency"][0] == 1.0
    assert result["systems"]["chain"]["passes_ratio"][0] == pytest.approx(0.4)
    assert result["outcomes"]["chain"]["consensus"]["requests"] == 3 * len(SET.instructions)
    page = (tmp_path / "a.md").read_text()
    assert "`chain`: accuracy higher than the target's alone (+33.3 points, 95% interval +33.3 to +33.3)." in page
    assert "cpu_ratio" not in result["systems"]["chain"]  # nobody knows what a server elsewhere computes


def test_a_run_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    arguments = ("--systems", "target,chain")
    run(server, tmp_path / "a.json", *arguments)
    before = server.asked.copy()
    assert before["target"] == 3 * len(SET.instructions) + 1  # and the warm-up
    run(server, tmp_path / "a.json", *arguments)
    assert server.asked == before
    (file,) = (tmp_path / "results").glob("answers-*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])  # killed while it wrote
    code, result = run(server, tmp_path / "a.json", *arguments)
    assert (code, result["questions"]) == (0, len(SET.instructions))
    asked_again = server.asked - before
    assert sum(asked_again.values()) == 2 + 2  # two answers were lost; a warm-up each
    run(server, tmp_path / "a.json", *arguments, "--fresh")
    assert server.asked["target"] >= 2 * before["target"]


def test_what_is_refused_is_left_out_with_the_reason(server: Server, tmp_path: Path) -> None:
    server.refuses = "chain"
    code, result = run(server, tmp_path / "a.json", "--systems", "target,draft,chain")
    assert code == 0
    assert result["left_out"] == {"chain": "no chain here"}
    assert list(result["systems"]) == ["target"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--systems", "oracle"], "no system 'oracle'; known: target, draft"),
        (["--kinds", "riddles"], "no kind 'riddles'; known: arithmetic"),
    ],
)
def test_wrong_options(
    server: Server, tmp_path: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(server, tmp_path / "a.json", *arguments)
    assert code == 1
    assert says in capsys.readouterr().out


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert cli.main(["--url", "http://127.0.0.1:9", "--quick", "--out", str(tmp_path / "a.json")]) == 1
    assert "does not answer as an OpenAI endpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("texts", "draft", "majority"),
    [
        (["43", "44", "44"], "43", "44"),
        (["43", "44", "45"], "43", "43"),  # a tie: the first
        (["no idea", "44", "43"], None, "44"),
        (["no idea"], None, None),
        ([], None, None),
    ],
)
def test_drafts_and_their_majority(texts: list[str], draft: str | None, majority: str | None) -> None:
    every, question = systems(3), SET.questions[0]
    drafts = tuple(Draft(f"model:int8#{index}", text) for index, text in enumerate(texts))
    drafts = (Draft("rules", "99"), *drafts[::-1])  # others do not vote, and the order of arrival does not matter
    record = Record(system="chain", question=question.id, wording=0, text="", seconds=1.0, drafts=drafts)
    assert reading(every["draft"], question, record) == draft
    assert reading(every["majority"], question, record) == majority


def test_stores_of_different_settings_do_not_mix(tmp_path: Path) -> None:
    one, other = Store(tmp_path, {"k": 3}), Store(tmp_path, {"k": 4})
    one.begin()
    one.add(Record(system="s", question="q", wording=0, text="t", seconds=1.0))
    assert other.path != one.path
    assert Store(tmp_path, {"k": 3}).records == one.records
    assert Store(tmp_path, {"k": 4}).records == []


@given(st.lists(st.lists(st.sampled_from(["a", "b", None]), min_size=5, max_size=5), min_size=1, max_size=6))
def test_consistency_is_a_share_and_one_only_where_all_agree(readings: list[list[str | None]]) -> None:
    found = statistics.consistency(readings)
    assert ((found >= 0) & (found <= 1)).all()
    for row, share in zip(readings, found, strict=True):
        assert (share == 1.0) == (len(set(row)) == 1 and row[0] is not None)


def test_intervals() -> None:
    values = np.asarray([0.0] * 32 + [1.0] * 32)
    mean, low, high = statistics.interval(values)
    assert mean == 0.5
    assert 0.3 < low < 0.45  # 1.96 standard errors of 64 coins are 0.12
    assert 0.55 < high < 0.7
    assert statistics.interval(values) == (mean, low, high)
    two, least, most = statistics.ratio(2 * np.arange(1.0, 9.0), np.arange(1.0, 9.0))
    assert (two, least, most) == pytest.approx((2.0, 2.0, 2.0))


def test_an_interrupted_run_keeps_its_answers(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, left = Client.ask, iter(range(8))

    def interrupted(self: Client, *arguments: Any) -> Record:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return ask(self, *arguments)

    monkeypatch.setattr(Client, "ask", interrupted)
    code, result = run(server, tmp_path / "a.json", "--systems", "target,chain")
    assert (code, result) == (130, {})  # nothing is whole yet
    monkeypatch.setattr(Client, "ask", ask)
    code, result = run(server, tmp_path / "a.json", "--systems", "target,chain")
    assert (code, result["questions"]) == (0, len(SET.instructions))
    assert server.asked["target"] + server.asked["chain"] == 2 * 2 + 2 * 3 * len(SET.instructions)
