"""The load of ``scripts/cluster_demo`` against a server that behaves as told, and the machines it is run on."""

import argparse
import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.namespaces import Network, NoNamespacesError, remove_left_behind
from scripts.cluster_demo_lib.load import PROMPTS, Answer, Load, throughput
from scripts.cluster_demo_lib.record import phases


def chunk(text: str, reason: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


USAGE = f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 2}})}\n\n"
ERROR = f"data: {json.dumps({'error': {'message': 'lost', 'code': 503}})}\n\n"
DONE = "data: [DONE]\n\n"
WHOLE = json.dumps(
    {"choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
)


@contextlib.contextmanager
def server(status: int, body: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Says the same to everybody; ``body`` that does not end in a line is cut off there."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}", asked
    finally:
        found.shutdown()
        found.server_close()
        thread.join()


def one_answer(status: int, body: str, *, stream: bool) -> Answer:
    with server(status, body) as (url, asked):
        with Load(url, "m", stream_every=1 if stream else 10**6) as load:
            load.clients(2 if not stream else 1)  # client 0 always streams
            while not load.answers:
                threading.Event().wait(0.01)
            load.clients(0)
        assert all(body["temperature"] == 0 and body["messages"][0]["content"] in PROMPTS for body in asked)
        assert load.open == []
        return next(answer for answer in load.answers if answer.streamed == stream)


class TestLoad:
    def test_a_whole_stream(self) -> None:
        found = one_answer(200, chunk("a") + chunk("b", "stop") + USAGE + DONE, stream=True)
        assert (found.text, found.tokens, found.whole, found.refused) == ("ab", 2, True, False)

    @pytest.mark.parametrize(
        "body", [chunk("a"), chunk("a", "stop"), chunk("a") + DONE, chunk("a") + ERROR + DONE, "data: {", ""]
    )
    def test_a_stream_that_ends_early_is_not_whole(self, body: str) -> None:
        found = one_answer(200, body, stream=True)
        assert not found.whole
        assert not found.refused
        assert bool(found.error) == (ERROR in body or body == "data: {")

    @pytest.mark.parametrize("stream", [True, False])
    def test_refused(self, stream: bool) -> None:
        found = one_answer(503, '{"error": {}}', stream=stream)
        assert found.refused
        assert not found.whole

    def test_a_connection_that_breaks_is_an_answer_that_failed(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with Load(f"http://127.0.0.1:{port}", "m") as load:
            load.clients(1)
            while not load.answers:
                threading.Event().wait(0.01)
            load.clients(0)
        assert (load.answers[0].status, load.answers[0].whole) == (0, False)

    def test_the_number_of_clients_follows(self) -> None:
        with server(200, WHOLE) as (url, _), Load(url, "m", stream_every=10**6) as load:
            load.clients(5)
            while len(load.since(0)) < 20:
                threading.Event().wait(0.01)
            load.clients(0)
        assert {answer.prompt for answer in load.answers} <= set(range(len(PROMPTS)))


def test_throughput_counts_the_share_of_each_answer_in_the_window() -> None:
    def answer(started: float, ended: float, tokens: int, whole: bool = True) -> Answer:
        return Answer(0, False, started, ended, 200, "a", tokens, whole)

    found = [answer(0, 10, 20), answer(8, 12, 8), answer(20, 30, 99), answer(0, 10, 50, whole=False)]
    assert throughput(found, 5, 10) == pytest.approx((10 + 4) / 5)
    assert throughput([], 0, 1) == 0


def test_phases() -> None:
    assert phases("1:2,64:0.5") == [(1, 2.0), (64, 0.5)]
    for wrong in ("", "1", "a:1", "1:0", "-1:3", "1:2;3:4"):
        with pytest.raises(argparse.ArgumentTypeError):
            phases(wrong)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    try:
        found = Network(tmp_path)
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield found
    found.close()


class TestMachines:
    def test_a_link_is_cut_and_healed(self, network: Network) -> None:
        one, other = network.add("one"), network.add("other")

        def reach() -> None:
            with socket.create_connection((other.address, port), timeout=1):
                pass

        with network.run(other, lambda: socket.create_server((other.address, 0))) as listener:
            port = listener.getsockname()[1]
            network.run(one, reach)
            network.cut(one, other)
            with pytest.raises(TimeoutError):
                network.run(one, reach)
            reach()  # from here it is still there
            network.heal(one, other)
            network.run(one, reach)

    def test_memory_and_temporary_files_are_its_own(self, network: Network) -> None:
        one, other = network.add("one"), network.add("other")
        for folder in (Path("/dev/shm"), one.temporary):
            name = folder / f"chain-test-{one.address}"
            assert network.run(one, lambda name=name: (name.write_text("x"), name.exists())[1])  # type: ignore[misc]
            assert not name.exists()
            assert not network.run(other, name.exists)

    def test_the_end_of_a_machine_is_that_of_its_processes(self, network: Network) -> None:
        one = network.add("one")
        process = network.run(one, lambda: subprocess.Popen(["sleep", "600"]))
        network.end(one)
        assert process.wait(10) == -9


def test_nothing_is_left_of_what_nobody_left() -> None:
    remove_left_behind(2**22 + 1)  # no process has this id
